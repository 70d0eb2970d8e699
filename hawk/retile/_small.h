/* Elements of eight bits: the definitions of `layouts/small.py` in C, and tables made of them when the module loads. */
#include "_elements.h"

enum { SMALLS = INT8 - E4M3 + 1 };

/* By codec and code: the value in each wider codec, exact in all of them (BF16 and FP16 come first); by 16-bit codec
 * and word: the code. */
static uint32_t small_fp32[SMALLS][256];
static uint16_t small_16[2][SMALLS][256];
static uint8_t from_16[2][SMALLS][65536];

static ALWAYS uint32_t rounded(uint32_t sig, int drop)
{
    uint32_t kept = sig >> drop, rest = sig & ((1u << drop) - 1), half = 1u << (drop - 1);
    return kept + (rest > half || (rest == half && (kept & 1)));
}

/* A finite magnitude as sig * 2^(e - 23) with sig in [2^23, 2^24), or 0. */
static ALWAYS uint32_t parts(uint32_t size, int *e)
{
    *e = (int)(size >> 23) - 127;
    if (*e > -127)
        return (size & 0x7fffff) | 0x800000;
    if (!size)
        return 0;
    int up = __builtin_clz(size) - 8;
    *e = -126 - up;
    return size << up;
}

/* The code of x * 2^lift. */
static ALWAYS uint8_t to_float(uint32_t x, int lift, int exponent_bits, int mantissa_bits, uint32_t largest, uint32_t infinity,
                               uint32_t nan)
{
    uint32_t sign = x >> 31 << (exponent_bits + mantissa_bits), size = x & 0x7fffffff;
    if (size > 0x7f800000)
        return (uint8_t)nan;
    if (size == 0x7f800000)
        return (uint8_t)(sign | infinity);
    int e;
    uint32_t sig = parts(size, &e);
    e += lift;
    int least = 2 - (1 << (exponent_bits - 1)), low = least > e ? least - e : 0;
    /* So many of the 24 bits fall away; from 25 on nothing but 0 is left. */
    int drop = 23 - mantissa_bits + low;
    uint32_t kept = rounded(sig, drop < 25 ? drop : 25);
    if (!kept)
        return (uint8_t)sign;
    /* A normal significand brings its hidden 1 along, which adds one to the exponent's field. */
    uint32_t code = ((uint32_t)(e > least ? e - least : 0) << mantissa_bits) + kept;
    return (uint8_t)(sign | (code < largest ? code : largest));
}

static ALWAYS uint8_t to_int8(uint32_t x)
{
    uint32_t size = x & 0x7fffffff;
    if (size > 0x7f800000)
        return 0;
    int e = (int)(size >> 23) - 127;
    int drop = 23 - e < 25 ? 23 - e : 25;
    uint32_t kept = e > 6 ? 127 : rounded((size & 0x7fffff) | 0x800000, drop);
    kept = kept < 127 ? kept : 127;
    return (uint8_t)(x >> 31 ? -(int)kept : (int)kept);
}

static ALWAYS uint8_t to_small(int codec, uint32_t x)
{
    switch (codec) {
    case E4M3: return to_float(x, 0, 4, 3, 0x7e, 0x7e, 0x7f);
    case E5M2: return to_float(x, 0, 5, 2, 0x7b, 0x7c, 0x7e);
    default: return to_int8(x);
    }
}

/* Built on fp16: E5M2 is its upper byte, and E4M3 has its mantissa in the same place under another bias. */
static uint32_t from_small(int codec, uint32_t code)
{
    uint32_t sign = code >> 7 << 31, m = code & 0x7f;
    if (codec == INT8) {
        int whole = (int8_t)code;
        float value = (float)whole;
        return get32(&value);
    }
    if (codec == E4M3) {
        if (m == 0x7f)
            return 0x7fc00000;
        float value; /* m << 7 read as fp16 is the value times 2^-8, exactly */
        uint32_t bits = from_fp16(m << 7);
        memcpy(&value, &bits, 4);
        value *= 256;
        return sign | get32(&value);
    }
    return m > 0x7c ? 0x7fc00000 : from_fp16(code << 8);
}

static void make_tables(void)
{
    for (int k = 0; k < SMALLS; k++) {
        for (uint32_t code = 0; code < 256; code++) {
            uint32_t x = from_small(E4M3 + k, code);
            small_fp32[k][code] = x;
            small_16[BF16][k][code] = (uint16_t)to_bf16(x);
            small_16[FP16][k][code] = (uint16_t)to_fp16(x);
        }
        for (uint32_t word = 0; word < 65536; word++) {
            from_16[BF16][k][word] = to_small(E4M3 + k, word << 16);
            from_16[FP16][k][word] = to_small(E4M3 + k, from_fp16(word));
        }
    }
}

/* -- blocks under a scale ------------------------------------------------------------------------------------------ */

/* The element at position s of an MX page. */
static uint32_t mx_one(const struct work *w, int64_t s)
{
    uint32_t scale = w->src[s / MX_GROUP], x;
    if (scale == 255)
        return 0x7fc00000;
    if (w->src_codec == MXE2M1) {
        static const float values[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
        uint32_t code = w->src[w->src_header + s / 2] >> (s & 1) * 4 & 15;
        x = get32(&values[code & 7]) | code >> 3 << 31;
    } else {
        x = small_fp32[w->src_codec - MXE4M3][w->src[w->src_header + s]];
    }
    if ((x & 0x7fffffff) >= 0x7f800000 || !(x << 1))
        return x;
    /* Times 2^(scale - 127): exact, or beyond the largest. */
    int e = (int)(x >> 23 & 255) + (int)scale - 127;
    uint32_t sign = x >> 31 << 31, sig = (x & 0x7fffff) | 0x800000;
    if (e >= 255)
        return sign | 0x7f800000;
    return e > 0 ? sign | (uint32_t)e << 23 | (sig & 0x7fffff) : sign | sig >> (1 - e);
}

/* 32 values as codes and their scale. */
static void mx_encode(const uint32_t *x, int codec, uint8_t *codes, uint8_t *shared)
{
    static const int top[] = {8, 15, 2};
    uint32_t most = 0, nan = 0;
    for (int k = 0; k < MX_GROUP; k++) {
        uint32_t size = x[k] & 0x7fffffff;
        nan |= size > 0x7f800000;
        most = size < 0x7f800000 && size > most ? size : most;
    }
    int e, scale = 0;
    if (parts(most, &e))
        scale = e - top[codec - MXE4M3] + 127 > 0 ? e - top[codec - MXE4M3] + 127 : 0;
    for (int k = 0; k < MX_GROUP; k++)
        switch (codec) {
        case MXE4M3: codes[k] = to_float(x[k], 127 - scale, 4, 3, 0x7e, 0x7e, 0x7f); break;
        case MXE5M2: codes[k] = to_float(x[k], 127 - scale, 5, 2, 0x7b, 0x7c, 0x7e); break;
        default: {
            uint8_t code = to_float(x[k], 127 - scale, 2, 1, 7, 7, 7 | x[k] >> 31 << 3);
            codes[k / 2] = k & 1 ? (uint8_t)(codes[k / 2] | code << 4) : code;
        }
        }
    *shared = codec == MXE2M1 && nan ? 255 : (uint8_t)scale;
}

static int is_small(int codec) { return codec >= E4M3 && codec <= INT8; }

/* -- kernels ----------------------------------------------------------------------------------------------------- */

#define EACH(body) \
    for (; n > 0; n--, s += ss, d += ds) \
        for (int64_t i = 0; i < w->unit; i++) { \
            int64_t from = s + i * w->us, to = d + i * w->ud; \
            body; \
        }

static void small_to_16(const struct work *w, int64_t s, int64_t d, int64_t n, int64_t ss, int64_t ds)
{
    const uint16_t *table = small_16[w->dst_codec][w->src_codec - E4M3];
    EACH(put16(w->dst + to * 2, table[w->src[from]]))
}

static void small_to_fp32(const struct work *w, int64_t s, int64_t d, int64_t n, int64_t ss, int64_t ds)
{
    const uint32_t *table = small_fp32[w->src_codec - E4M3];
    EACH(put32(w->dst + to * 4, table[w->src[from]]))
}

static void small_from_16(const struct work *w, int64_t s, int64_t d, int64_t n, int64_t ss, int64_t ds)
{
    const uint8_t *table = from_16[w->src_codec][w->dst_codec - E4M3];
    EACH(w->dst[to] = table[get16(w->src + from * 2)])
}

static void e4m3_from_fp32(const struct work *w, int64_t s, int64_t d, int64_t n, int64_t ss, int64_t ds)
{
    EACH(w->dst[to] = to_small(E4M3, get32(w->src + from * 4)))
}

static void e5m2_from_fp32(const struct work *w, int64_t s, int64_t d, int64_t n, int64_t ss, int64_t ds)
{
    EACH(w->dst[to] = to_small(E5M2, get32(w->src + from * 4)))
}

static void int8_from_fp32(const struct work *w, int64_t s, int64_t d, int64_t n, int64_t ss, int64_t ds)
{
    EACH(w->dst[to] = to_small(INT8, get32(w->src + from * 4)))
}

/* The kernel from or to a small codec, NULL where another is as good. */
static kernel choose_small(int a, int b)
{
    if (is_small(a))
        return b == FP32 ? small_to_fp32 : b == BF16 || b == FP16 ? small_to_16 : NULL;
    if (a == BF16 || a == FP16)
        return small_from_16;
    if (a == FP32)
        return b == E4M3 ? e4m3_from_fp32 : b == E5M2 ? e5m2_from_fp32 : int8_from_fp32;
    return NULL;
}
