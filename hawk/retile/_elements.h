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

static int group_of(int codec) { return codec >= MXE4M3 ? MX_GROUP : GROUP; }

struct loop {
    int64_t ext, src, dst, row, col;
};

/* What a kernel needs: the two pages, and the unit. */
struct work {
    const uint8_t *src;
    uint8_t *dst;
    int64_t src_header, dst_header;
    int src_codec, dst_codec, width; /* width: bytes of an element where both codecs are the same */
    int stream;                      /* the target's words are aligned and go past the caches */
    int64_t unit;                    /* elements of a unit */
    int64_t us, ud;                  /* the unit's strides; us is 0 where it has more than one */
    int64_t apart;                   /* distance of the two source runs of a woven unit, else 0 */
    int64_t at[MX_GROUP], col[MX_GROUP];   /* source offsets and dims of a group's elements */
};

typedef void (*kernel)(const struct work *, int64_t s, int64_t d, int64_t n, int64_t ss, int64_t ds);

static ALWAYS uint16_t get16(const void *p) { uint16_t x; memcpy(&x, p, 2); return x; }
static ALWAYS uint32_t get32(const void *p) { uint32_t x; memcpy(&x, p, 4); return x; }
static ALWAYS void put16(void *p, uint16_t x) { memcpy(p, &x, 2); }
static ALWAYS void put32(void *p, uint32_t x) { memcpy(p, &x, 4); }

static ALWAYS uint32_t to_bf16(uint32_t x)
{
    uint32_t rounded = (x + 0x7fff + (x >> 16 & 1)) >> 16;
    return (x & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded;
}

static ALWAYS uint32_t from_fp16(uint32_t x)
{
    uint32_t sign = (x & 0x8000) << 16, e = x >> 10 & 31, m = x & 0x3ff;
    if (e == 31)
        return sign | 0x7f800000 | m << 13;
    if (e)
        return sign | (e + 112) << 23 | m << 13;
    if (!m)
        return sign;
    int up = __builtin_clz(m) - 21; /* brings the leading 1 to bit 10 */
    return sign | (uint32_t)(113 - up) << 23 | (m << up & 0x3ff) << 13;
}

static ALWAYS uint32_t to_fp16(uint32_t x)
{
    uint32_t sign = x >> 16 & 0x8000, size = x & 0x7fffffff, e = size >> 23;
    if (size > 0x7f800000)
        return 0x7e00;
    if (e >= 143)
        return sign | 0x7c00;
    uint32_t sig = (size & 0x7fffff) | 0x800000, drop = e >= 113 ? 13 : 126 - e < 25 ? 126 - e : 25;
    uint32_t kept = sig >> drop, rest = sig & ((1u << drop) - 1), half = 1u << (drop - 1);
    kept += rest > half || (rest == half && (kept & 1));
    /* A normal significand brings its hidden 1 along, which adds one to the exponent's field. */
    return sign | (e >= 113 ? ((e - 113) << 10) + kept : kept);
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

/* The aligned group at position `s`, without branches where no value is denormal. */
static ALWAYS void decode_group(const struct work *w, int bits, int64_t s, uint32_t *y)
{
    const uint8_t *from = w->src + w->src_header + s * bits / 8;
    uint32_t exponent = w->src[s / GROUP], code[GROUP];
    int keep = bits - 1;
    for (int k = 0; k < GROUP; k++)
        code[k] = bits == 8 ? from[k] : from[k / 2] >> (k & 1) * 4 & 15;
    if ((int)exponent < keep) { /* the smallest magnitude would be denormal */
        for (int k = 0; k < GROUP; k++)
            y[k] = decode_one(bits, exponent, code[k]);
        return;
    }
    int32_t scale = ((int32_t)exponent - 126 - keep) * (1 << 23);
    for (int k = 0; k < GROUP; k++) {
        uint32_t m = code[k] & ((1u << keep) - 1), bits32;
        float value = (float)(int32_t)m; /* exact; the scale is added to its exponent as an integer */
        memcpy(&bits32, &value, 4);
        bits32 += (uint32_t)scale;
        bits32 = bits32 < 0x7f800000 ? bits32 : 0x7f800000;
        y[k] = (m ? bits32 : 0) | code[k] >> keep << 31;
    }
}
