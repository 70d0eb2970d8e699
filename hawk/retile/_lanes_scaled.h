/* Constant scales with AVX-512: what a code of eight bits or the mantissa of a bf16 becomes stands in tables, which the very sums
 * of `convert` have made. */

#define TARGET_BYTES __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,avx512vbmi")))

/* One of 256 bytes for each. */
TARGET_BYTES static ALWAYS __m512i look_up(__m512i code, const __m512i *table)
{
    __m512i low = _mm512_permutex2var_epi8(table[0], code, table[1]), high = _mm512_permutex2var_epi8(table[2], code, table[3]);
    return _mm512_mask_mov_epi8(low, _mm512_movepi8_mask(code), high);
}

/* `n` codes into those of one byte or of two; the second table has the upper bytes. */
TARGET_BYTES static ALWAYS void look_up_all(const uint8_t *from, int64_t n, uint8_t *to, const uint8_t (*bytes)[256], int width)
{
    const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
    __m512i table[2][4];
    for (int k = 0; k < 8; k++)
        table[k / 4][k % 4] = _mm512_loadu_si512(&bytes[k / 4][64 * (k % 4)]);
    for (; n > 0; n -= 64, from += 64, to += 64 * width) {
        const __mmask64 there = n < 64 ? ((uint64_t)1 << n) - 1 : ~(uint64_t)0;
        __m512i code = _mm512_maskz_loadu_epi8(there, from);
        if (width == 1) {
            _mm512_mask_storeu_epi8(to, there, look_up(code, table[0]));
            continue;
        }
        code = _mm512_permutexvar_epi64(order, code);
        __m512i low = look_up(code, table[0]), high = look_up(code, table[1]);
        _mm512_mask_storeu_epi16(to, (__mmask32)there, _mm512_unpacklo_epi8(low, high));
        if (n > 32)
            _mm512_mask_storeu_epi16(to + 64, (__mmask32)(there >> 32), _mm512_unpackhi_epi8(low, high));
    }
}

TARGET_BYTES static void look_up_bytes(const uint8_t *from, int64_t n, uint8_t *to, const uint8_t (*bytes)[256])
{
    look_up_all(from, n, to, bytes, 1);
}

TARGET_BYTES static void look_up_words(const uint8_t *from, int64_t n, uint8_t *to, const uint8_t (*bytes)[256])
{
    look_up_all(from, n, to, bytes, 2);
}
#undef TARGET_BYTES

/* One of 128 words for each. */
TARGET static ALWAYS __m512i FN(of_mantissa)(__m512i x, const __m512i *table)
{
    __m512i low = _mm512_permutex2var_epi16(table[0], x, table[1]), high = _mm512_permutex2var_epi16(table[2], x, table[3]);
    return _mm512_mask_mov_epi16(low, _mm512_test_epi16_mask(x, WORDS(0x40)), high);
}

/* x by the scale, rounded to odd: the quotient of its mantissa, and its exponent.  What is not finite stays so, and what is
 * denormal, before or after, is nothing to a code of eight bits. */
TARGET static ALWAYS __m512i FN(quotient)(__m512i x, const __m512i *table)
{
    __m512i size = _mm512_and_si512(x, WORDS(0x7fff));
    __m512i v = _mm512_adds_epi16(_mm512_and_si512(x, WORDS(0x7f80)), FN(of_mantissa)(x, table));
    v = _mm512_max_epi16(_mm512_min_epi16(v, WORDS(0x7f80)), _mm512_setzero_si512());
    v = _mm512_mask_mov_epi16(v, _mm512_cmpge_epu16_mask(size, WORDS(0x7f80)), size);
    return _mm512_ternarylogic_epi64(x, WORDS(0x8000), v, 0xea);
}

/* Whole numbers: of the quotient's significand seven bits are kept, one is a half, and one says whether there is more.  `shift`
 * is by how many bits that of a word with the exponent 0 is below the largest. */
TARGET static ALWAYS __m512i FN(whole_quotient)(__m512i x, const __m512i *table, __m512i shift, __m512i carried)
{
    __m512i size = _mm512_and_si512(x, WORDS(0x7fff)), m = _mm512_and_si512(x, WORDS(0x7f));
    __m512i low = _mm512_sub_epi16(shift, _mm512_srli_epi16(size, 7));
    low = _mm512_mask_add_epi16(low, _mm512_cmpge_epu16_mask(m, carried), low, WORDS(-1));
    __m512i v = _mm512_srlv_epi16(FN(of_mantissa)(x, table), _mm512_max_epi16(low, _mm512_setzero_si512()));
    __mmask32 odd = _mm512_test_epi16_mask(v, WORDS(1 << 9));
    v = _mm512_adds_epu16(v, WORDS(0xff));
    v = _mm512_srli_epi16(_mm512_mask_adds_epu16(v, odd, v, WORDS(1)), 9);
    v = _mm512_mask_mov_epi16(v, _mm512_movepi16_mask(low), WORDS(127));
    v = _mm512_mask_sub_epi16(v, _mm512_movepi16_mask(x), _mm512_setzero_si512(), v);
    v = _mm512_and_si512(v, WORDS(0xff)); /* so that packing does not saturate */
    return _mm512_maskz_mov_epi16(_mm512_cmple_epu16_mask(size, WORDS(0x7f80)), v);
}

#define DIVIDED(NAME, VALUE)                                                                                      \
    TARGET static void FN(NAME)(const struct divisor *by, const uint8_t *from, int64_t n, uint8_t *to)            \
    {                                                                                                             \
        const __m512i shift = WORDS(by->shift), carried = WORDS(by->carried);                                     \
        __m512i table[4];                                                                                         \
        (void)shift;                                                                                              \
        (void)carried;                                                                                            \
        for (int k = 0; k < 4; k++)                                                                               \
            table[k] = _mm512_loadu_si512(&by->words[32 * k]);                                                    \
        for (; n >= 64; n -= 64, from += 128, to += 64) {                                                         \
            __m512i x = _mm512_loadu_si512(from), y = _mm512_loadu_si512(from + 64);                              \
            __m512i a = VALUE(x), b = VALUE(y);                                                                   \
            _mm512_storeu_si512(to, FN(narrow)(a, b));                                                            \
        }                                                                                                         \
        for (; n > 0; n -= 32, from += 64, to += 32) {                                                            \
            __m512i x = _mm512_maskz_loadu_epi16(FN(first)(n), from);                                             \
            _mm512_mask_cvtepi16_storeu_epi8(to, FN(first)(n), VALUE(x));                                         \
        }                                                                                                         \
    }

#define AS_E4M3(x) FN(to_e4m3)(FN(quotient)(x, table))
#define AS_E5M2(x) FN(to_e5m2)(FN(quotient)(x, table))
#define AS_INT8(x) FN(whole_quotient)(x, table, shift, carried)
DIVIDED(divided_e4m3, AS_E4M3)
DIVIDED(divided_e5m2, AS_E5M2)
DIVIDED(divided_int8, AS_INT8)
#undef DIVIDED
#undef AS_E4M3
#undef AS_E5M2
#undef AS_INT8
