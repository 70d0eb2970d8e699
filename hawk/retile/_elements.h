/* Elements and their codecs, one value at a time: the definitions of `layouts/codecs.py` in C. */
#include <stdint.h>
#include <string.h>
/* X86 lets intrinsics stand; everything has a plain twin, which HAWK_PLAIN asks for. */
#if defined(__x86_64__) && !defined(HAWK_PLAIN)
#define X86
#include <immintrin.h>
#endif

#define ALWAYS inline __attribute__((always_inline))
#define MAX_LOOPS 16
#define GROUP 16
#define MX_GROUP 32

/* From BFP8 on groups share an exponent, from MXE4M3 on of twice the size; from E4M3 to INT8 an element has eight bits. */
enum { BF16, FP16, FP32, E4M3, E5M2, INT8, BFP8, BFP4, MXE4M3, MXE5M2, MXE2M1, CODECS };
enum { SRC_CHANNEL, SRC_PAGE, SRC_START, DST_CHANNEL, DST_PAGE, DST_START, LO, HI, COLS, COLUMNS };
enum { CHECK_ONLY = 1, STREAM = 2 };

static const int BITS[CODECS] = {16, 16, 32, 8, 8, 8, 8, 4, 8, 8, 4};

static int group_of(int codec) { return codec >= MXE4M3 ? MX_GROUP : codec >= BFP8 ? GROUP : 1; }

struct loop {
    int64_t ext, src, dst, row, col;
};

/* The two pages of a piece, and their codecs.  `same`: bits are copied, whatever they mean. */
struct work {
    const uint8_t *src;
    uint8_t *dst;
    int64_t src_header, dst_header;
    int src_codec, dst_codec, same;
    float src_factor, dst_factor;
};

/* Words at any address. */
typedef uint16_t u16 __attribute__((aligned(1), may_alias));
typedef uint32_t u32 __attribute__((aligned(1), may_alias));

static ALWAYS uint16_t get16(const void *p) { uint16_t x; memcpy(&x, p, 2); return x; }
static ALWAYS uint32_t get32(const void *p) { uint32_t x; memcpy(&x, p, 4); return x; }
static ALWAYS uint64_t get64(const void *p) { uint64_t x; memcpy(&x, p, 8); return x; }
static ALWAYS void put16(void *p, uint16_t x) { memcpy(p, &x, 2); }
static ALWAYS void put32(void *p, uint32_t x) { memcpy(p, &x, 4); }
static ALWAYS void put64(void *p, uint64_t x) { memcpy(p, &x, 8); }
static ALWAYS uint32_t bits_of(float f) { uint32_t x; memcpy(&x, &f, 4); return x; }
static ALWAYS float float_of(uint32_t x) { float f; memcpy(&f, &x, 4); return f; }

/* The following have no branches, so that the compiler can do many at once.  A whole number becomes a float exactly,
 * and its scale is added to the exponent's field: so denormals are never the operands of float arithmetic, which other
 * code in the process may have told to flush them. */

static ALWAYS uint32_t to_bf16(uint32_t x)
{
    uint32_t rounded = (x + 0x7fff + (x >> 16 & 1)) >> 16;
    return (x & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded;
}

/* All ones or nothing: choices that must not become branches, for what they choose from is float arithmetic, which the
 * compiler does not carry out for nothing. */
static ALWAYS uint32_t where(int yes) { return 0u - (uint32_t)(yes != 0); }
static ALWAYS uint32_t choose(uint32_t mask, uint32_t yes, uint32_t no) { return (yes & mask) | (no & ~mask); }

/* m * 2^-down for a whole m < 2^24, where that is normal. */
static ALWAYS uint32_t scaled_down(uint32_t m, uint32_t down)
{
    return (bits_of((float)(int32_t)m) - (down << 23)) & where(m != 0);
}

static ALWAYS uint32_t from_fp16(uint32_t x)
{
    uint32_t sign = (x & 0x8000) << 16, size = x & 0x7fff;
    uint32_t normal = (size << 13) + (112u << 23) + (where(size >= 0x7c00) & 112u << 23);
    return sign | choose(where(size < 0x400), scaled_down(size & 0x3ff, 24), normal);
}

/* sig, 24 bits, without its lower `drop` bits, 1 to 25: to nearest, ties to even. */
static ALWAYS uint32_t rounded(uint32_t sig, uint32_t drop)
{
    return (sig + ((1u << (drop - 1)) - 1) + (sig >> drop & 1)) >> drop;
}

static ALWAYS uint32_t to_fp16(uint32_t x)
{
    uint32_t sign = x >> 16 & 0x8000, size = x & 0x7fffffff, e = size >> 23;
    uint32_t sig = (size & 0x7fffff) | 0x800000, low = e < 113 ? 113 - e : 0;
    uint32_t kept = rounded(sig, 13 + (low < 12 ? low : 12));
    /* A normal significand brings its hidden 1 along, which adds one to the exponent's field. */
    uint32_t found = (e >= 113 ? (e - 113) << 10 : 0) + kept;
    found = e >= 143 ? 0x7c00 : found;
    return size > 0x7f800000 ? 0x7e00 : sign | found;
}

/* +-m * 2^(E - 126 - bits) of a sign-and-magnitude code. */
static ALWAYS uint32_t decode_one(int bits, uint32_t exponent, uint32_t code)
{
    int keep = bits - 1;
    uint32_t m = code & ((1u << keep) - 1), sign = code >> keep << 31;
    if (!m)
        return sign;
    int top = 31 - __builtin_clz(m), e = (int)exponent + 1 - keep + top;
    if (e >= 255)
        return sign | 0x7f800000;
    if (e <= 0)
        return sign | m << (exponent + 23 - (uint32_t)keep);
    return sign | (uint32_t)e << 23 | (m << (23 - top) & 0x7fffff);
}
