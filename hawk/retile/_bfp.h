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
/* Two groups; where their codes and exponents go. */
TARGET static ALWAYS void FN(bfp_two)(__m512i x, int bits, uint8_t *to0, uint8_t *to1, uint8_t *shared0, uint8_t *shared1)
{
    const int keep = bits - 1, drop = 15 - keep;
    __m512i complement = _mm512_andnot_si512(x, _mm512_set1_epi16(0x7fff));
    __m256i low = _mm512_castsi512_si256(complement), high = _mm512_extracti64x4_epi64(complement, 1);
    __m128i least0 = _mm_min_epu16(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
    __m128i least1 = _mm_min_epu16(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
    least0 = _mm_srli_epi16(_mm_minpos_epu16(least0), 7);
    least1 = _mm_srli_epi16(_mm_minpos_epu16(least1), 7);
    *shared0 = (uint8_t)~_mm_cvtsi128_si32(least0);
    *shared1 = (uint8_t)~_mm_cvtsi128_si32(least1);
    __m512i most = _mm512_mask_broadcastw_epi16(_mm512_broadcastw_epi16(least0), 0xffff0000u, least1);
    __m512i e = _mm512_srli_epi16(complement, 7);
    __mmask32 normal = _mm512_cmpneq_epi16_mask(e, _mm512_set1_epi16(255));
    __m512i sig = _mm512_maskz_slli_epi16(normal, _mm512_or_si512(x, _mm512_set1_epi16(0x80)), 8);
    __m512i v = _mm512_srlv_epi16(_mm512_srli_epi16(sig, 1), _mm512_sub_epi16(e, most));
    __m512i odd = _mm512_and_si512(_mm512_srli_epi16(v, drop), _mm512_set1_epi16(1));
    __m512i m = _mm512_add_epi16(_mm512_add_epi16(v, _mm512_set1_epi16((short)((1 << (drop - 1)) - 1))), odd);
    m = _mm512_min_epi16(_mm512_srli_epi16(m, drop), _mm512_set1_epi16((short)((1 << keep) - 1)));
    __mmask32 negative = _mm512_mask_test_epi16_mask(_mm512_movepi16_mask(x), m, m);
    m = _mm512_mask_add_epi16(m, negative, m, _mm512_set1_epi16((short)(1 << keep)));
    __m256i bytes = _mm512_cvtepi16_epi8(m);
    if (bits == 8) {
        _mm_storeu_si128((__m128i *)(void *)to0, _mm256_castsi256_si128(bytes));
        _mm_storeu_si128((__m128i *)(void *)to1, _mm256_extracti128_si256(bytes, 1));
    } else {
        __m256i pairs = _mm256_maddubs_epi16(bytes, _mm256_set1_epi16(0x1001)); /* even + 16 * odd */
        __m128i packed = _mm256_cvtepi16_epi8(pairs);
        _mm_storel_epi64((__m128i *)(void *)to0, packed);
        _mm_storel_epi64((__m128i *)(void *)to1, _mm_unpackhi_epi64(packed, packed));
    }
}

TARGET static ALWAYS void FN(bf16_bfp)(const uint8_t *from, int64_t n, uint8_t *to, uint8_t *shared, int bits)
{
    const int64_t each = GROUP * bits / 8;
    for (; n >= 2 * GROUP; n -= 2 * GROUP, from += 4 * GROUP, to += 2 * each, shared += 2)
        FN(bfp_two)(_mm512_loadu_si512(from), bits, to, to + each, shared, shared + 1);
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

/* A group each run, straight from the source's page: contiguous, or woven of two halves. */
TARGET static ALWAYS __m256i FN(bfp_load)(const struct move *m, int64_t k, const uint8_t *from, int woven)
{
    from += m->src_at[k];
    if (!woven)
        return _mm256_loadu_si256((const __m256i *)(const void *)from);
    __m128i a = _mm_loadu_si128((const __m128i *)(const void *)from);
    __m128i b = _mm_loadu_si128((const __m128i *)(const void *)(from + m->b_at[1]));
    return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_unpacklo_epi16(a, b)), _mm_unpackhi_epi16(a, b), 1);
}

TARGET static ALWAYS void FN(bfp_runs)(const struct move *m, const uint8_t *from, uint8_t *to, uint8_t *shared, int bits,
                                       int woven)
{
    int64_t k = 0;
#ifdef WITH_AVX512
    for (; k + 2 <= m->runs; k += 2) {
        __m256i a = FN(bfp_load)(m, k, from, woven), b = FN(bfp_load)(m, k + 1, from, woven);
        int64_t i = m->dst_at[k] / (2 * GROUP), j = m->dst_at[k + 1] / (2 * GROUP);
        FN(bfp_two)(_mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1), bits, to + i * (GROUP * bits / 8),
                    to + j * (GROUP * bits / 8), shared + i, shared + j);
    }
    if (k < m->runs) {
        int64_t i = m->dst_at[k] / (2 * GROUP);
        bfp_put_avx2(bfp_codes_avx2(FN(bfp_load)(m, k, from, woven), bits, shared + i), bits, to + i * (GROUP * bits / 8));
    }
#else
    for (; k < m->runs; k++) {
        int64_t i = m->dst_at[k] / (2 * GROUP);
        FN(bfp_put)(FN(bfp_codes)(FN(bfp_load)(m, k, from, woven), bits, shared + i), bits, to + i * (GROUP * bits / 8));
    }
#endif
}

#define FUSED(NAME, BITS, WOVEN)                                                                                  \
    TARGET static void FN(NAME)(const struct move *m, const uint8_t *from, uint8_t *to, uint8_t *shared)          \
    {                                                                                                             \
        FN(bfp_runs)(m, from, to, shared, BITS, WOVEN);                                                           \
    }
FUSED(runs_bfp8, 8, 0)
FUSED(runs_bfp4, 4, 0)
FUSED(weave_bfp8, 8, 1)
FUSED(weave_bfp4, 4, 1)
#undef FUSED

#ifdef WITH_AVX512
/* The other way, two groups to a register.  A magnitude becomes the bf16 of a whole number by a table in registers, and the
 * group's scale is added to its exponent's field; where the result may be denormal the long way is taken. */
TARGET static ALWAYS __m512i FN(bfp_value)(__m512i code, int bits, const uint8_t *shared, const __m512i *table)
{
    const int keep = bits - 1;
    __m512i m = _mm512_and_si512(code, _mm512_set1_epi16((short)((1 << keep) - 1)));
    __m512i v;
    if (bits == 8) {
        v = _mm512_permutex2var_epi16(table[0], m, table[1]);
        v = _mm512_mask_mov_epi16(v, _mm512_test_epi16_mask(m, _mm512_set1_epi16(64)),
                                  _mm512_permutex2var_epi16(table[2], m, table[3]));
    } else {
        v = _mm512_permutexvar_epi16(m, table[0]);
    }
    __m512i scale = _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_set1_epi16((short)((shared[0] - 126 - keep) * 128))),
                                       _mm256_set1_epi16((short)((shared[1] - 126 - keep) * 128)), 1);
    v = _mm512_mask_add_epi16(v, _mm512_test_epi16_mask(m, m), v, scale);
    v = _mm512_min_epu16(v, _mm512_set1_epi16(0x7f80));
    __m512i sign = _mm512_slli_epi16(_mm512_srli_epi16(code, keep), 15);
    return _mm512_or_si512(v, sign);
}

TARGET static ALWAYS void FN(bfp_bf16)(const uint8_t *from, const uint8_t *shared, int64_t n, uint8_t *to, int bits)
{
    const int keep = bits - 1, two = 2 * GROUP;
    __m512i table[4];
    for (int k = 0; k < 4; k++)
        table[k] = _mm512_loadu_si512(&whole_bf16[32 * k]);
    for (; n >= two; n -= two, from += two * bits / 8, to += 2 * two, shared += 2) {
        if (shared[0] < keep || shared[1] < keep) {
            (bits == 8 ? bfp8_bf16_avx2 : bfp4_bf16_avx2)(from, shared, two, to, NULL);
            continue;
        }
        __m512i code;
        if (bits == 8) {
            code = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)(const void *)from));
        } else {
            __m512i pair = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(const void *)from));
            code = _mm512_or_si512(_mm512_and_si512(pair, _mm512_set1_epi32(15)),
                                   _mm512_slli_epi32(_mm512_srli_epi32(pair, 4), 16));
        }
        _mm512_storeu_si512(to, FN(bfp_value)(code, bits, shared, table));
    }
    if (n > 0)
        (bits == 8 ? bfp8_bf16_avx2 : bfp4_bf16_avx2)(from, shared, n, to, NULL);
}

TARGET static void FN(bfp8_bf16)(const uint8_t *from, const uint8_t *fs, int64_t n, uint8_t *to, uint8_t *ts)
{
    (void)ts;
    FN(bfp_bf16)(from, fs, n, to, 8);
}

TARGET static void FN(bfp4_bf16)(const uint8_t *from, const uint8_t *fs, int64_t n, uint8_t *to, uint8_t *ts)
{
    (void)ts;
    FN(bfp_bf16)(from, fs, n, to, 4);
}
#endif
