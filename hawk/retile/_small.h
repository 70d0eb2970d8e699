/* Elements of eight bits and fewer, and blocks of them under a scale: the definitions of `layouts/small.py` in C. */
#include "_elements.h"

enum { SMALLS = INT8 - E4M3 + 1 };

/* A finite magnitude as sig * 2^(e - 23) with sig in [2^23, 2^24), or 0. */
static ALWAYS uint32_t parts(uint32_t size, int32_t *e)
{
    uint32_t whole = bits_of((float)(int32_t)(size & 0x7fffff)); /* a denormal is that number of 2^-149 */
    uint32_t tiny = where(size < 0x800000), from = choose(tiny, whole, size);
    *e = (int32_t)(from >> 23) - (int32_t)choose(tiny, 276, 127);
    return ((from & 0x7fffff) | 0x800000) & where(size != 0);
}

/* The code of x * 2^lift. */
static ALWAYS uint32_t to_float(uint32_t x, int32_t lift, int exponent_bits, int mantissa_bits, uint32_t largest,
                                uint32_t infinity, uint32_t nan)
{
    uint32_t sign = x >> 31 << (exponent_bits + mantissa_bits), size = x & 0x7fffffff;
    int32_t e, least = 2 - (1 << (exponent_bits - 1)), most = 1 << exponent_bits;
    uint32_t sig = parts(size, &e);
    e += lift;
    /* So many of the 24 bits fall away; from 25 on nothing but 0 is left. */
    int32_t drop = 23 - mantissa_bits + (e < least ? least - e : 0), above = e > least ? e - least : 0;
    uint32_t kept = rounded(sig, (uint32_t)(drop < 25 ? drop : 25));
    /* A normal significand brings its hidden 1 along, which adds one to the exponent's field. */
    uint32_t code = ((uint32_t)(above < most ? above : most) << mantissa_bits) + kept;
    code = kept ? code : 0;
    code = code < largest ? code : largest;
    code = size == 0x7f800000 ? infinity : code;
    return size > 0x7f800000 ? nan : sign | code;
}

/* The same for formats whose least half step is far above the denormals of binary32, which count as 0; `least` is the
 * biased exponent of the least normal value. */
static ALWAYS uint32_t to_fp8(uint32_t x, uint32_t least, int bits, int mantissa_bits, uint32_t largest, uint32_t infinity,
                              uint32_t nan)
{
    uint32_t sign = x >> 31 << (bits - 1), size = x & 0x7fffffff, e = size >> 23;
    uint32_t low = e < least ? least - e : 0, high = e > least ? e - least : 0, drop = 23 - (uint32_t)mantissa_bits + low;
    uint32_t code = rounded((size & 0x7fffff) | 0x800000, drop < 25 ? drop : 25) + (high << mantissa_bits);
    code = code < largest ? code : largest;
    code = choose(where(size == 0x7f800000), infinity, code) | sign;
    return choose(where(size > 0x7f800000), nan, code);
}

static ALWAYS uint32_t to_e4m3(uint32_t x) { return to_fp8(x, 121, 8, 3, 0x7e, 0x7e, 0x7f); }
static ALWAYS uint32_t to_e5m2(uint32_t x) { return to_fp8(x, 113, 8, 2, 0x7b, 0x7c, 0x7e); }

static ALWAYS uint32_t to_int8(uint32_t x)
{
    uint32_t size = x & 0x7fffffff, e = size >> 23;
    uint32_t drop = e < 150 ? 150 - e : 0;
    drop = drop < 25 ? drop : 25;
    drop = drop > 17 ? drop : 17; /* 2^7 and more saturate anyway */
    uint32_t kept = rounded((size & 0x7fffff) | 0x800000, drop);
    kept = kept < 127 && e <= 133 ? kept : 127;
    kept = size > 0x7f800000 ? 0 : kept;
    return x >> 31 ? 0 - kept : kept;
}

static ALWAYS uint32_t from_e4m3(uint32_t code)
{
    uint32_t sign = code >> 7 << 31, m = code & 0x7f;
    uint32_t found = choose(where(m < 8), scaled_down(m, 9), (m << 20) + (120u << 23));
    return choose(where(m == 0x7f), 0x7fc00000, sign | found);
}

/* Its upper byte is all that fp16 has of it. */
static ALWAYS uint32_t from_e5m2(uint32_t code) 
{
    return choose(where((code & 0x7f) > 0x7c), 0x7fc00000, from_fp16(code << 8));
}

static ALWAYS uint32_t from_int8(uint32_t code) { return bits_of((float)(int8_t)(uint8_t)code); }

static ALWAYS uint32_t from_e2m1(uint32_t code)
{
    uint32_t m = code & 7;
    return (code & 8) << 28 | choose(where(m < 2), scaled_down(m, 1), (m << 22) + (126u << 23));
}

static uint32_t from_small(int codec, uint32_t code)
{
    return codec == E4M3 ? from_e4m3(code) : codec == E5M2 ? from_e5m2(code) : from_int8(code);
}

/* -- blocks under a scale ------------------------------------------------------------------------------------------ */

/* x * 2^(scale - 127): exact, or beyond the largest; a scale of 255 is NaN. */
static ALWAYS uint32_t scaled(uint32_t x, uint32_t scale)
{
    uint32_t sign = x & 0x80000000, size = x & 0x7fffffff, sig = (x & 0x7fffff) | 0x800000;
    int32_t e = (int32_t)(size >> 23) + (int32_t)scale - 127, low = 1 - e;
    uint32_t tiny = sig >> (low < 0 ? 0 : low < 31 ? low : 31);
    uint32_t found = e > 0 ? (uint32_t)e << 23 | (sig & 0x7fffff) : tiny;
    found = e >= 255 ? 0x7f800000 : found;
    found = size >= 0x7f800000 || !size ? size : found;
    return scale == 255 ? 0x7fc00000 : sign | found;
}

/* The element at position s of an MX page. */
static uint32_t mx_one(const struct work *w, int64_t s)
{
    const uint8_t *codes = w->src + w->src_header;
    uint32_t x = w->src_codec == MXE2M1 ? from_e2m1(codes[s / 2] >> (s & 1) * 4 & 15u)
                                        : from_small(w->src_codec - MXE4M3 + E4M3, codes[s]);
    return scaled(x, w->src[s / MX_GROUP]);
}
