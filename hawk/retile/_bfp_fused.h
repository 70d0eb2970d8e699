/* Into block floats straight from the source's page: a group each run, contiguous or woven of two halves. */

TARGET static ALWAYS __m256i FN(bfp_load)(const struct move *m, int64_t k, const uint8_t *from, int woven)
{
    from += m->src_at[k];
    if (!woven)
        return _mm256_loadu_si256((const __m256i *)(const void *)from);
    __m128i a = _mm_loadu_si128((const __m128i *)(const void *)from);
    __m128i b = _mm_loadu_si128((const __m128i *)(const void *)(from + m->b_at[1]));
    return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_unpacklo_epi16(a, b)), _mm_unpackhi_epi16(a, b), 1);
}

#ifdef WITH_AVX512
/* Two runs that follow each other in the source, or any: words, of bf16 unless the source has fp16. */
TARGET static ALWAYS __m512i FN(bfp_load2)(const struct move *m, int64_t k, const uint8_t *from, int source, int woven,
                                           int paired)
{
    if (!paired)
        return _mm512_inserti64x4(_mm512_castsi256_si512(FN(bfp_load)(m, k, from, woven)), FN(bfp_load)(m, k + 1, from, woven), 1);
    from += m->src_at[k];
    const uint8_t *other = from + m->b_at[1];
    if (source >= E4M3) {
        __m256i codes = _mm256_loadu_si256((const __m256i *)(const void *)from);
        if (woven) {
            __m128i a = _mm_loadu_si128((const __m128i *)(const void *)from);
            __m128i b = _mm_loadu_si128((const __m128i *)(const void *)other);
            codes = _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_unpacklo_epi8(a, b)), _mm_unpackhi_epi8(a, b), 1);
        }
        __m512i code = _mm512_cvtepu8_epi16(codes);
        return source == E4M3 ? FN(of_e4m3)(code) : source == E5M2 ? FN(of_e5m2)(code) : FN(of_int8)(code);
    }
    if (!woven)
        return _mm512_loadu_si512(from);
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5,
                                           20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    __m256i a = _mm256_loadu_si256((const __m256i *)(const void *)from);
    __m256i b = _mm256_loadu_si256((const __m256i *)(const void *)other);
    return _mm512_permutexvar_epi16(order, _mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1));
}

/* Four of these; 0 where they are rare ones of fp16. */
TARGET static ALWAYS int FN(bfp_take)(const struct move *m, int64_t k, const uint8_t *from, int source, int bits, int woven,
                                      int paired, __m512i *codes, uint32_t *exponents)
{
    __m512i a = FN(bfp_load2)(m, k, from, source, woven, paired), b = FN(bfp_load2)(m, k + 2, from, source, woven, paired);
    if (source == FP16)
        return FN(bfp_four16)(a, b, bits, codes, exponents);
    *codes = FN(bfp_four)(a, b, bits, exponents);
    return 1;
}

/* In which group of the target a run ends up. */
TARGET static ALWAYS uint64_t FN(bfp_at)(const struct move *m, int64_t k, int source)
{
    return (uint64_t)m->dst_at[k] / (source >= E4M3 ? GROUP : 2 * GROUP);
}

/* Runs of bf16, any; how many were left over. */
TARGET static ALWAYS int64_t FN(bfp_fours)(const struct move *m, const uint8_t *from, uint8_t *to, uint8_t *shared, int bits,
                                           int woven, int paired)
{
    const int64_t each = GROUP * bits / 8;
    int64_t k = 0;
    for (; k + 4 <= m->runs; k += 4) {
        uint32_t exponents;
        __m512i codes;
        FN(bfp_take)(m, k, from, BF16, bits, woven, paired, &codes, &exponents);
        int64_t at[4];
        for (int i = 0; i < 4; i++) {
            at[i] = (int64_t)FN(bfp_at)(m, k + i, BF16);
            shared[at[i]] = (uint8_t)(exponents >> 8 * i);
        }
        __m128i low = _mm512_castsi512_si128(codes), next = _mm512_extracti64x2_epi64(codes, 1);
        if (bits == 8) {
            _mm_storeu_si128((__m128i *)(void *)(to + at[0] * each), low);
            _mm_storeu_si128((__m128i *)(void *)(to + at[1] * each), next);
            _mm_storeu_si128((__m128i *)(void *)(to + at[2] * each), _mm512_extracti64x2_epi64(codes, 2));
            _mm_storeu_si128((__m128i *)(void *)(to + at[3] * each), _mm512_extracti64x2_epi64(codes, 3));
        } else {
            _mm_storel_epi64((__m128i *)(void *)(to + at[0] * each), low);
            _mm_storeh_pd((double *)(void *)(to + at[1] * each), _mm_castsi128_pd(low));
            _mm_storel_epi64((__m128i *)(void *)(to + at[2] * each), next);
            _mm_storeh_pd((double *)(void *)(to + at[3] * each), _mm_castsi128_pd(next));
        }
    }
    return k;
}

/* Eight runs of fp16, some of which have denormals only, or what is not finite. */
TARGET static __attribute__((noinline)) void FN(bfp_rare_runs)(const struct move *m, int64_t k, const uint8_t *from, uint8_t *to,
                                                               uint8_t *shared, int bits, int woven)
{
    for (int i = 0; i < 8; i++) {
        uint8_t x[2 * GROUP];
        const uint64_t at = FN(bfp_at)(m, k + i, FP16);
        _mm256_storeu_si256((__m256i *)(void *)x, FN(bfp_load)(m, k + i, from, woven));
        FN(bfp_rare16)(x, GROUP, to + at * (uint64_t)(GROUP * bits / 8), shared + at, bits);
    }
}

/* Eight runs, of which every other one goes on in the target: four of either fill a line. */
TARGET static ALWAYS void FN(bfp_lines)(const struct move *m, const uint8_t *from, uint8_t *to, uint8_t *shared, int source,
                                        int bits, int woven, int past)
{
    const __m128i order = _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 8, 8, 8, 8, 8, 8, 8);
    const __m512i fours = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
    for (int64_t k = 0; k < m->runs;) {
        for (; k < m->runs; k += 8) {
            uint32_t e[2];
            __m512i a, b;
            if (!FN(bfp_take)(m, k, from, source, bits, woven, 1, &a, &e[0]) ||
                !FN(bfp_take)(m, k + 4, from, source, bits, woven, 1, &b, &e[1]))
                break;
            const uint64_t i = FN(bfp_at)(m, k, source), j = FN(bfp_at)(m, k + 1, source);
            __m128i each = _mm_unpacklo_epi32(_mm_cvtsi32_si128((int)e[0]), _mm_cvtsi32_si128((int)e[1]));
            each = _mm_shuffle_epi8(each, order);
            put32(shared + i, (uint32_t)_mm_cvtsi128_si32(each));
            put32(shared + j, (uint32_t)_mm_extract_epi32(each, 1));
            if (bits == 8) {
                __m512i one = _mm512_shuffle_i64x2(a, b, 0x88), other = _mm512_shuffle_i64x2(a, b, 0xdd);
                if (past) {
                    _mm512_stream_si512((void *)(to + i * GROUP), one);
                    _mm512_stream_si512((void *)(to + j * GROUP), other);
                } else {
                    _mm512_storeu_si512(to + i * GROUP, one);
                    _mm512_storeu_si512(to + j * GROUP, other);
                }
            } else {
                __m256i *one = (__m256i *)(void *)(to + i * (GROUP / 2)), *other = (__m256i *)(void *)(to + j * (GROUP / 2));
                a = _mm512_permutexvar_epi64(fours, _mm512_inserti64x4(a, _mm512_castsi512_si256(b), 1));
                __m256i x = _mm512_castsi512_si256(a), y = _mm512_extracti64x4_epi64(a, 1);
                if (past) {
                    _mm256_stream_si256(one, x);
                    _mm256_stream_si256(other, y);
                } else {
                    _mm256_storeu_si256(one, x);
                    _mm256_storeu_si256(other, y);
                }
            }
        }
        if (k < m->runs) {
            FN(bfp_rare_runs)(m, k, from, to, shared, bits, woven);
            k += 8;
        }
    }
}
#endif

TARGET static ALWAYS void FN(bfp_runs)(const struct move *m, const uint8_t *from, uint8_t *to, uint8_t *shared, int source,
                                       int bits, int woven, int past)
{
    int64_t k = 0;
#ifdef WITH_AVX512
    if (m->lined || source != BF16) {
        if (past)
            FN(bfp_lines)(m, from, to, shared, source, bits, woven, 1);
        else
            FN(bfp_lines)(m, from, to, shared, source, bits, woven, 0);
        return;
    }
    if (m->paired)
        k = FN(bfp_fours)(m, from, to, shared, bits, woven, 1);
    else
        k = FN(bfp_fours)(m, from, to, shared, bits, woven, 0);
#endif
    (void)source;
    (void)past;
    for (; k < m->runs; k++) {
        int64_t i = m->dst_at[k] / (2 * GROUP);
        __m128i codes = bfp_codes_avx2(FN(bfp_load)(m, k, from, woven), bits, shared + i);
        bfp_put_avx2(codes, bits, to + i * (GROUP * bits / 8));
    }
}

#define FUSED(NAME, SOURCE, BITS, WOVEN)                                                                          \
    TARGET static void FN(NAME)(const struct move *m, const uint8_t *from, uint8_t *to, uint8_t *shared, int past) \
    {                                                                                                             \
        FN(bfp_runs)(m, from, to, shared, SOURCE, BITS, WOVEN, past);                                             \
    }
#define FUSED4(NAME, SOURCE)                                                                                      \
    FUSED(NAME##_runs_bfp8, SOURCE, 8, 0)                                                                         \
    FUSED(NAME##_runs_bfp4, SOURCE, 4, 0)                                                                         \
    FUSED(NAME##_weave_bfp8, SOURCE, 8, 1)                                                                        \
    FUSED(NAME##_weave_bfp4, SOURCE, 4, 1)
FUSED4(bf16, BF16)
#ifdef WITH_AVX512
FUSED4(fp16, FP16)
FUSED4(e4m3, E4M3)
FUSED4(e5m2, E5M2)
FUSED4(int8, INT8)
#endif
#undef FUSED
#undef FUSED4
