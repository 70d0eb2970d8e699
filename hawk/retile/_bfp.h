/* bf16 to block floats by intrinsics, contiguous groups: a group is one 256-bit register, with AVX-512 two are one.
 * Included once for each of the two.
 *
 * Exponents are handled as their complements to 255: the largest exponent is then the least word, which one instruction
 * finds.  A significand of 8 bits, shifted left by 7 and right by the distance to the largest exponent, loses no bit that
 * could change the rounding: shifts of 8 and more leave less than half a unit of the result, so 0 is right for them.
 */

#ifndef WITH_AVX512
/* Without shifts of single words: with the significand in the upper half of a lane, the high half of its product with
 * 0x8000 >> shift is what is wanted. */
TARGET static ALWAYS __m128i FN(bfp_codes)(__m256i x, int bits, uint8_t *exponent)
{
    const __m256i one = _mm256_set1_epi16(1);
    int keep = bits - 1, drop = 15 - keep;
    __m256i complement = _mm256_andnot_si256(x, _mm256_set1_epi16(0x7fff));
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
    return _mm_packus_epi16(_mm256_castsi256_si128(m), _mm256_extracti128_si256(m, 1));
}

TARGET static ALWAYS void FN(bfp_put)(__m128i bytes, int bits, uint8_t *to)
{
    if (bits == 8) {
        _mm_storeu_si128((__m128i *)(void *)to, bytes);
    } else {
        __m128i pairs = _mm_maddubs_epi16(bytes, _mm_set1_epi16(0x1001)); /* even + 16 * odd */
        _mm_storel_epi64((__m128i *)(void *)to, _mm_packus_epi16(pairs, pairs));
    }
}

TARGET static ALWAYS void FN(bf16_bfp)(const uint8_t *from, int64_t n, uint8_t *to, uint8_t *shared, int bits)
{
    for (; n > 0; n -= GROUP, from += 2 * GROUP, to += GROUP * bits / 8) {
        __m256i x = _mm256_loadu_si256((const __m256i *)(const void *)from);
        FN(bfp_put)(FN(bfp_codes)(x, bits, shared++), bits, to);
    }
}
#else
/* The largest of four groups, `a` and `b` two each: group k's in every word of lane k. */
TARGET static ALWAYS __m512i FN(bfp_most)(__m512i a, __m512i b)
{
    __m512i most = _mm512_max_epu16(_mm512_shuffle_i64x2(a, b, 0x88), _mm512_shuffle_i64x2(a, b, 0xdd));
    most = _mm512_max_epu16(most, _mm512_shuffle_epi32(most, 0x4e));
    most = _mm512_max_epu16(most, _mm512_shuffle_epi32(most, 0xb1));
    return _mm512_max_epu16(most, _mm512_rol_epi32(most, 16));
}

/* Magnitudes of two groups by their exponents and `most`, those of the groups: words. */
TARGET static ALWAYS __m512i FN(bfp_sizes)(__m512i x, __m512i size, __m512i most, int bits)
{
    const int keep = bits - 1, drop = 15 - keep;
    __m512i shift = _mm512_sub_epi16(most, _mm512_srli_epi16(size, 7));
    __mmask32 normal = _mm512_cmpgt_epu16_mask(size, _mm512_set1_epi16(0x7f));
    /* (x << 7 & 0x3f80) | 0x4000 */
    __m512i sig = _mm512_maskz_mov_epi16(normal, _mm512_ternarylogic_epi64(_mm512_slli_epi16(x, 7), _mm512_set1_epi16(0x3f80),
                                                                           _mm512_set1_epi16(0x4000), 0xea));
    __m512i v = _mm512_srlv_epi16(sig, shift);
    __mmask32 odd = _mm512_test_epi16_mask(v, _mm512_set1_epi16((short)(1 << drop)));
    v = _mm512_add_epi16(v, _mm512_set1_epi16((short)((1 << (drop - 1)) - 1)));
    v = _mm512_mask_sub_epi16(v, odd, v, _mm512_set1_epi16(-1));
    return _mm512_min_epi16(_mm512_srli_epi16(v, drop), _mm512_set1_epi16((short)((1 << keep) - 1)));
}

/* The first word of each lane, one a byte. */
TARGET static ALWAYS uint32_t FN(bfp_exponents)(__m512i lanes)
{
    const __m512i firsts = _mm512_setr_epi32(0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12);
    __m128i each = _mm512_castsi512_si128(_mm512_permutexvar_epi32(firsts, lanes));
    return (uint32_t)_mm_cvtsi128_si32(_mm_shuffle_epi8(each, _mm_set1_epi32(0x0c080400)));
}

/* Codes by magnitudes and signs; of four bits in the lower half of what is returned. */
TARGET static ALWAYS __m512i FN(bfp_signed)(__m512i m, __mmask64 negative, int bits)
{
    negative = _mm512_mask_test_epi8_mask(negative, m, m);
    m = _mm512_mask_add_epi8(m, negative, m, _mm512_set1_epi8((char)(1 << (bits - 1))));
    if (bits == 8)
        return m;
    __m512i pairs = _mm512_maddubs_epi16(m, _mm512_set1_epi16(0x1001)); /* even + 16 * odd */
    return _mm512_castsi256_si512(_mm512_cvtepi16_epi8(pairs));
}

/* Four groups: their codes, and exponents, one a byte. */
TARGET static ALWAYS __m512i FN(bfp_four)(__m512i a, __m512i b, int bits, uint32_t *exponents)
{
    const __m512i all = _mm512_set1_epi16(0x7fff), order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
    __m512i size_a = _mm512_and_si512(a, all), size_b = _mm512_and_si512(b, all);
    __m512i most = _mm512_srli_epi16(FN(bfp_most)(size_a, size_b), 7);
    *exponents = FN(bfp_exponents)(most);
    __m512i m = _mm512_packus_epi16(FN(bfp_sizes)(a, size_a, _mm512_shuffle_i64x2(most, most, 0x50), bits),
                                    FN(bfp_sizes)(b, size_b, _mm512_shuffle_i64x2(most, most, 0xfa), bits));
    m = _mm512_permutexvar_epi64(order, m);
    return FN(bfp_signed)(m, _mm512_kunpackd(_mm512_movepi16_mask(b), _mm512_movepi16_mask(a)), bits);
}

TARGET static ALWAYS void FN(bfp_put4)(__m512i codes, int bits, uint8_t *to)
{
    if (bits == 8)
        _mm512_storeu_si512(to, codes);
    else
        _mm256_storeu_si256((__m256i *)(void *)to, _mm512_castsi512_si256(codes));
}

TARGET static ALWAYS void FN(bf16_bfp)(const uint8_t *from, int64_t n, uint8_t *to, uint8_t *shared, int bits)
{
    const int64_t four = 4 * GROUP;
    for (; n >= four; n -= four, from += 2 * four, to += four * bits / 8, shared += 4) {
        uint32_t exponents;
        __m512i codes = FN(bfp_four)(_mm512_loadu_si512(from), _mm512_loadu_si512(from + four), bits, &exponents);
        put32(shared, exponents);
        FN(bfp_put4)(codes, bits, to);
    }
    if (n > 0)
        bf16_bfp_avx2(from, n, to, shared, bits);
}
#endif

TARGET static void FN(bf16_bfp8)(const uint8_t *from, const uint8_t *fs, int64_t n, uint8_t *to, uint8_t *ts)
{
    (void)fs;
    FN(bf16_bfp)(from, n, to, ts, 8);
}

TARGET static void FN(bf16_bfp4)(const uint8_t *from, const uint8_t *fs, int64_t n, uint8_t *to, uint8_t *ts)
{
    (void)fs;
    FN(bf16_bfp)(from, n, to, ts, 4);
}

#ifdef WITH_AVX512
/* The other way, two groups to a register.  A magnitude becomes a float as a whole number, of which the upper half is the
 * bf16, and the group's scale is added to its exponent's field; a code of four bits becomes one by a table.  Where a result
 * may be denormal or infinite the long way is taken. */
TARGET static ALWAYS __m512i FN(bfp_value)(const uint8_t *from, int bits, __m512i scale)
{
    __m512i code, v;
    __mmask32 some;
    if (bits == 8) {
        code = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)(const void *)from));
        __m512i m = _mm512_and_si512(code, _mm512_set1_epi16(0x7f));
        some = _mm512_test_epi16_mask(m, m);
        v = _mm512_castps_si512(_mm512_cvtepi32_ps(_mm512_and_si512(m, _mm512_set1_epi32(0xffff))));
        v = _mm512_mask_mov_epi16(_mm512_srli_epi32(v, 16), 0xaaaaaaaau,
                                  _mm512_castps_si512(_mm512_cvtepi32_ps(_mm512_srli_epi32(m, 16))));
        v = _mm512_mask_add_epi16(v, some, v, scale);
        return _mm512_ternarylogic_epi64(_mm512_slli_epi16(code, 8), _mm512_set1_epi16((short)0x8000), v, 0xea);
    }
    const __m512i table = _mm512_broadcast_i64x4(_mm256_setr_epi16(0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0,
                                                                   (short)0x8000, (short)0xbf80, (short)0xc000, (short)0xc040,
                                                                   (short)0xc080, (short)0xc0a0, (short)0xc0c0, (short)0xc0e0));
    code = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(const void *)from));
    code = _mm512_and_si512(_mm512_or_si512(code, _mm512_slli_epi32(code, 12)), _mm512_set1_epi16(15));
    some = _mm512_test_epi16_mask(code, _mm512_set1_epi16(7));
    v = _mm512_permutexvar_epi16(code, table);
    return _mm512_mask_add_epi16(v, some, v, scale);
}

/* Where the values of a group go, or of two that follow each other. */
enum { IN_ORDER, IN_RUNS, APART };

TARGET static ALWAYS void FN(bfp_store)(__m512i v, const struct move *m, int64_t k, uint8_t *to, int how)
{
    const __m512i halves = _mm512_set_epi16(31, 29, 27, 25, 23, 21, 19, 17, 30, 28, 26, 24, 22, 20, 18, 16, 15, 13, 11, 9, 7, 5,
                                            3, 1, 14, 12, 10, 8, 6, 4, 2, 0);
    if (how == IN_ORDER) {
        _mm512_storeu_si512(to + k * 2 * GROUP, v);
    } else if (how == IN_RUNS) {
        _mm256_storeu_si256((__m256i *)(void *)(to + m->dst_at[k]), _mm512_castsi512_si256(v));
        _mm256_storeu_si256((__m256i *)(void *)(to + m->dst_at[k + 1]), _mm512_extracti64x4_epi64(v, 1));
    } else {
        v = _mm512_permutexvar_epi16(halves, v);
        uint8_t *t = to + m->dst_at[k], *u = to + m->dst_at[k + 1];
        _mm_storeu_si128((__m128i *)(void *)t, _mm512_castsi512_si128(v));
        _mm_storeu_si128((__m128i *)(void *)(t + m->a_at[1]), _mm512_extracti64x2_epi64(v, 1));
        _mm_storeu_si128((__m128i *)(void *)u, _mm512_extracti64x2_epi64(v, 2));
        _mm_storeu_si128((__m128i *)(void *)(u + m->a_at[1]), _mm512_extracti64x2_epi64(v, 3));
    }
}

/* Up to 16 groups, some of which have denormal or infinite values, or zeros, whose exponent is 0.  Not part of the function
 * below, which would not keep its constants in registers. */
TARGET static __attribute__((noinline)) void FN(bfp_bf16_rare)(const uint8_t *from, const uint8_t *shared, int groups,
                                                               const struct move *m, int64_t first, uint8_t *to, int bits,
                                                               int how)
{
    const int each = GROUP * bits / 8;
    uint8_t plain[4 * GROUP];
    for (int k = 0; k < groups; k += 2) {
        int n = k + 2 <= groups ? 2 * GROUP : GROUP;
        (bits == 8 ? bfp8_bf16_avx2 : bfp4_bf16_avx2)(from + k * each, shared + k, n, plain, NULL);
        if (n == GROUP)
            memcpy(to + (first + k) * 2 * GROUP, plain, 2 * GROUP);
        else
            FN(bfp_store)(_mm512_loadu_si512(plain), m, first + k, to, how);
    }
}

/* `groups` of them, an even number unless they go in order. */
TARGET static ALWAYS void FN(bfp_bf16)(const uint8_t *from, const uint8_t *shared, int64_t groups, const struct move *m,
                                       uint8_t *to, int bits, int how)
{
    const int keep = bits - 1, each = GROUP * bits / 8;
    for (int64_t g = 0; g < groups; g += 16) {
        int some = groups - g < 16 ? (int)(groups - g) : 16;
        uint32_t scale[16];
        __mmask16 there = (__mmask16)((1u << some) - 1);
        __m512i e = _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(there, shared + g));
        __mmask16 usual = _mm512_cmplt_epu32_mask(_mm512_sub_epi32(e, _mm512_set1_epi32(keep)), _mm512_set1_epi32(255 - keep));
        if (usual != there || some % 2) {
            FN(bfp_bf16_rare)(from + g * each, shared + g, some, m, g, to, bits, how);
            continue;
        }
        e = _mm512_slli_epi32(_mm512_sub_epi32(e, _mm512_set1_epi32(126 + keep)), 7);
        _mm512_storeu_si512(scale, _mm512_mask_mov_epi16(e, 0xaaaaaaaau, _mm512_slli_epi32(e, 16)));
        for (int k = 0; k < some; k += 2) {
            __m512i two = _mm512_mask_set1_epi32(_mm512_set1_epi32((int)scale[k]), 0xff00, (int)scale[k + 1]);
            FN(bfp_store)(FN(bfp_value)(from + (g + k) * each, bits, two), m, g + k, to, how);
        }
    }
}

#define BFP_BF16(BITS)                                                                                            \
    TARGET static void FN(bfp##BITS##_bf16)(const uint8_t *from, const uint8_t *fs, int64_t n, uint8_t *to,       \
                                            uint8_t *ts)                                                          \
    {                                                                                                             \
        (void)ts;                                                                                                 \
        FN(bfp_bf16)(from, fs, n / GROUP, NULL, to, BITS, IN_ORDER);                                              \
    }                                                                                                             \
    TARGET static void FN(bfp##BITS##_runs)(const struct move *m, const uint8_t *from, const uint8_t *fs,         \
                                            uint8_t *to)                                                          \
    {                                                                                                             \
        FN(bfp_bf16)(from, fs, m->runs, m, to, BITS, IN_RUNS);                                                    \
    }                                                                                                             \
    TARGET static void FN(bfp##BITS##_apart)(const struct move *m, const uint8_t *from, const uint8_t *fs,        \
                                             uint8_t *to)                                                         \
    {                                                                                                             \
        FN(bfp_bf16)(from, fs, m->runs, m, to, BITS, APART);                                                      \
    }
BFP_BF16(8)
BFP_BF16(4)
#undef BFP_BF16
#endif
