/* The inner loops.  `_core.c` includes this file once for every instruction set: `FN` names a function for it,
 * `TARGET` is the attribute that lets the compiler use it, and WITH_AVX2 is set where AVX2 intrinsics may stand.
 *
 * Every kernel handles `n` units (see `struct work`), `ss` and `ds` elements apart, the first at positions `s` and
 * `d` of the two pages.  All arithmetic is on integers.
 */

TARGET static void FN(copy_run)(const struct work *w, int64_t s, int64_t d, int64_t n, int64_t ss, int64_t ds)
{
    const uint8_t *from = w->src + s * w->width;
    uint8_t *to = w->dst + d * w->width;
    int64_t fs = ss * w->width, ts = ds * w->width, bytes = w->unit * w->width;
    /* Constant sizes become a few vector moves. */
    switch (bytes) {
    case 16: for (; n > 0; n--, from += fs, to += ts) memcpy(to, from, 16); break;
    case 32: for (; n > 0; n--, from += fs, to += ts) memcpy(to, from, 32); break;
    case 64: for (; n > 0; n--, from += fs, to += ts) memcpy(to, from, 64); break;
    case 128: for (; n > 0; n--, from += fs, to += ts) memcpy(to, from, 128); break;
    default: for (; n > 0; n--, from += fs, to += ts) memcpy(to, from, (size_t)bytes); break;
    }
}

#if defined(X86)
/* memcpy past the caches, any alignment and size.  `ahead` is what will be read next, or NULL where that goes on
 * behind `from` and the hardware sees it coming. */
TARGET static void FN(stream)(uint8_t *to, const uint8_t *from, size_t n, const uint8_t *ahead)
{
    int64_t skip = ahead ? ahead - from : 0;
    size_t head = (size_t)(-(uintptr_t)to & 63);
    head = head < n ? head : n;
    memcpy(to, from, head);
    to += head;
    from += head;
    n -= head;
    for (; n >= 64; n -= 64, to += 64, from += 64) {
        if (skip)
            __builtin_prefetch(from + skip, 0, 2);
#ifdef WITH_AVX2
        __m256i a = _mm256_loadu_si256((const __m256i *)(const void *)from);
        __m256i b = _mm256_loadu_si256((const __m256i *)(const void *)(from + 32));
        _mm256_stream_si256((__m256i *)(void *)to, a);
        _mm256_stream_si256((__m256i *)(void *)(to + 32), b);
#else
        for (int i = 0; i < 64; i += 16)
            _mm_stream_si128((__m128i *)(void *)(to + i), _mm_loadu_si128((const __m128i *)(const void *)(from + i)));
#endif
    }
    memcpy(to, from, n);
}

/* Four streams of `n` bytes at once, `n` a multiple of 64 and every target on a line: memory serves several pages
 * at a time faster than one after the other.  `ahead[k]` is what stream k's place in the next call will read. */
TARGET static void FN(stream4)(uint8_t *const to[4], const uint8_t *const from[4], const uint8_t *const ahead[4], size_t n)
{
    for (size_t i = 0; i < n; i += 64)
        for (int k = 0; k < 4; k++) {
            __builtin_prefetch(ahead[k] + i, 0, 2);
#ifdef WITH_AVX2
            __m256i a = _mm256_loadu_si256((const __m256i *)(const void *)(from[k] + i));
            __m256i b = _mm256_loadu_si256((const __m256i *)(const void *)(from[k] + i + 32));
            _mm256_stream_si256((__m256i *)(void *)(to[k] + i), a);
            _mm256_stream_si256((__m256i *)(void *)(to[k] + i + 32), b);
#else
            for (int j = 0; j < 64; j += 16)
                _mm_stream_si128((__m128i *)(void *)(to[k] + i + (size_t)j),
                                 _mm_loadu_si128((const __m128i *)(const void *)(from[k] + i + (size_t)j)));
#endif
        }
}

/* Whole 16-byte words past the caches; `stream_fits` has looked at alignment and size. */
TARGET static void FN(stream_run)(const struct work *w, int64_t s, int64_t d, int64_t n, int64_t ss, int64_t ds)
{
    const uint8_t *from = w->src + s * w->width;
    uint8_t *to = w->dst + d * w->width;
    int64_t fs = ss * w->width, ts = ds * w->width, bytes = w->unit * w->width;
#ifdef WITH_AVX2
    if (bytes == 32 && (((uintptr_t)to | (uintptr_t)ts) & 31) == 0) {
        for (; n > 0; n--, from += fs, to += ts)
            _mm256_stream_si256((__m256i *)to, _mm256_loadu_si256((const __m256i *)from));
        return;
    }
#endif
    if (bytes > 256) {
        for (; n > 0; n--, from += fs, to += ts)
            FN(stream)(to, from, (size_t)bytes, NULL);
        return;
    }
    for (; n > 0; n--, from += fs, to += ts)
        for (int64_t i = 0; i < bytes; i += 16)
            _mm_stream_si128((__m128i *)(to + i), _mm_loadu_si128((const __m128i *)(from + i)));
}
#endif

/* Two source runs woven, 2-byte elements: even positions from one, odd positions from the other. */
TARGET static void FN(weave_run)(const struct work *w, int64_t s, int64_t d, int64_t n, int64_t ss, int64_t ds)
{
    const uint16_t *from = (const uint16_t *)(const void *)w->src + s;
    uint16_t *to = (uint16_t *)(void *)w->dst + d;
    int64_t pairs = w->unit / 2, apart = w->apart;
    for (; n > 0; n--, from += ss, to += ds) {
        int64_t i = 0;
#if defined(X86)
        for (; i + 8 <= pairs; i += 8) {
            __m128i a = _mm_loadu_si128((const __m128i *)(const void *)(from + i));
            __m128i b = _mm_loadu_si128((const __m128i *)(const void *)(from + apart + i));
            __m128i low = _mm_unpacklo_epi16(a, b), high = _mm_unpackhi_epi16(a, b);
            __m128i *at = (__m128i *)(void *)(to + 2 * i);
            if (w->stream) {
                _mm_stream_si128(at, low);
                _mm_stream_si128(at + 1, high);
            } else {
                _mm_storeu_si128(at, low);
                _mm_storeu_si128(at + 1, high);
            }
        }
#endif
        for (; i < pairs; i++) {
            put16(to + 2 * i, get16(from + i));
            put16(to + 2 * i + 1, get16(from + apart + i));
        }
    }
}

/* Elements one by one at constant strides, same codec. */
TARGET static void FN(copy_strided)(const struct work *w, int64_t s, int64_t d, int64_t n, int64_t ss, int64_t ds)
{
    int64_t us = w->us, ud = w->ud;
    if (w->width == 2) {
        const uint16_t *from = (const uint16_t *)(const void *)w->src + s;
        uint16_t *to = (uint16_t *)(void *)w->dst + d;
        for (; n > 0; n--, from += ss, to += ds)
            for (int64_t i = 0; i < w->unit; i++)
                put16(to + i * ud, get16(from + i * us));
    } else if (w->width == 1) {
        const uint8_t *from = w->src + s;
        uint8_t *to = w->dst + d;
        for (; n > 0; n--, from += ss, to += ds)
            for (int64_t i = 0; i < w->unit; i++)
                to[i * ud] = from[i * us];
    } else {
        const uint32_t *from = (const uint32_t *)(const void *)w->src + s;
        uint32_t *to = (uint32_t *)(void *)w->dst + d;
        for (; n > 0; n--, from += ss, to += ds)
            for (int64_t i = 0; i < w->unit; i++)
                put32(to + i * ud, get32(from + i * us));
    }
}

/* Elementwise conversions: contiguous where both strides are 1, which the compiler turns into vector code. */
#define CONVERT(NAME, FROM, GET, TO, PUT, EXPR)                                                                   \
    TARGET static void FN(NAME)(const struct work *w, int64_t s, int64_t d, int64_t n, int64_t ss, int64_t ds)    \
    {                                                                                                             \
        const FROM *from = (const FROM *)(const void *)w->src + s;                                                \
        TO *to = (TO *)(void *)w->dst + d;                                                                        \
        int64_t us = w->us, ud = w->ud, unit = w->unit;                                                           \
        for (; n > 0; n--, from += ss, to += ds) {                                                                \
            if (us == 1 && ud == 1)                                                                               \
                for (int64_t i = 0; i < unit; i++) {                                                              \
                    uint32_t x = GET(from + i);                                                                   \
                    PUT(to + i, (TO)(EXPR));                                                                      \
                }                                                                                                 \
            else                                                                                                  \
                for (int64_t i = 0; i < unit; i++) {                                                              \
                    uint32_t x = GET(from + i * us);                                                              \
                    PUT(to + i * ud, (TO)(EXPR));                                                                 \
                }                                                                                                 \
        }                                                                                                         \
    }

CONVERT(bf16_to_fp32, uint16_t, get16, uint32_t, put32, x << 16)
CONVERT(fp32_to_bf16, uint32_t, get32, uint16_t, put16, to_bf16(x))
CONVERT(bf16_to_fp16, uint16_t, get16, uint16_t, put16, to_fp16(x << 16))
CONVERT(fp32_to_fp16, uint32_t, get32, uint16_t, put16, to_fp16(x))
CONVERT(fp16_to_bf16, uint16_t, get16, uint16_t, put16, to_bf16(from_fp16(x)))
CONVERT(fp16_to_fp32, uint16_t, get16, uint32_t, put32, from_fp16(x))
#undef CONVERT

/* 16 elements of an elementwise codec, contiguous or by the table of offsets, as binary32 bits. */
TARGET static ALWAYS void FN(gather)(const struct work *w, int codec, int64_t s, uint32_t *x)
{
    if (codec == FP32) {
        const uint32_t *from = (const uint32_t *)(const void *)w->src + s;
        if (w->us == 1)
            memcpy(x, from, 64);
        else
            for (int k = 0; k < GROUP; k++)
                x[k] = get32(from + w->at[k]);
        return;
    }
    const uint16_t *from = (const uint16_t *)(const void *)w->src + s;
    uint16_t h[GROUP];
    if (w->us == 1)
        memcpy(h, from, 32);
    else
        for (int k = 0; k < GROUP; k++)
            h[k] = get16(from + w->at[k]);
    for (int k = 0; k < GROUP; k++)
        x[k] = codec == BF16 ? (uint32_t)h[k] << 16 : from_fp16(h[k]);
}

#ifndef WITH_AVX2
/* Encode one group into its codes and its exponent. */
TARGET static ALWAYS void FN(encode)(const uint32_t *x, int bits, uint8_t *code, uint8_t *exponent)
{
    uint32_t e[GROUP], y[GROUP], shared = 0;
    int keep = bits - 1, drop = 24 - keep;
    uint32_t most = (1u << keep) - 1, half = (1u << (drop - 1)) - 1;
    for (int k = 0; k < GROUP; k++) {
        e[k] = x[k] >> 23 & 0xff;
        shared = e[k] > shared ? e[k] : shared;
    }
    for (int k = 0; k < GROUP; k++) {
        uint32_t sig = e[k] ? (x[k] & 0x7fffff) | 0x800000 : 0;
        uint32_t shift = shared - e[k] < 31 ? shared - e[k] : 31;
        uint32_t v = sig >> shift;
        uint32_t m = (v + half + (v >> drop & 1)) >> drop;
        m = m < most ? m : most;
        y[k] = m ? m | (x[k] >> 31) << keep : 0;
    }
    *exponent = (uint8_t)shared;
    if (bits == 8)
        for (int k = 0; k < GROUP; k++)
            code[k] = (uint8_t)y[k];
    else
        for (int k = 0; k < GROUP / 2; k++)
            code[k] = (uint8_t)(y[2 * k] | y[2 * k + 1] << 4);
}
#else
/* The same with the group in two registers of eight. */
TARGET static ALWAYS __m256i FN(mantissas)(__m256i x, __m256i e, __m256i shared, int keep)
{
    const int drop = 24 - keep;
    __m256i sig = _mm256_or_si256(_mm256_and_si256(x, _mm256_set1_epi32(0x7fffff)), _mm256_set1_epi32(0x800000));
    sig = _mm256_andnot_si256(_mm256_cmpeq_epi32(e, _mm256_setzero_si256()), sig);
    __m256i v = _mm256_srlv_epi32(sig, _mm256_sub_epi32(shared, e)); /* shifts of 32 and more give 0 */
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(v, drop), _mm256_set1_epi32(1));
    __m256i m = _mm256_add_epi32(_mm256_add_epi32(v, _mm256_set1_epi32((1 << (drop - 1)) - 1)), odd);
    m = _mm256_min_epi32(_mm256_srli_epi32(m, drop), _mm256_set1_epi32((1 << keep) - 1));
    __m256i sign = _mm256_slli_epi32(_mm256_srli_epi32(x, 31), keep);
    return _mm256_or_si256(m, _mm256_and_si256(sign, _mm256_cmpgt_epi32(m, _mm256_setzero_si256())));
}

TARGET static ALWAYS void FN(encode)(const uint32_t *x, int bits, uint8_t *code, uint8_t *exponent)
{
    __m256i a = _mm256_loadu_si256((const __m256i *)(const void *)x);
    __m256i b = _mm256_loadu_si256((const __m256i *)(const void *)(x + 8));
    __m256i ea = _mm256_and_si256(_mm256_srli_epi32(a, 23), _mm256_set1_epi32(0xff));
    __m256i eb = _mm256_and_si256(_mm256_srli_epi32(b, 23), _mm256_set1_epi32(0xff));
    __m256i all = _mm256_packus_epi32(ea, eb);
    __m128i most = _mm_max_epu16(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
    most = _mm_minpos_epu16(_mm_xor_si128(most, _mm_set1_epi16(-1))); /* the least complement is the largest */
    most = _mm_and_si128(_mm_xor_si128(most, _mm_set1_epi16(-1)), _mm_set1_epi32(0xff));
    __m256i shared = _mm256_broadcastd_epi32(most);
    __m256i ma = FN(mantissas)(a, ea, shared, bits - 1), mb = FN(mantissas)(b, eb, shared, bits - 1);
    __m256i m = _mm256_permute4x64_epi64(_mm256_packus_epi32(ma, mb), 0xd8);
    __m128i bytes = _mm_packus_epi16(_mm256_castsi256_si128(m), _mm256_extracti128_si256(m, 1));
    *exponent = (uint8_t)_mm_cvtsi128_si32(most);
    if (bits == 8) {
        _mm_storeu_si128((__m128i *)(void *)code, bytes);
    } else {
        __m128i pairs = _mm_maddubs_epi16(bytes, _mm_set1_epi16(0x1001)); /* even + 16 * odd */
        _mm_storel_epi64((__m128i *)(void *)code, _mm_packus_epi16(pairs, pairs));
    }
}
#endif

#define ENCODE(NAME, CODEC, BITS)                                                                                 \
    TARGET static void FN(NAME)(const struct work *w, int64_t s, int64_t d, int64_t n, int64_t ss, int64_t ds)    \
    {                                                                                                             \
        uint32_t x[GROUP];                                                                                        \
        for (; n > 0; n--, s += ss, d += ds) {                                                                    \
            FN(gather)(w, CODEC, s, x);                                                                           \
            FN(encode)(x, BITS, w->dst + w->dst_header + d * BITS / 8, w->dst + d / GROUP);                       \
        }                                                                                                         \
    }

ENCODE(fp32_to_bfp8, FP32, 8)
ENCODE(fp32_to_bfp4, FP32, 4)
ENCODE(fp16_to_bfp8, FP16, 8)
ENCODE(fp16_to_bfp4, FP16, 4)
#ifndef WITH_AVX2
ENCODE(bf16_to_bfp8, BF16, 8)
ENCODE(bf16_to_bfp4, BF16, 4)
#else
/* A bf16 group is one 256-bit register.  With the 8-bit significand in the upper half of a 16-bit lane, the high
 * half of its product with 0x8000 >> shift is the significand << 7 >> shift, exactly: shifts of 8 and more leave
 * less than half a unit of the result, so 0 is right for them. */
TARGET static ALWAYS void FN(encode_bf16)(__m256i x, int bits, int stream, uint8_t *code, uint8_t *exponent)
{
    const __m256i one = _mm256_set1_epi16(1);
    int keep = bits - 1, drop = 15 - keep;
    __m256i complement = _mm256_andnot_si256(x, _mm256_set1_epi16(0x7fff)); /* its least word is the largest number */
    __m128i most = _mm_min_epu16(_mm256_castsi256_si128(complement), _mm256_extracti128_si256(complement, 1));
    most = _mm_srli_epi16(_mm_minpos_epu16(most), 7);
    __m256i e = _mm256_srli_epi16(complement, 7);
    __m256i shift = _mm256_sub_epi16(e, _mm256_broadcastw_epi16(most));
    shift = _mm256_min_epi16(shift, _mm256_set1_epi16(8));
    __m256i sig = _mm256_or_si256(_mm256_and_si256(x, _mm256_set1_epi16(0x7f)), _mm256_set1_epi16(0x80));
    const __m256i powers = _mm256_setr_epi8(
        -128, 64, 32, 16, 8, 4, 2, 1, 0, 0, 0, 0, 0, 0, 0, 0, -128, 64, 32, 16, 8, 4, 2, 1, 0, 0, 0, 0, 0, 0, 0, 0);
    __m256i index = _mm256_or_si256(_mm256_slli_epi16(shift, 8), _mm256_set1_epi16(0x80));
    __m256i v = _mm256_mulhi_epu16(_mm256_slli_epi16(sig, 8), _mm256_shuffle_epi8(powers, index));
    v = _mm256_andnot_si256(_mm256_cmpeq_epi16(e, _mm256_set1_epi16(255)), v);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi16(v, drop), one);
    __m256i m = _mm256_add_epi16(_mm256_add_epi16(v, _mm256_set1_epi16((short)((1 << (drop - 1)) - 1))), odd);
    m = _mm256_min_epi16(_mm256_srli_epi16(m, drop), _mm256_set1_epi16((short)((1 << keep) - 1)));
    __m256i sign = _mm256_slli_epi16(_mm256_srli_epi16(x, 15), keep);
    m = _mm256_or_si256(m, _mm256_and_si256(sign, _mm256_cmpgt_epi16(m, _mm256_setzero_si256())));
    *exponent = (uint8_t)~_mm_cvtsi128_si32(most);
    __m128i bytes = _mm_packus_epi16(_mm256_castsi256_si128(m), _mm256_extracti128_si256(m, 1));
    if (bits == 8) {
        if (stream)
            _mm_stream_si128((__m128i *)(void *)code, bytes);
        else
            _mm_storeu_si128((__m128i *)(void *)code, bytes);
    } else {
        __m128i pairs = _mm_maddubs_epi16(bytes, _mm_set1_epi16(0x1001)); /* even + 16 * odd */
        _mm_storel_epi64((__m128i *)(void *)code, _mm_packus_epi16(pairs, pairs));
    }
}

TARGET static ALWAYS void FN(encode_rows)(const struct work *w, int64_t s, int64_t d, int64_t n, int64_t ss, int64_t ds,
                                          int bits, int stream)
{
    const uint16_t *from = (const uint16_t *)(const void *)w->src + s;
    uint8_t *code = w->dst + w->dst_header + d * bits / 8, *exponent = w->dst + d / GROUP;
    int64_t apart = w->apart, code_step = ds * bits / 8, exponent_step = ds / GROUP;
    if (w->us == 1) {
        for (; n > 0; n--, from += ss, code += code_step, exponent += exponent_step) {
            __m256i x = _mm256_loadu_si256((const __m256i *)(const void *)from);
            FN(encode_bf16)(x, bits, stream, code, exponent);
        }
    } else if (apart) {
        for (; n > 0; n--, from += ss, code += code_step, exponent += exponent_step) {
            __m128i a = _mm_loadu_si128((const __m128i *)(const void *)from);
            __m128i b = _mm_loadu_si128((const __m128i *)(const void *)(from + apart));
            __m256i x = _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_unpacklo_epi16(a, b)),
                                                _mm_unpackhi_epi16(a, b), 1);
            FN(encode_bf16)(x, bits, stream, code, exponent);
        }
    } else {
        for (; n > 0; n--, from += ss, code += code_step, exponent += exponent_step) {
            uint16_t h[GROUP];
            for (int k = 0; k < GROUP; k++)
                h[k] = get16(from + w->at[k]);
            FN(encode_bf16)(_mm256_loadu_si256((const __m256i *)(const void *)h), bits, stream, code, exponent);
        }
    }
}

TARGET static void FN(bf16_to_bfp8)(const struct work *w, int64_t s, int64_t d, int64_t n, int64_t ss, int64_t ds)
{
    if (w->stream)
        FN(encode_rows)(w, s, d, n, ss, ds, 8, 1);
    else
        FN(encode_rows)(w, s, d, n, ss, ds, 8, 0);
}

TARGET static void FN(bf16_to_bfp4)(const struct work *w, int64_t s, int64_t d, int64_t n, int64_t ss, int64_t ds)
{
    FN(encode_rows)(w, s, d, n, ss, ds, 4, 0);
}
#endif
#undef ENCODE

/* Whole aligned groups of block floats into contiguous elements. */
#define DECODE(NAME, BITS, TO, PUT, EXPR)                                                                         \
    TARGET static void FN(NAME)(const struct work *w, int64_t s, int64_t d, int64_t n, int64_t ss, int64_t ds)    \
    {                                                                                                             \
        for (; n > 0; n--, s += ss, d += ds) {                                                                    \
            TO *to = (TO *)(void *)w->dst + d;                                                                    \
            for (int64_t i = 0; i < w->unit; i += GROUP) {                                                        \
                uint32_t y[GROUP];                                                                                \
                decode_group(w, BITS, s + i, y);                                                                  \
                for (int k = 0; k < GROUP; k++) {                                                                 \
                    uint32_t x = y[k];                                                                            \
                    PUT(to + i + k, (TO)(EXPR));                                                                  \
                }                                                                                                 \
            }                                                                                                     \
        }                                                                                                         \
    }

DECODE(bfp8_to_bf16, 8, uint16_t, put16, x >> 16) /* exact: 7 bits, and bf16 has the same denormals' range */
DECODE(bfp4_to_bf16, 4, uint16_t, put16, x >> 16)
DECODE(bfp8_to_fp32, 8, uint32_t, put32, x)
DECODE(bfp4_to_fp32, 4, uint32_t, put32, x)
#undef DECODE
