// The part of tt-metal's dataflow API that HAWK's kernel calls, on the host: banks are one array, the network is late.
//
// Ours, for tests: names, arguments and rules are tt-metal's.  A read arrives at the read barrier and not before, and
// until then its place holds other bytes; a write takes its bytes as late as it may, when writes are flushed.  So a
// barrier that is missing is seen in the bytes.  What the chip leaves undefined ends the run with a number; so does a
// write of bytes that the core stored itself and has not looked at since, for the network may be faster than its stores.
#pragma once

#include <sys/mman.h>

#include <cstdint>
#include <cstring>

namespace stand_in {

constexpr uint32_t compile_time[] = {COMPILE_TIME_ARGS};
constexpr uint32_t L1 = 1 << 20;
constexpr uint32_t ODD = 48;  // circular buffers begin at multiples of 16, no more

struct Transfer {
    uint32_t bank;
    uint64_t address;
    uint32_t local;
    uint32_t bytes;
};

struct Fault {
    int number;
};

// Transfers that are under way, in order.
struct Queue {
    static constexpr uint32_t ROOM = 4096;
    Transfer held[ROOM];
    uint32_t count = 0;

    void add(Transfer one) {
        if (count == ROOM) {
            throw Fault{7};
        }
        held[count++] = one;
    }
    const Transfer* begin() const { return held; }
    const Transfer* end() const { return held + count; }
};

inline uint8_t* banks;
inline uint64_t bank_bytes, first;
inline uint32_t bank_count;
inline const uint32_t* arguments;
inline uint8_t* l1;
inline uint32_t room;
inline Queue reads, writes;
inline uint8_t there[1 << 20];  // what the network finds in this core's memory

inline uint8_t* place(uint32_t bank, uint64_t address, uint32_t bytes) {
    if (bank >= bank_count || address < first || address + bytes > first + bank_bytes) {
        throw Fault{1};  // no such memory
    }
    return banks + bank * bank_bytes + (address - first);
}

inline uint8_t* local(uint32_t address, uint32_t bytes) {
    const uint32_t start = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(l1)) + ODD;
    if (address < start || address + bytes > start + room) {
        throw Fault{2};  // not this kernel's memory
    }
    return reinterpret_cast<uint8_t*>(static_cast<uintptr_t>(address));
}

inline void look() { std::memcpy(there, l1 + ODD, room); }

inline void require_same(uint64_t a, uint64_t b, uint64_t alignment, int number) {
    if ((a ^ b) & (alignment - 1)) {
        throw Fault{number};
    }
}

}  // namespace stand_in

#define get_compile_time_arg_val(i) (stand_in::compile_time[i])

template <typename T>
T get_arg_val(int i) {
    return static_cast<T>(stand_in::arguments[i]);
}

inline uint32_t get_write_ptr(uint32_t) {
    return static_cast<uint32_t>(reinterpret_cast<uintptr_t>(stand_in::l1)) + stand_in::ODD;
}

template <bool DRAM>
uint64_t get_noc_addr_from_bank_id(uint32_t bank, uint32_t address) {
    static_assert(DRAM, "banks are DRAM's here");
    return (static_cast<uint64_t>(bank) << 40) | address;
}

inline void noc_async_read(uint64_t from, uint32_t to, uint32_t bytes) {
    const uint32_t bank = from >> 40;
    const uint64_t address = from & ((1ull << 40) - 1);
    stand_in::require_same(address, to, stand_in::compile_time[2], 3);
    stand_in::place(bank, address, bytes);
    std::memset(stand_in::local(to, bytes), 0xEE, bytes);
    stand_in::reads.add({bank, address, to, bytes});
}

inline void noc_async_read_barrier() {
    for (const auto& one : stand_in::reads) {
        const uint8_t* from = stand_in::place(one.bank, one.address, one.bytes);
        std::memcpy(stand_in::local(one.local, one.bytes), from, one.bytes);
    }
    stand_in::reads.count = 0;
    stand_in::look();
}

inline void invalidate_l1_cache() { stand_in::look(); }

inline void noc_async_write(uint32_t from, uint64_t to, uint32_t bytes) {
    const uint32_t bank = to >> 40;
    const uint64_t address = to & ((1ull << 40) - 1);
    stand_in::require_same(address, from, 16, 4);
    stand_in::place(bank, address, bytes);
    const uint8_t* stored = stand_in::local(from, bytes);
    if (std::memcmp(stored, stand_in::there + (stored - stand_in::l1 - stand_in::ODD), bytes) != 0) {
        throw stand_in::Fault{8};
    }
    stand_in::writes.add({bank, address, from, bytes});
}

inline void noc_async_writes_flushed() {
    for (const auto& one : stand_in::writes) {
        uint8_t* to = stand_in::place(one.bank, one.address, one.bytes);
        std::memcpy(to, stand_in::local(one.local, one.bytes), one.bytes);
    }
    stand_in::writes.count = 0;
}

inline void noc_async_write_barrier() { noc_async_writes_flushed(); }

void kernel_main();

// Runs the kernel on one core; 0, or the number of what it did wrong.
extern "C" int run(
    uint8_t* banks, uint32_t count, uint64_t bytes, uint64_t first, const uint32_t* arguments, uint32_t room) {
    using namespace stand_in;
    stand_in::banks = banks;
    bank_count = count;
    bank_bytes = bytes;
    stand_in::first = first;
    stand_in::arguments = arguments;
    stand_in::room = room;
    void* made = mmap(nullptr, L1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_32BIT, -1, 0);
    if (made == MAP_FAILED || room > L1 - ODD) {
        return 5;
    }
    l1 = static_cast<uint8_t*>(made);
    std::memset(l1, 0xEE, L1);
    reads.count = 0;
    writes.count = 0;
    int wrong = 0;
    try {
        kernel_main();
        if (reads.count || writes.count) {
            wrong = 6;  // ended while bytes were under way
        }
    } catch (const Fault& fault) {
        wrong = fault.number;
    }
    munmap(made, L1);
    return wrong;
}
