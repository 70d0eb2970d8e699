// Moves bytes from place to place inside one DRAM bank: they are read into this core's memory and written back.
//
// Runtime arguments
//   0  bank       number of the bank, the allocator's
//   1  table      address in that bank of this core's moves, a multiple of 64
//   2  count      how many there are
// Arguments at compile time
//   0  PIECE      bytes of a move at most, a multiple of ALIGN
//   1  SLOTS      moves that are under way at a time, a multiple of 4
//   2  ALIGN      a read's two addresses agree below this power of two: 64 or 32 by the chip
//
// A move is four words: source and target, which are addresses in the bank, bytes, and a word that is not looked at.
// Moves may be done in any order, so no target may overlap a source or another target: the host has looked.
//
// While one batch of SLOTS moves is written the next one is read, and the list of the one after that.  So this core's
// memory (circular buffer 0, of which nothing but the memory is used) holds two lists and two batches.
#include <cstdint>

#include "api/dataflow/dataflow_api.h"

namespace {

constexpr uint32_t PIECE = get_compile_time_arg_val(0);
constexpr uint32_t SLOTS = get_compile_time_arg_val(1);
constexpr uint32_t ALIGN = get_compile_time_arg_val(2);
constexpr uint32_t WRITE_ALIGN = 16;  // a write's two addresses agree below this, on every chip
constexpr uint32_t WORDS = 4;
constexpr uint32_t LIST = SLOTS * WORDS * sizeof(uint32_t);
constexpr uint32_t SLOT = PIECE + ALIGN;  // a piece may begin anywhere below ALIGN
constexpr uint32_t BATCH = SLOTS * SLOT;

uint32_t bank, table, count;
uint32_t lists, slots;

uint32_t moves_of(uint32_t batch) {
    const uint32_t left = count - batch * SLOTS;
    return left < SLOTS ? left : SLOTS;
}

volatile uint32_t* list_of(uint32_t batch) {
    return reinterpret_cast<volatile uint32_t*>(static_cast<uintptr_t>(lists + batch % 2 * LIST));
}

uint32_t slot_of(uint32_t batch, uint32_t i) { return slots + batch % 2 * BATCH + i * SLOT; }

void read_list(uint32_t batch) {
    if (batch * SLOTS >= count) {
        return;
    }
    const uint32_t bytes = moves_of(batch) * WORDS * sizeof(uint32_t);
    noc_async_read(get_noc_addr_from_bank_id<true>(bank, table + batch * LIST), lists + batch % 2 * LIST, bytes);
}

void read_batch(uint32_t batch) {
    if (batch * SLOTS >= count) {
        return;
    }
    volatile uint32_t* move = list_of(batch);
    for (uint32_t i = 0; i < moves_of(batch); ++i, move += WORDS) {
        const uint32_t source = move[0];
        const uint32_t to = slot_of(batch, i) + source % ALIGN;
        noc_async_read(get_noc_addr_from_bank_id<true>(bank, source), to, move[2]);
    }
}

// Bytes that lie otherwise below WRITE_ALIGN than their target: this core shifts them inside their slot.
uint32_t shifted(uint32_t slot, uint32_t from, uint32_t target, uint32_t bytes) {
    const uint32_t to = slot + target % WRITE_ALIGN;
    auto* source = reinterpret_cast<volatile uint8_t*>(static_cast<uintptr_t>(from));
    auto* place = reinterpret_cast<volatile uint8_t*>(static_cast<uintptr_t>(to));
    uint32_t last = 0;
    uint8_t byte = 0;
    if (to < from) {
        for (uint32_t i = 0; i < bytes; ++i) {
            last = i;
            place[i] = byte = source[i];
        }
    } else {
        for (uint32_t i = bytes; i-- > 0;) {
            last = i;
            place[i] = byte = source[i];
        }
    }
    // Stores to this memory are done in order, but behind those that start the network (which are to other memory): it
    // would send what was there before.  What was stored last is read, and waited for, so that all of it is there.
    invalidate_l1_cache();
    while (place[last] != byte) {
    }
    return to;
}

void write_batch(uint32_t batch) {
    volatile uint32_t* move = list_of(batch);
    for (uint32_t i = 0; i < moves_of(batch); ++i, move += WORDS) {
        const uint32_t source = move[0], target = move[1], bytes = move[2];
        uint32_t from = slot_of(batch, i) + source % ALIGN;
        if ((source ^ target) % WRITE_ALIGN) {
            from = shifted(slot_of(batch, i), from, target, bytes);
        }
        noc_async_write(from, get_noc_addr_from_bank_id<true>(bank, target), bytes);
    }
}

}  // namespace

void kernel_main() {
    bank = get_arg_val<uint32_t>(0);
    table = get_arg_val<uint32_t>(1);
    count = get_arg_val<uint32_t>(2);
    lists = (get_write_ptr(0) + ALIGN - 1) / ALIGN * ALIGN;
    slots = lists + 2 * LIST;
    read_list(0);
    noc_async_read_barrier();
    read_batch(0);
    read_list(1);
    for (uint32_t batch = 0; batch * SLOTS < count; ++batch) {
        noc_async_read_barrier();     // this batch, and the list of the next, are here
        noc_async_writes_flushed();   // the batch before has left, whose half the next one takes
        write_batch(batch);
        read_batch(batch + 1);
        read_list(batch + 2);
    }
    noc_async_write_barrier();
}
