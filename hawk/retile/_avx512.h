/* bf16 to block floats, two groups to a register.  Included by `_core.c` on x86-64; run where AVX-512BW is there. */

#define TARGET512 __attribute__((target("avx512f,avx512bw,avx512vl,avx2")))

/* Exponents are handled as their complements to 255: the largest exponent is then the least word, which one
 * instruction finds.  A significand of 8 bits, shifted left by 7 and right by the distance to the largest exponent,
 * loses no bit that could change the rounding. */
TARGET512 static ALWAYS void encode_two(__m512i x, int bits, int stream, uint8_t *code0, uint8_t *code1,
                                        uint8_t *exponent0, uint8_t *exponent1)
{
    const int keep = bits - 1, drop = 15 - keep;
    __m512i complement = _mm512_andnot_si512(x, _mm512_set1_epi16(0x7fff));
    __m256i low = _mm512_castsi512_si256(complement), high = _mm512_extracti64x4_epi64(complement, 1);
    __m128i least0 = _mm_min_epu16(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
    __m128i least1 = _mm_min_epu16(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
    least0 = _mm_srli_epi16(_mm_minpos_epu16(least0), 7);
    least1 = _mm_srli_epi16(_mm_minpos_epu16(least1), 7);
    *exponent0 = (uint8_t)~_mm_cvtsi128_si32(least0);
    *exponent1 = (uint8_t)~_mm_cvtsi128_si32(least1);
    __m512i shared = _mm512_mask_broadcastw_epi16(_mm512_broadcastw_epi16(least0), 0xffff0000u, least1);
    __m512i e = _mm512_srli_epi16(complement, 7);
    __mmask32 normal = _mm512_cmpneq_epi16_mask(e, _mm512_set1_epi16(255));
    __m512i sig = _mm512_maskz_slli_epi16(normal, _mm512_or_si512(x, _mm512_set1_epi16(0x80)), 8);
    __m512i v = _mm512_srlv_epi16(_mm512_srli_epi16(sig, 1), _mm512_sub_epi16(e, shared));
    __m512i odd = _mm512_and_si512(_mm512_srli_epi16(v, drop), _mm512_set1_epi16(1));
    __m512i m = _mm512_add_epi16(_mm512_add_epi16(v, _mm512_set1_epi16((short)((1 << (drop - 1)) - 1))), odd);
    m = _mm512_min_epi16(_mm512_srli_epi16(m, drop), _mm512_set1_epi16((short)((1 << keep) - 1)));
    __mmask32 negative = _mm512_mask_test_epi16_mask(_mm512_movepi16_mask(x), m, m);
    m = _mm512_mask_add_epi16(m, negative, m, _mm512_set1_epi16((short)(1 << keep)));
    __m256i bytes = _mm512_cvtepi16_epi8(m);
    if (bits == 4) {
        __m256i pairs = _mm256_maddubs_epi16(bytes, _mm256_set1_epi16(0x1001)); /* even + 16 * odd */
        __m128i packed = _mm256_cvtepi16_epi8(pairs);
        _mm_storel_epi64((__m128i *)(void *)code0, packed);
        _mm_storel_epi64((__m128i *)(void *)code1, _mm_unpackhi_epi64(packed, packed));
    } else if (stream) {
        _mm_stream_si128((__m128i *)(void *)code0, _mm256_castsi256_si128(bytes));
        _mm_stream_si128((__m128i *)(void *)code1, _mm256_extracti128_si256(bytes, 1));
    } else {
        _mm_storeu_si128((__m128i *)(void *)code0, _mm256_castsi256_si128(bytes));
        _mm_storeu_si128((__m128i *)(void *)code1, _mm256_extracti128_si256(bytes, 1));
    }
}

TARGET512 static ALWAYS __m256i load16(const uint16_t *p) { return _mm256_loadu_si256((const __m256i *)(const void *)p); }
TARGET512 static ALWAYS __m128i load8(const uint16_t *p) { return _mm_loadu_si128((const __m128i *)(const void *)p); }

TARGET512 static ALWAYS void encode_pairs(const struct work *w, int64_t s, int64_t d, int64_t n, int64_t ss, int64_t ds,
                                          int bits, int stream)
{
    const uint16_t *from = (const uint16_t *)(const void *)w->src + s;
    uint8_t *code = w->dst + w->dst_header + d * bits / 8, *exponent = w->dst + d / GROUP;
    int64_t apart = w->apart, code_step = ds * bits / 8, exponent_step = ds / GROUP;
    const __m512i weave = _mm512_set_epi16(31, 23, 30, 22, 29, 21, 28, 20, 27, 19, 26, 18, 25, 17, 24, 16, 15, 7, 14, 6, 13,
                                           5, 12, 4, 11, 3, 10, 2, 9, 1, 8, 0);
    for (; n > 1; n -= 2, from += 2 * ss, code += 2 * code_step, exponent += 2 * exponent_step) {
        __m512i x;
        if (w->us == 1) {
            x = _mm512_inserti64x4(_mm512_castsi256_si512(load16(from)), load16(from + ss), 1);
        } else {
            __m256i a = _mm256_inserti128_si256(_mm256_castsi128_si256(load8(from)), load8(from + apart), 1);
            __m256i b = _mm256_inserti128_si256(_mm256_castsi128_si256(load8(from + ss)), load8(from + ss + apart), 1);
            x = _mm512_permutexvar_epi16(weave, _mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1));
        }
        encode_two(x, bits, stream, code, code + code_step, exponent, exponent + exponent_step);
    }
}

#define ENCODE512(NAME)                                                                                           \
    TARGET512 static void NAME##_avx512(const struct work *w, int64_t s, int64_t d, int64_t n, int64_t ss, int64_t ds)  \
    {                                                                                                             \
        int64_t even = w->us == 1 || w->apart ? n & ~(int64_t)1 : 0;                                              \
        if (even && w->stream)                                                                                    \
            encode_pairs(w, s, d, even, ss, ds, BITS_OF_##NAME, 1);                                               \
        else if (even)                                                                                            \
            encode_pairs(w, s, d, even, ss, ds, BITS_OF_##NAME, 0);                                               \
        if (even < n)                                                                                             \
            NAME##_avx2(w, s + even * ss, d + even * ds, n - even, ss, ds);                                       \
    }
#define BITS_OF_bf16_to_bfp8 8
#define BITS_OF_bf16_to_bfp4 4
ENCODE512(bf16_to_bfp8)
ENCODE512(bf16_to_bfp4)
#undef ENCODE512
