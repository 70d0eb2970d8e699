/* What a generated kernel stands on, on a CPU: blocks in any order, in each phase all its threads in any order, shared memory
 * full of rubbish at the start.  An access that a GPU would not make, or that leaves the memory that was given, is left out
 * and counted as a fault.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
typedef int32_t i32;
typedef int64_t i64;

#define FN static inline __attribute__((unused))
#define SLOW static __attribute__((unused))
#define UNROLL
#define SOME
#define FEW

static u32 seed;
static i64 faults;

/* What may be touched: what is written, `outs` of it, then what is read, then shared memory. */
static struct { u64 begin, end; } given[256];
static u32 givens, outs;

static int allowed(u64 at, u64 n, u32 first, u32 last)
{
    for (u32 i = first; i < last; i++)
        if (at % n == 0 && at >= given[i].begin && at + n <= given[i].end)
            return 1;
    faults++;
    return 0;
}

static u32 chance(void)
{
    seed ^= seed << 13, seed ^= seed >> 17, seed ^= seed << 5;
    return seed;
}

static void shuffle(u32 *order, u32 n)
{
    for (u32 i = 0; i < n; i++)
        order[i] = i;
    for (u32 i = n; i > 1; i--) {
        u32 k = chance() % i, t = order[i - 1];
        order[i - 1] = order[k], order[k] = t;
    }
}

#define KERNEL(NAME, ARGUMENT) static void NAME(u32 block, u8 *shared, ARGUMENT)
#define PHASES(ROOM)                                                                                                     \
    {                                                                                                                    \
        u8 *ROOM = shared;                                                                                               \
        u32 order[THREADS];                                                                                              \
        shuffle(order, THREADS);                                                                                         \
        for (u32 number = 0; number < THREADS; number++) {                                                               \
            const u32 thread = order[number];
#define BARRIER                                                                                                          \
    }                                                                                                                    \
    shuffle(order, THREADS);                                                                                             \
    for (u32 number = 0; number < THREADS; number++) {                                                                   \
        const u32 thread = order[number];
#define END                                                                                                              \
    }                                                                                                                    \
    }

static inline float TO_FLOAT(u32 x) { float f; memcpy(&f, &x, 4); return f; }
static inline u32 TO_BITS(float f) { u32 x; memcpy(&x, &f, 4); return x; }
FN double TO_DOUBLE(u64 x) { double d; memcpy(&d, &x, 8); return d; }
FN u64 DOUBLE_BITS(double d) { u64 x; memcpy(&x, &d, 8); return x; }
#define TIMES(a, b) ((a) * (b))
#define OVER(a, b) ((a) / (b))
#define WIDENED(real) ((double)(real))
#define NARROWED(real) ((float)(real))
#define SHIFTED_UP(x, by) ((by) < 32 ? (u32)(x) << (by) : 0)
#define FUSED(a, b, c) __builtin_fmaf(a, b, c)
#define TIMES_PLUS(a, b, c) ((a) * (b) + (c)) /* where the product is exact, as it is wherever this stands */

static inline u32 PERMUTE(u32 a, u32 b, u32 which)
{
    u64 both = (u64)b << 32 | a;
    u32 found = 0;
    for (int i = 0; i < 4; i++)
        found |= (u32)(both >> (which >> 4 * i & 7) * 8 & 0xff) << 8 * i;
    return found;
}
static inline u32 LARGER_HALVES(u32 a, u32 b)
{
    u32 low = (a & 0xffff) > (b & 0xffff) ? a & 0xffff : b & 0xffff, high = a >> 16 > b >> 16 ? a >> 16 : b >> 16;
    return high << 16 | low;
}

#define READ(NAME, TYPE, N, FIRST, LAST)                                                                                 \
    FN void NAME(u32 *t, TYPE at)                                                                                        \
    {                                                                                                                    \
        memset(t, 0, N < 4 ? 4 : N);                                                                                     \
        if (allowed((u64)at, N, FIRST, LAST))                                                                            \
            memcpy(t, (const void *)at, N);                                                                              \
    }
#define WRITE(NAME, TYPE, N, FIRST, LAST)                                                                                \
    FN void NAME(TYPE at, const u32 *t)                                                                                  \
    {                                                                                                                    \
        if (allowed((u64)at, N, FIRST, LAST))                                                                            \
            memcpy((void *)at, t, N);                                                                                    \
    }
#define WIDTH(N)                                                                                                         \
    READ(load##N, u64, N, outs, givens - 1)                                                                              \
    WRITE(store##N, u64, N, 0, outs)                                                                                       \
    READ(get##N, const u8 *, N, givens - 1, givens)                                                                      \
    WRITE(put##N, u8 *, N, givens - 1, givens)
WIDTH(16)
WIDTH(8)
WIDTH(4)
WIDTH(2)
WIDTH(1)
FN u32 kept4(u64 at)
{
    u32 t;
    load4(&t, at);
    return t;
}
#define GET_ADDRESS(at) (*(const u64 *)(at))
#define PUT_ADDRESS(at, value) (*(u64 *)(at) = (value))
#define TABLE(type, at) ((const type *)(at))
#define LOOK(pointer) (*(pointer))
