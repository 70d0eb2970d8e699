/* fp16 and binary32 to block floats with AVX-512, four groups at a time; see `_bfp.h` for those of bf16. */

/* A significand of 11 bits, shifted left by 4 and right by the distance to the largest exponent, loses bits: what counts of them
 * is whether there are any, for those of half a unit and more are not among them. */
TARGET static ALWAYS __m512i FN(bfp_sizes16)(__m512i x, __m512i size, __m512i most, int bits)
{
    const int keep = bits - 1, drop = 15 - keep;
    __m512i e = _mm512_max_epu16(_mm512_srli_epi16(size, 10), WORDS(1));
    __m512i sig = _mm512_and_si512(_mm512_slli_epi16(x, 4), WORDS(0x3ff0));
    __mmask32 normal = _mm512_cmpgt_epu16_mask(size, WORDS(0x3ff));
    sig = _mm512_mask_add_epi16(sig, normal, sig, WORDS(0x4000));
    __m512i shift = _mm512_sub_epi16(most, e), v = _mm512_srlv_epi16(sig, shift);
    __mmask32 up = _mm512_test_epi16_mask(v, WORDS(1 << drop)) | _mm512_cmpneq_epi16_mask(_mm512_sllv_epi16(v, shift), sig);
    v = _mm512_add_epi16(v, WORDS((1 << (drop - 1)) - 1));
    v = _mm512_mask_sub_epi16(v, up, v, WORDS(-1));
    return _mm512_min_epi16(_mm512_srli_epi16(v, drop), WORDS((1 << keep) - 1));
}

TARGET static __attribute__((noinline)) void FN(bfp_rare16)(const uint8_t *from, int64_t n, uint8_t *to, uint8_t *shared, int bits)
{
    for (; n > 0; n -= GROUP, from += 2 * GROUP, to += GROUP * bits / 8) {
        uint32_t x[GROUP];
        FN(read_fp16)(from, NULL, GROUP, x);
        (bits == 8 ? FN(write_bfp8) : FN(write_bfp4))(x, GROUP, to, shared++);
    }
}

/* Four groups as `bfp_four` does it; 0 where some have denormals only, or what is not finite. */
TARGET static ALWAYS int FN(bfp_four16)(__m512i a, __m512i b, int bits, __m512i *codes, uint32_t *exponents)
{
    __m512i size_a = _mm512_and_si512(a, WORDS(0x7fff)), size_b = _mm512_and_si512(b, WORDS(0x7fff));
    __m512i most = FN(bfp_most)(size_a, size_b);
    __mmask32 some = _mm512_test_epi16_mask(most, most); /* groups of zeros have the exponent 0 */
    if (_mm512_mask_cmpge_epu16_mask(some, _mm512_sub_epi16(most, WORDS(0x400)), WORDS(0x7800)))
        return 0;
    most = _mm512_max_epu16(_mm512_srli_epi16(most, 10), WORDS(1));
    *exponents = FN(bfp_exponents)(_mm512_maskz_add_epi16(some, most, WORDS(112)));
    __m512i m = FN(narrow)(FN(bfp_sizes16)(a, size_a, _mm512_shuffle_i64x2(most, most, 0x50), bits),
                           FN(bfp_sizes16)(b, size_b, _mm512_shuffle_i64x2(most, most, 0xfa), bits));
    *codes = FN(bfp_signed)(m, _mm512_kunpackd(_mm512_movepi16_mask(b), _mm512_movepi16_mask(a)), bits);
    return 1;
}

TARGET static ALWAYS void FN(fp16_bfp)(const uint8_t *from, int64_t n, uint8_t *to, uint8_t *shared, int bits)
{
    const int64_t four = 4 * GROUP;
    for (; n >= four; n -= four, from += 2 * four, to += four * bits / 8, shared += 4) {
        uint32_t exponents;
        __m512i codes;
        if (!FN(bfp_four16)(_mm512_loadu_si512(from), _mm512_loadu_si512(from + four), bits, &codes, &exponents)) {
            FN(bfp_rare16)(from, four, to, shared, bits);
            continue;
        }
        put32(shared, exponents);
        FN(bfp_put4)(codes, bits, to);
    }
    FN(bfp_rare16)(from, n, to, shared, bits);
}

/* A group to a register. */
TARGET static ALWAYS __m512i FN(bfp_sizes32)(__m512i x, __m512i size, __m512i most, int bits)
{
    const int keep = bits - 1, drop = 24 - keep;
    __mmask16 normal = _mm512_cmpgt_epu32_mask(size, _mm512_set1_epi32(0x7fffff));
    __m512i sig = _mm512_maskz_mov_epi32(
        normal, _mm512_ternarylogic_epi32(x, _mm512_set1_epi32(0x7fffff), _mm512_set1_epi32(0x800000), 0xea));
    __m512i v = _mm512_srlv_epi32(sig, _mm512_sub_epi32(most, _mm512_srli_epi32(size, 23)));
    __mmask16 odd = _mm512_test_epi32_mask(v, _mm512_set1_epi32(1 << drop));
    v = _mm512_add_epi32(v, _mm512_set1_epi32((1 << (drop - 1)) - 1));
    v = _mm512_srli_epi32(_mm512_mask_sub_epi32(v, odd, v, _mm512_set1_epi32(-1)), drop);
    return _mm512_min_epi32(v, _mm512_set1_epi32((1 << keep) - 1));
}

TARGET static ALWAYS __m512i FN(max_pairs)(__m512i a, __m512i b)
{
    return _mm512_max_epu32(_mm512_shuffle_i64x2(a, b, 0x88), _mm512_shuffle_i64x2(a, b, 0xdd));
}

TARGET static ALWAYS void FN(wide_to_bfp)(const u32 *restrict x, int64_t n, uint8_t *to, uint8_t *shared, int bits)
{
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    for (; n >= 4 * GROUP; n -= 4 * GROUP, x += 4 * GROUP, to += 4 * GROUP * bits / 8, shared += 4) {
        __m512i v[4], size[4], m[4];
        for (int k = 0; k < 4; k++) {
            v[k] = _mm512_loadu_si512(x + k * GROUP);
            size[k] = _mm512_and_si512(v[k], _mm512_set1_epi32(0x7fffffff));
        }
        __m512i most = FN(max_pairs)(FN(max_pairs)(size[0], size[1]), FN(max_pairs)(size[2], size[3]));
        most = _mm512_max_epu32(most, _mm512_shuffle_epi32(most, 0x4e));
        most = _mm512_max_epu32(most, _mm512_shuffle_epi32(most, 0xb1));
        most = _mm512_srli_epi32(most, 23);
        put32(shared, FN(bfp_exponents)(most));
        m[0] = FN(bfp_sizes32)(v[0], size[0], _mm512_shuffle_i64x2(most, most, 0x00), bits);
        m[1] = FN(bfp_sizes32)(v[1], size[1], _mm512_shuffle_i64x2(most, most, 0x55), bits);
        m[2] = FN(bfp_sizes32)(v[2], size[2], _mm512_shuffle_i64x2(most, most, 0xaa), bits);
        m[3] = FN(bfp_sizes32)(v[3], size[3], _mm512_shuffle_i64x2(most, most, 0xff), bits);
        __m512i bytes = _mm512_packus_epi16(_mm512_packs_epi32(m[0], m[1]), _mm512_packs_epi32(m[2], m[3]));
        __mmask32 low = _mm512_kunpackw(_mm512_movepi32_mask(v[1]), _mm512_movepi32_mask(v[0]));
        __mmask32 high = _mm512_kunpackw(_mm512_movepi32_mask(v[3]), _mm512_movepi32_mask(v[2]));
        FN(bfp_put4)(FN(bfp_signed)(_mm512_permutexvar_epi32(order, bytes), _mm512_kunpackd(high, low), bits), bits, to);
    }
    (bits == 8 ? FN(write_bfp8) : FN(write_bfp4))(x, n, to, shared);
}

#define BFP(BITS)                                                                                                 \
    TARGET static void FN(fp16_bfp##BITS)(const uint8_t *from, const uint8_t *fs, int64_t n, uint8_t *to,         \
                                          uint8_t *ts)                                                            \
    {                                                                                                             \
        (void)fs;                                                                                                 \
        FN(fp16_bfp)(from, n, to, ts, BITS);                                                                      \
    }                                                                                                             \
    TARGET static void FN(wide_to_bfp##BITS)(const u32 *restrict x, int64_t n, uint8_t *to, uint8_t *shared)      \
    {                                                                                                             \
        FN(wide_to_bfp)(x, n, to, shared, BITS);                                                                  \
    }
BFP(8)
BFP(4)
#undef BFP
