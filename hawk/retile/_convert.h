/* Contiguous elements of one codec into those of another, through binary32.  `_nest.h` includes this file once for every
 * instruction set: `FN` names a function for it, `TARGET` is the attribute that lets the compiler use it.  The loops have no
 * branches, and the compiler makes vector code of them; intrinsics stand only where it does not find the way.
 *
 * A reader makes `n` elements into the bits of fp32 numbers, a writer the reverse.  `shared` are the exponents or scales of
 * grouped codecs, of which whole groups are handled.
 */

#define READ(NAME, FROM, EXPR)                                                                                    \
    TARGET static void FN(read_##NAME)(const uint8_t *from, const uint8_t *shared, int64_t n, u32 *restrict x)    \
    {                                                                                                             \
        const FROM *restrict in = (const FROM *)(const void *)from;                                               \
        (void)shared;                                                                                             \
        for (int64_t i = 0; i < n; i++) {                                                                         \
            uint32_t v = in[i];                                                                                   \
            x[i] = EXPR;                                                                                          \
        }                                                                                                         \
    }

READ(bf16, u16, v << 16)
READ(fp16, u16, from_fp16(v))
READ(fp32, u32, v)
READ(e4m3, uint8_t, from_e4m3(v))
READ(e5m2, uint8_t, from_e5m2(v))
READ(int8, uint8_t, from_int8(v))
#undef READ

#define WRITE(NAME, TO, EXPR)                                                                                     \
    TARGET static void FN(write_##NAME)(const u32 *restrict x, int64_t n, uint8_t *to, uint8_t *shared)           \
    {                                                                                                             \
        TO *restrict out = (TO *)(void *)to;                                                                      \
        (void)shared;                                                                                             \
        for (int64_t i = 0; i < n; i++) {                                                                         \
            uint32_t v = x[i];                                                                                    \
            out[i] = (TO)(EXPR);                                                                                  \
        }                                                                                                         \
    }

WRITE(bf16, u16, to_bf16(v))
WRITE(fp16, u16, to_fp16(v))
WRITE(fp32, u32, v)
WRITE(e4m3, uint8_t, to_e4m3(v))
WRITE(e5m2, uint8_t, to_e5m2(v))
WRITE(int8, uint8_t, to_int8(v))
#undef WRITE

TARGET static void FN(multiply)(u32 *restrict x, int64_t n, float by)
{
    for (int64_t i = 0; i < n; i++)
        x[i] = bits_of(float_of(x[i]) * by);
}

TARGET static void FN(divide)(u32 *restrict x, int64_t n, float by)
{
    for (int64_t i = 0; i < n; i++)
        x[i] = bits_of(float_of(x[i]) / by);
}

/* -- codes of four bits, the even element in the low half -- */

TARGET static ALWAYS void FN(unpack)(const uint8_t *restrict from, uint8_t *restrict code, int n)
{
    u16 *restrict out = (u16 *)(void *)code;
    for (int i = 0; i < n / 2; i++)
        out[i] = (uint16_t)((from[i] & 15) | (from[i] & 0xf0) << 4);
}

TARGET static ALWAYS void FN(pack)(const uint8_t *restrict code, uint8_t *restrict to, int n)
{
    const u16 *restrict in = (const u16 *)(const void *)code;
    for (int i = 0; i < n / 2; i++)
        to[i] = (uint8_t)(in[i] | in[i] >> 4);
}

/* -- groups: first what each shares, for every element, then all elements alike in one long loop -- */

#define SHARE(VALUE)                                                                                              \
    for (int k = 0; k < SIZE; k++)                                                                                \
    of[i + k] = VALUE

/* +-m * 2^(E - 126 - bits), denormals of binary32 included. */
TARGET static ALWAYS uint32_t FN(decode)(uint32_t code, uint32_t exponent, uint32_t keep)
{
    uint32_t m = code & ((1u << keep) - 1), f = bits_of((float)(int32_t)m);
    int32_t e = (int32_t)(f >> 23) - 126 + (int32_t)exponent - (int32_t)keep;
    uint32_t up = exponent + 23 - keep, v = f + ((exponent - 126 - keep) << 23);
    v = choose(where(e <= 0), m << (up < 31 ? up : 31), v);
    v = choose(where(e >= 255), 0x7f800000, v) & where(m != 0);
    return v | code >> keep << 31;
}

#define SIZE GROUP
TARGET static ALWAYS void FN(share)(const uint8_t *shared, int64_t n, uint32_t *restrict of)
{
    for (int64_t i = 0; i < n; i += SIZE) {
        uint32_t exponent = *shared++;
        SHARE(exponent);
    }
}

#define BFP(BITS, CODES)                                                                                          \
    TARGET static void FN(read_bfp##BITS)(const uint8_t *from, const uint8_t *shared, int64_t n, u32 *restrict x) \
    {                                                                                                             \
        uint32_t of[CHUNK];                                                                                       \
        uint8_t wide[CHUNK];                                                                                      \
        for (; n > 0; n -= CHUNK, from += CHUNK * BITS / 8, shared += CHUNK / GROUP, x += CHUNK) {                \
            int some = n < CHUNK ? (int)n : CHUNK;                                                                \
            const uint8_t *code = CODES(from, wide, some);                                                        \
            FN(share)(shared, some, of);                                                                          \
            for (int i = 0; i < some; i++)                                                                        \
                x[i] = FN(decode)(code[i], of[i], BITS - 1);                                                      \
        }                                                                                                         \
    }                                                                                                             \
    TARGET static void FN(write_bfp##BITS)(const u32 *restrict x, int64_t n, uint8_t *to, uint8_t *shared)        \
    {                                                                                                             \
        enum { KEEP_BITS = BITS - 1, DROP = 24 - KEEP_BITS };                                                     \
        uint32_t of[CHUNK];                                                                                       \
        uint8_t code[CHUNK];                                                                                      \
        for (; n > 0; n -= CHUNK, x += CHUNK, to += CHUNK * BITS / 8) {                                           \
            int some = n < CHUNK ? (int)n : CHUNK;                                                                \
            for (int i = 0; i < some; i += SIZE) {                                                                \
                uint32_t most = 0;                                                                                \
                for (int k = 0; k < SIZE; k++) {                                                                  \
                    uint32_t size = x[i + k] & 0x7fffffff;                                                        \
                    most = size > most ? size : most;                                                             \
                }                                                                                                 \
                most >>= 23;                                                                                      \
                *shared++ = (uint8_t)most;                                                                        \
                SHARE(most);                                                                                      \
            }                                                                                                     \
            for (int i = 0; i < some; i++) {                                                                      \
                uint32_t e = x[i] >> 23 & 0xff, sig = ((x[i] & 0x7fffff) | 0x800000) & where(e != 0);             \
                uint32_t shift = of[i] - e < 31 ? of[i] - e : 31, v = sig >> shift;                               \
                uint32_t m = (v + ((1u << (DROP - 1)) - 1) + (v >> DROP & 1)) >> DROP;                            \
                m = m < (1u << KEEP_BITS) - 1 ? m : (1u << KEEP_BITS) - 1;                                        \
                code[i] = (uint8_t)(m | (x[i] >> 31 << KEEP_BITS & where(m != 0)));                               \
            }                                                                                                     \
            if (BITS == 8)                                                                                        \
                memcpy(to, code, (size_t)some);                                                                   \
            else                                                                                                  \
                FN(pack)(code, to, some);                                                                         \
        }                                                                                                         \
    }

#define AS_THEY_ARE(from, wide, n) ((void)(wide), (from))
#define UNPACKED(from, wide, n) (FN(unpack)(from, wide, n), (wide))

BFP(8, AS_THEY_ARE)
BFP(4, UNPACKED)
#undef BFP
#ifndef WITH_AVX512
/* Exact: 7 bits, and bf16 has the same denormals' range. */
#define BFP_BF16(BITS, CODES)                                                                                     \
    TARGET static void FN(bfp##BITS##_bf16)(const uint8_t *from, const uint8_t *shared, int64_t n, uint8_t *to,   \
                                            uint8_t *ts)                                                          \
    {                                                                                                             \
        uint32_t of[CHUNK];                                                                                       \
        uint8_t wide[CHUNK];                                                                                      \
        (void)ts;                                                                                                 \
        for (; n > 0; n -= CHUNK, from += CHUNK * BITS / 8, shared += CHUNK / GROUP, to += 2 * CHUNK) {           \
            int some = n < CHUNK ? (int)n : CHUNK;                                                                \
            u16 *restrict out = (u16 *)(void *)to;                                                                \
            const uint8_t *code = CODES(from, wide, some);                                                        \
            FN(share)(shared, some, of);                                                                          \
            for (int i = 0; i < some; i++)                                                                        \
                out[i] = (uint16_t)(FN(decode)(code[i], of[i], BITS - 1) >> 16);                                  \
        }                                                                                                         \
    }

BFP_BF16(8, AS_THEY_ARE)
BFP_BF16(4, UNPACKED)
#undef BFP_BF16
#endif
#undef SIZE

/* -- blocks of 32 under a scale -- */

#define SIZE MX_GROUP
#define READ_MX(NAME, BITS, CODES, EXPR)                                                                          \
    TARGET static void FN(read_##NAME)(const uint8_t *from, const uint8_t *shared, int64_t n, u32 *restrict x)    \
    {                                                                                                             \
        uint32_t of[CHUNK];                                                                                       \
        uint8_t wide[CHUNK];                                                                                      \
        for (; n > 0; n -= CHUNK, from += CHUNK * BITS / 8, x += CHUNK) {                                         \
            int some = n < CHUNK ? (int)n : CHUNK, usual = 1;                                                     \
            const uint8_t *code = CODES(from, wide, some);                                                        \
            for (int i = 0; i < some; i += SIZE) {                                                                \
                uint32_t scale = *shared++;                                                                       \
                usual &= scale > 17 && scale < 237; /* then no value leaves the normal ones */                    \
                SHARE(scale);                                                                                     \
            }                                                                                                     \
            if (usual)                                                                                            \
                for (int i = 0; i < some; i++) {                                                                  \
                    uint32_t v = code[i], y = EXPR, size = y & 0x7fffffff;                                        \
                    x[i] = y + ((of[i] - 127) << 23 & where(size - 1 < 0x7f7fffff));                              \
                }                                                                                                 \
            else                                                                                                  \
                for (int i = 0; i < some; i++) {                                                                  \
                    uint32_t v = code[i];                                                                         \
                    x[i] = scaled(EXPR, of[i]);                                                                   \
                }                                                                                                 \
        }                                                                                                         \
    }

READ_MX(mxe4m3, 8, AS_THEY_ARE, from_e4m3(v))
READ_MX(mxe5m2, 8, AS_THEY_ARE, from_e5m2(v))
READ_MX(mxe2m1, 4, UNPACKED, from_e2m1(v))
#undef READ_MX

/* The scale's exponent is that of the largest finite magnitude less `TOP`.  Where no scale is small a denormal is less than
 * any half step, and counts as 0. */
#define WRITE_MX(NAME, BITS, TOP, EBITS, MBITS, LARGEST, INFINITE, NOT)                                           \
    TARGET static void FN(write_##NAME)(const u32 *restrict x, int64_t n, uint8_t *to, uint8_t *shared)           \
    {                                                                                                             \
        uint32_t of[CHUNK];                                                                                       \
        uint8_t code[CHUNK];                                                                                      \
        for (; n > 0; n -= CHUNK, x += CHUNK, to += CHUNK * BITS / 8) {                                           \
            int some = n < CHUNK ? (int)n : CHUNK, usual = 1;                                                     \
            for (int i = 0; i < some; i += SIZE) {                                                                \
                uint32_t most = 0, all = 0;                                                                       \
                for (int k = 0; k < SIZE; k++) {                                                                  \
                    uint32_t size = x[i + k] & 0x7fffffff, finite = size & where(size < 0x7f800000);              \
                    most = finite > most ? finite : most;                                                         \
                    all = size > all ? size : all;                                                                \
                }                                                                                                 \
                int32_t e, scale = parts(most, &e) && e - TOP + 127 > 0 ? e - TOP + 127 : 0;                      \
                usual &= !most || scale > 25;                                                                     \
                *shared++ = BITS == 4 && all > 0x7f800000 ? 255 : (uint8_t)scale;                                 \
                uint32_t lift = most ? (uint32_t)(127 - scale) : 0;                                               \
                SHARE(lift);                                                                                      \
            }                                                                                                     \
            if (usual)                                                                                            \
                for (int i = 0; i < some; i++) {                                                                  \
                    uint32_t v = x[i], least = 129 - (1u << (EBITS - 1)) - of[i];                                 \
                    code[i] = (uint8_t)to_fp8(v, least, BITS, MBITS, LARGEST, INFINITE, NOT);                     \
                }                                                                                                 \
            else                                                                                                  \
                for (int i = 0; i < some; i++) {                                                                  \
                    uint32_t v = x[i];                                                                            \
                    code[i] = (uint8_t)to_float(v, (int32_t)of[i], EBITS, MBITS, LARGEST, INFINITE, NOT);         \
                }                                                                                                 \
            if (BITS == 8)                                                                                        \
                memcpy(to, code, (size_t)some);                                                                   \
            else                                                                                                  \
                FN(pack)(code, to, some);                                                                         \
        }                                                                                                         \
    }

WRITE_MX(mxe4m3, 8, 8, 4, 3, 0x7eu, 0x7eu, 0x7fu)
WRITE_MX(mxe5m2, 8, 15, 5, 2, 0x7bu, 0x7cu, 0x7eu)
WRITE_MX(mxe2m1, 4, 2, 2, 1, 7u, 7u, (7u | v >> 31 << 3))
#undef WRITE_MX
#undef SIZE
#undef SHARE
#undef AS_THEY_ARE
#undef UNPACKED

/* -- pairs that need no detour -- */

#define TWO(NAME, FROM, TO, EXPR)                                                                                 \
    TARGET static void FN(NAME)(const uint8_t *from, const uint8_t *fs, int64_t n, uint8_t *to, uint8_t *ts)      \
    {                                                                                                             \
        const FROM *restrict in = (const FROM *)(const void *)from;                                               \
        TO *restrict out = (TO *)(void *)to;                                                                      \
        (void)fs;                                                                                                 \
        (void)ts;                                                                                                 \
        for (int64_t i = 0; i < n; i++) {                                                                         \
            uint32_t v = in[i];                                                                                   \
            out[i] = (TO)(EXPR);                                                                                  \
        }                                                                                                         \
    }

TWO(bf16_fp32, u16, u32, v << 16)
TWO(fp32_bf16, u32, u16, to_bf16(v))
TWO(int8_bf16, uint8_t, u16, from_int8(v) >> 16) /* exact, as the two below are */
#ifndef WITH_AVX512
TWO(fp16_bf16, u16, u16, to_bf16(from_fp16(v)))
TWO(bf16_fp16, u16, u16, to_fp16(v << 16))
TWO(bf16_e4m3, u16, uint8_t, to_e4m3(v << 16))
TWO(bf16_e5m2, u16, uint8_t, to_e5m2(v << 16))
TWO(bf16_int8, u16, uint8_t, to_int8(v << 16))
TWO(e4m3_bf16, uint8_t, u16, from_e4m3(v) >> 16)
TWO(e5m2_bf16, uint8_t, u16, from_e5m2(v) >> 16)
#endif
#undef TWO

#ifdef WITH_AVX512
#include "_lanes.h"
#include "_lanes_mx.h"
#include "_lanes_scaled.h"
#include "_bfp_wide.h"
#endif
#ifdef BFP_WRITERS
#include "_bfp_fused.h"
#endif

/* What a nest needs of these. */
static const struct converters FN(converters) = {
#ifdef WITH_AVX512
    .read = {FN(read_bf16), FN(wide_fp16), FN(read_fp32), FN(wide_e4m3), FN(wide_e5m2), FN(read_int8), FN(read_bfp8),
             FN(read_bfp4), FN(read_mxe4m3), FN(read_mxe5m2), FN(read_mxe2m1)},
    .write = {FN(write_bf16), FN(wide_to_fp16), FN(write_fp32), FN(wide_to_e4m3), FN(wide_to_e5m2), FN(wide_to_int8),
              FN(wide_to_bfp8), FN(wide_to_bfp4), FN(fp32_mxe4m3), FN(fp32_mxe5m2), FN(fp32_mxe2m1)},
#else
    .read = {FN(read_bf16), FN(read_fp16), FN(read_fp32), FN(read_e4m3), FN(read_e5m2), FN(read_int8), FN(read_bfp8),
             FN(read_bfp4), FN(read_mxe4m3), FN(read_mxe5m2), FN(read_mxe2m1)},
    .write = {FN(write_bf16), FN(write_fp16), FN(write_fp32), FN(write_e4m3), FN(write_e5m2), FN(write_int8), FN(write_bfp8),
              FN(write_bfp4), FN(write_mxe4m3), FN(write_mxe5m2), FN(write_mxe2m1)},
#endif
    .direct = {[BF16][FP32] = FN(bf16_fp32), [FP32][BF16] = FN(fp32_bf16), [FP16][BF16] = FN(fp16_bf16),
               [BF16][FP16] = FN(bf16_fp16), [BF16][E4M3] = FN(bf16_e4m3), [BF16][E5M2] = FN(bf16_e5m2),
               [BF16][INT8] = FN(bf16_int8), [E4M3][BF16] = FN(e4m3_bf16), [E5M2][BF16] = FN(e5m2_bf16),
               [INT8][BF16] = FN(int8_bf16), [BFP8][BF16] = FN(bfp8_bf16), [BFP4][BF16] = FN(bfp4_bf16),
#ifdef BFP_WRITERS
               [BF16][BFP8] = FN(bf16_bfp8), [BF16][BFP4] = FN(bf16_bfp4),
#endif
#ifdef WITH_AVX512
               [MXE4M3][BF16] = FN(mxe4m3_bf16), [MXE5M2][BF16] = FN(mxe5m2_bf16), [MXE2M1][BF16] = FN(mxe2m1_bf16),
               [BF16][MXE4M3] = FN(bf16_mxe4m3), [BF16][MXE5M2] = FN(bf16_mxe5m2), [BF16][MXE2M1] = FN(bf16_mxe2m1),
               [FP16][BFP8] = FN(fp16_bfp8), [FP16][BFP4] = FN(fp16_bfp4),
#endif
    },
#define FUSED4(NAME)                                                                                              \
    {{FN(NAME##_runs_bfp8), FN(NAME##_runs_bfp4)}, {FN(NAME##_weave_bfp8), FN(NAME##_weave_bfp4)}}
#ifdef BFP_WRITERS
    .fused = {[BF16] = FUSED4(bf16),
#ifdef WITH_AVX512
              [FP16] = FUSED4(fp16), [E4M3] = FUSED4(e4m3), [E5M2] = FUSED4(e5m2), [INT8] = FUSED4(int8),
#endif
    },
#endif
#undef FUSED4
#ifdef WITH_AVX512
    .divided = {FN(divided_e4m3), FN(divided_e5m2), FN(divided_int8)},
    .parted = {{FN(bfp8_runs), FN(bfp4_runs)}, {FN(bfp8_apart), FN(bfp4_apart)}},
#endif
    .multiply = FN(multiply),
    .divide = FN(divide),
};
