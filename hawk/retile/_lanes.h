/* Codecs of sixteen bits and fewer in lanes of sixteen bits, 32 elements to a register: what `_convert.h` says by way of
 * binary32, bit for bit.  Included once, with AVX-512.
 *
 * bf16 holds every value of eight bits and fewer, and those of block floats, exactly: so it stands between two of these,
 * and the half of these pairs that is not here is two of those that are.  Rounding has no float arithmetic but the
 * conversions of fp16, which heed no mode that other code in the process may have set.
 */

/* Words that hold bf16 or fp16, their lower or upper half. */
#define WORDS(value) _mm512_set1_epi16((short)(value))

TARGET static ALWAYS __mmask32 FN(first)(int64_t n) { return n < 32 ? (1u << n) - 1 : ~0u; }

/* Half of 64 bytes each, as they lie. */
TARGET static ALWAYS __m512i FN(narrow)(__m512i a, __m512i b)
{
    return _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), _mm512_packus_epi16(a, b));
}

/* v, of which `drop` bits fall away: to nearest, ties to even. */
TARGET static ALWAYS __m512i FN(round_words)(__m512i v, int drop)
{
    __mmask32 odd = _mm512_test_epi16_mask(v, WORDS(1 << drop));
    v = _mm512_add_epi16(v, WORDS((1 << (drop - 1)) - 1));
    return _mm512_srli_epi16(_mm512_mask_sub_epi16(v, odd, v, WORDS(-1)), drop);
}

/* Codes of the magnitudes of bf16 words: `least` is the biased exponent of the format's least normal value.  A significand of
 * 8 bits, shifted left by 7 and right by what it is below that, loses no bit that could change the rounding. */
TARGET static ALWAYS __m512i FN(small_sizes)(__m512i x, __m512i size, __m512i least, int mantissa_bits, int largest)
{
    __m512i e = _mm512_srli_epi16(size, 7);
    __m512i sig = _mm512_ternarylogic_epi64(_mm512_slli_epi16(x, 7), WORDS(0x3f80), WORDS(0x4000), 0xea);
    __m512i kept = FN(round_words)(_mm512_srlv_epi16(sig, _mm512_subs_epu16(least, e)), 14 - mantissa_bits);
    /* A normal significand brings its hidden 1 along, which adds one to the exponent's field. */
    __m512i code = _mm512_add_epi16(kept, _mm512_slli_epi16(_mm512_subs_epu16(e, least), mantissa_bits));
    return _mm512_min_epu16(code, WORDS(largest));
}

/* Their signs and what is not a number. */
TARGET static ALWAYS __m512i FN(to_e4m3)(__m512i x)
{
    __m512i size = _mm512_and_si512(x, WORDS(0x7fff));
    __m512i code = FN(small_sizes)(x, size, WORDS(121), 3, 0x7e);
    code = _mm512_ternarylogic_epi64(_mm512_srli_epi16(x, 8), WORDS(0x80), code, 0xea);
    return _mm512_mask_mov_epi16(code, _mm512_cmpgt_epu16_mask(size, WORDS(0x7f80)), WORDS(0x7f));
}

TARGET static ALWAYS __m512i FN(to_e5m2)(__m512i x)
{
    __m512i size = _mm512_and_si512(x, WORDS(0x7fff));
    __m512i code = FN(small_sizes)(x, size, WORDS(113), 2, 0x7b);
    code = _mm512_mask_mov_epi16(code, _mm512_cmpeq_epi16_mask(size, WORDS(0x7f80)), WORDS(0x7c));
    code = _mm512_ternarylogic_epi64(_mm512_srli_epi16(x, 8), WORDS(0x80), code, 0xea);
    return _mm512_mask_mov_epi16(code, _mm512_cmpgt_epu16_mask(size, WORDS(0x7f80)), WORDS(0x7e));
}

/* A whole number is a code without an exponent: 64 to 127 are its only normal values, and what is above saturates. */
TARGET static ALWAYS __m512i FN(to_int8)(__m512i x)
{
    __m512i size = _mm512_and_si512(x, WORDS(0x7fff));
    __m512i code = FN(small_sizes)(x, size, WORDS(133), 6, 0x7f);
    code = _mm512_mask_sub_epi16(code, _mm512_movepi16_mask(x), _mm512_setzero_si512(), code);
    code = _mm512_and_si512(code, WORDS(0xff)); /* so that packing does not saturate */
    return _mm512_maskz_mov_epi16(_mm512_cmple_epu16_mask(size, WORDS(0x7f80)), code);
}

/* The other way.  Denormals, and what is not finite, stand in a table. */
TARGET static ALWAYS __m512i FN(of_e4m3)(__m512i code)
{
    const __m512i table = _mm512_castsi128_si512(
        _mm_setr_epi16(0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60));
    __m512i m = _mm512_and_si512(code, WORDS(0x7f));
    __m512i v = _mm512_add_epi16(_mm512_slli_epi16(m, 4), WORDS(120 << 7));
    v = _mm512_mask_permutexvar_epi16(v, _mm512_cmplt_epu16_mask(m, WORDS(8)), m, table);
    v = _mm512_ternarylogic_epi64(_mm512_slli_epi16(code, 8), WORDS(0x8000), v, 0xea);
    return _mm512_mask_mov_epi16(v, _mm512_cmpeq_epi16_mask(m, WORDS(0x7f)), WORDS(0x7fc0));
}

TARGET static ALWAYS __m512i FN(of_e5m2)(__m512i code)
{
    const __m512i table = _mm512_set_epi16(0x7fc0, 0x7fc0, 0x7fc0, 0x7f80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
                                           0, 0, 0, 0, 0, 0, 0x3840, 0x3800, 0x3780, 0);
    __m512i m = _mm512_and_si512(code, WORDS(0x7f));
    __m512i v = _mm512_add_epi16(_mm512_slli_epi16(m, 5), WORDS(112 << 7));
    /* 0 to 3 and 0x7c to 0x7f */
    __mmask32 rare = _mm512_cmplt_epu16_mask(_mm512_and_si512(_mm512_add_epi16(m, WORDS(4)), WORDS(0x7f)), WORDS(8));
    v = _mm512_mask_permutexvar_epi16(v, rare, m, table);
    __m512i sign = _mm512_maskz_slli_epi16(_mm512_cmple_epu16_mask(m, WORDS(0x7c)), code, 8);
    return _mm512_ternarylogic_epi64(sign, WORDS(0x8000), v, 0xea);
}

/* Whole numbers, exact: by halves of a lane of 32 bits. */
TARGET static ALWAYS __m512i FN(of_int8)(__m512i code)
{
    __m512i even = _mm512_srai_epi32(_mm512_slli_epi32(code, 24), 24), odd = _mm512_srai_epi32(_mm512_slli_epi32(code, 8), 24);
    even = _mm512_srli_epi32(_mm512_castps_si512(_mm512_cvtepi32_ps(even)), 16);
    return _mm512_mask_mov_epi16(even, 0xaaaaaaaau, _mm512_castps_si512(_mm512_cvtepi32_ps(odd)));
}

#define WIDEN(NAME, VALUE)                                                                                        \
    TARGET static void FN(NAME)(const uint8_t *from, const uint8_t *fs, int64_t n, uint8_t *to, uint8_t *ts)      \
    {                                                                                                             \
        (void)fs;                                                                                                 \
        (void)ts;                                                                                                 \
        for (; n >= 32; n -= 32, from += 32, to += 64)                                                            \
            _mm512_storeu_si512(                                                                                  \
                to, VALUE(_mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)(const void *)from))));        \
        if (n > 0)                                                                                                \
            _mm512_mask_storeu_epi16(                                                                             \
                to, FN(first)(n), VALUE(_mm512_cvtepu8_epi16(_mm256_maskz_loadu_epi8(FN(first)(n), from))));      \
    }

WIDEN(e4m3_bf16, FN(of_e4m3))
WIDEN(e5m2_bf16, FN(of_e5m2))
#undef WIDEN

#define NARROW(NAME, VALUE)                                                                                       \
    TARGET static void FN(NAME)(const uint8_t *from, const uint8_t *fs, int64_t n, uint8_t *to, uint8_t *ts)      \
    {                                                                                                             \
        (void)fs;                                                                                                 \
        (void)ts;                                                                                                 \
        for (; n >= 64; n -= 64, from += 128, to += 64)                                                           \
            _mm512_storeu_si512(                                                                                  \
                to, FN(narrow)(VALUE(_mm512_loadu_si512(from)), VALUE(_mm512_loadu_si512(from + 64))));           \
        for (; n > 0; n -= 32, from += 64, to += 32)                                                              \
            _mm512_mask_cvtepi16_storeu_epi8(to, FN(first)(n), VALUE(_mm512_maskz_loadu_epi16(FN(first)(n), from))); \
    }

NARROW(bf16_e4m3, FN(to_e4m3))
NARROW(bf16_e5m2, FN(to_e5m2))
NARROW(bf16_int8, FN(to_int8))
#undef NARROW

/* -- fp16 -- */

/* A quarter of a register each way: to nearest, ties to even, whatever the process asks for; denormals as they are. */
#define NEAREST (_MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)

/* Binary32, its upper halves rounded to bf16; NaN is the caller's. */
TARGET static ALWAYS __m512i FN(round_upper)(__m512i x)
{
    __mmask16 odd = _mm512_test_epi32_mask(x, _mm512_set1_epi32(0x10000));
    x = _mm512_add_epi32(x, _mm512_set1_epi32(0x7fff));
    return _mm512_mask_sub_epi32(x, odd, x, _mm512_set1_epi32(-1));
}

TARGET static ALWAYS __m512i FN(uppers)(__m512i low, __m512i high)
{
    const __m512i order = _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29, 27, 25, 23,
                                           21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
    return _mm512_permutex2var_epi16(low, order, high);
}

TARGET static ALWAYS __m512i FN(fp16_to_bf16)(__m512i x)
{
    __m512i low = _mm512_castps_si512(_mm512_cvt_roundph_ps(_mm512_castsi512_si256(x), _MM_FROUND_NO_EXC));
    __m512i high = _mm512_castps_si512(_mm512_cvt_roundph_ps(_mm512_extracti64x4_epi64(x, 1), _MM_FROUND_NO_EXC));
    __m512i v = FN(uppers)(FN(round_upper)(low), FN(round_upper)(high));
    __mmask32 nan = _mm512_cmpgt_epu16_mask(_mm512_and_si512(x, WORDS(0x7fff)), WORDS(0x7c00));
    return _mm512_mask_mov_epi16(v, nan, WORDS(0x7fc0));
}

TARGET static ALWAYS __m512i FN(bf16_to_fp16)(__m512i x)
{
    __mmask32 nan = _mm512_cmpgt_epu16_mask(_mm512_and_si512(x, WORDS(0x7fff)), WORDS(0x7f80));
    x = _mm512_mask_mov_epi16(x, nan, WORDS(0x7fc0));
    __m512i low = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(x)), 16);
    __m512i high = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(x, 1)), 16);
    __m256i a = _mm512_cvt_roundps_ph(_mm512_castsi512_ps(low), NEAREST);
    __m256i b = _mm512_cvt_roundps_ph(_mm512_castsi512_ps(high), NEAREST);
    return _mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1);
}

#define SAME_WIDTH(NAME, VALUE)                                                                                   \
    TARGET static void FN(NAME)(const uint8_t *from, const uint8_t *fs, int64_t n, uint8_t *to, uint8_t *ts)      \
    {                                                                                                             \
        (void)fs;                                                                                                 \
        (void)ts;                                                                                                 \
        for (; n >= 32; n -= 32, from += 64, to += 64)                                                            \
            _mm512_storeu_si512(to, VALUE(_mm512_loadu_si512(from)));                                             \
        if (n > 0)                                                                                                \
            _mm512_mask_storeu_epi16(to, FN(first)(n), VALUE(_mm512_maskz_loadu_epi16(FN(first)(n), from)));      \
    }

SAME_WIDTH(fp16_bf16, FN(fp16_to_bf16))
SAME_WIDTH(bf16_fp16, FN(bf16_to_fp16))
#undef SAME_WIDTH

/* -- binary32 -- */

/* The upper halves, the last bit set where something falls away: what is then rounded to two bits fewer is rounded once. */
TARGET static ALWAYS __m512i FN(odd)(__m512i low, __m512i high)
{
    const __m512i order = _mm512_set_epi16(62, 60, 58, 56, 54, 52, 50, 48, 46, 44, 42, 40, 38, 36, 34, 32, 30, 28, 26, 24, 22,
                                           20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    __m512i v = FN(uppers)(low, high), rest = _mm512_permutex2var_epi16(low, order, high);
    rest = _mm512_maskz_mov_epi16(_mm512_test_epi16_mask(rest, rest), WORDS(1));
    return _mm512_or_si512(v, rest);
}

/* Readers.  What bf16 holds exactly is that first. */
TARGET static ALWAYS void FN(put_wide)(__m512i x, u32 *to)
{
    _mm512_storeu_si512(to, _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(x)), 16));
    _mm512_storeu_si512(to + 16, _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(x, 1)), 16));
}

#define WIDE(NAME, VALUE)                                                                                         \
    TARGET static void FN(wide_##NAME)(const uint8_t *from, const uint8_t *shared, int64_t n, u32 *restrict x)    \
    {                                                                                                             \
        for (; n >= 32; n -= 32, from += 32, x += 32)                                                             \
            FN(put_wide)(VALUE(_mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)(const void *)from))), x); \
        FN(read_##NAME)(from, shared, n, x);                                                                      \
    }

WIDE(e4m3, FN(of_e4m3))
WIDE(e5m2, FN(of_e5m2))
#undef WIDE

/* The conversion sets the upper bit of a NaN's payload, which here stays as it is. */
TARGET static void FN(wide_fp16)(const uint8_t *from, const uint8_t *shared, int64_t n, u32 *restrict x)
{
    for (; n >= 16; n -= 16, from += 32, x += 16) {
        __m256i v = _mm256_loadu_si256((const __m256i *)(const void *)from);
        __m256i size = _mm256_and_si256(v, _mm256_set1_epi16(0x7fff));
        __mmask16 signals = _mm256_cmplt_epu16_mask(_mm256_sub_epi16(size, _mm256_set1_epi16(0x7c01)), _mm256_set1_epi16(0x1ff));
        __m512i wide = _mm512_castps_si512(_mm512_cvt_roundph_ps(v, _MM_FROUND_NO_EXC));
        _mm512_storeu_si512(x, _mm512_mask_xor_epi32(wide, signals, wide, _mm512_set1_epi32(0x400000)));
    }
    FN(read_fp16)(from, shared, n, x);
}

/* Writers. */
#define FROM_WIDE(NAME, VALUE)                                                                                    \
    TARGET static void FN(wide_to_##NAME)(const u32 *restrict x, int64_t n, uint8_t *to, uint8_t *shared)         \
    {                                                                                                             \
        for (; n >= 64; n -= 64, x += 64, to += 64) {                                                             \
            __m512i a = VALUE(FN(odd)(_mm512_loadu_si512(x), _mm512_loadu_si512(x + 16)));                        \
            __m512i b = VALUE(FN(odd)(_mm512_loadu_si512(x + 32), _mm512_loadu_si512(x + 48)));                   \
            _mm512_storeu_si512(to, FN(narrow)(a, b));                                                            \
        }                                                                                                         \
        FN(write_##NAME)(x, n, to, shared);                                                                       \
    }

FROM_WIDE(e4m3, FN(to_e4m3))
FROM_WIDE(e5m2, FN(to_e5m2))
#undef FROM_WIDE

TARGET static void FN(wide_to_fp16)(const u32 *restrict x, int64_t n, uint8_t *to, uint8_t *shared)
{
    for (; n >= 16; n -= 16, x += 16, to += 32) {
        __m512 v = _mm512_loadu_ps(x);
        __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
        __m256i half = _mm512_cvt_roundps_ph(v, NEAREST);
        _mm256_storeu_si256((__m256i *)(void *)to, _mm256_mask_mov_epi16(half, nan, _mm256_set1_epi16(0x7e00)));
    }
    FN(write_fp16)(x, n, to, shared);
}

/* A number that is none counts as 0, and what is beyond 127 as that. */
TARGET static void FN(wide_to_int8)(const u32 *restrict x, int64_t n, uint8_t *to, uint8_t *shared)
{
    for (; n >= 16; n -= 16, x += 16, to += 16) {
        __m512 v = _mm512_loadu_ps(x);
        __mmask16 number = _mm512_cmp_ps_mask(v, v, _CMP_ORD_Q);
        v = _mm512_max_ps(_mm512_min_ps(v, _mm512_set1_ps(127)), _mm512_set1_ps(-127));
        __m512i whole = _mm512_maskz_cvt_roundps_epi32(number, v, NEAREST);
        _mm_storeu_si128((__m128i *)(void *)to, _mm512_cvtepi32_epi8(whole));
    }
    FN(write_int8)(x, n, to, shared);
}
