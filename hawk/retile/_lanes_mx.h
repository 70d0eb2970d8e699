/* Blocks of 32 under a scale to and from bf16, a block to a register; see `_lanes.h`.  Blocks with what is not finite, or with a
 * scale that makes denormals, go by way of binary32. */

TARGET static __attribute__((noinline)) void FN(mx_rare)(reader read, writer write, const uint8_t *from, const uint8_t *fs,
                                                         uint8_t *to, uint8_t *ts)
{
    uint32_t x[MX_GROUP];
    read(from, fs, MX_GROUP, x);
    write(x, MX_GROUP, to, ts);
}

/* Codes of four bits, the even one in the low half of a byte. */
TARGET static ALWAYS __m512i FN(mx_codes)(const uint8_t *from, int bits)
{
    if (bits == 8)
        return _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)(const void *)from));
    __m512i pair = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(const void *)from));
    return _mm512_and_si512(_mm512_or_si512(pair, _mm512_slli_epi32(pair, 12)), WORDS(15));
}

/* The bf16 of codes, and which of these have an exponent that a scale changes. */
TARGET static ALWAYS __m512i FN(mx_value)(__m512i code, int codec, __mmask32 *finite)
{
    if (codec == MXE2M1) {
        const __m512i table = _mm512_broadcast_i64x4(_mm256_setr_epi16(
            0, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0, (short)0x8000, (short)0xbf00, (short)0xbf80,
            (short)0xbfc0, (short)0xc000, (short)0xc040, (short)0xc080, (short)0xc0c0));
        *finite = _mm512_test_epi16_mask(code, WORDS(7));
        return _mm512_permutexvar_epi16(code, table);
    }
    __m512i m = _mm512_sub_epi16(_mm512_and_si512(code, WORDS(0x7f)), WORDS(1));
    *finite = _mm512_cmplt_epu16_mask(m, WORDS(codec == MXE4M3 ? 0x7e : 0x7b));
    return codec == MXE4M3 ? FN(of_e4m3)(code) : FN(of_e5m2)(code);
}

TARGET static ALWAYS void FN(mx_bf16)(const uint8_t *from, const uint8_t *fs, int64_t n, uint8_t *to, int codec, reader read)
{
    const int bits = BITS[codec];
    for (; n > 0; n -= MX_GROUP, from += MX_GROUP * bits / 8, fs++, to += 2 * MX_GROUP) {
        if (*fs < 18 || *fs > 236) {
            FN(mx_rare)(read, FN(write_bf16), from, fs, to, NULL);
            continue;
        }
        __mmask32 finite;
        __m512i v = FN(mx_value)(FN(mx_codes)(from, bits), codec, &finite);
        _mm512_storeu_si512(to, _mm512_mask_add_epi16(v, finite, v, WORDS((*fs - 127) * 128)));
    }
}

/* The largest of 32 words. */
TARGET static ALWAYS int FN(most_words)(__m512i size)
{
    __m256i four = _mm256_max_epu16(_mm512_castsi512_si256(size), _mm512_extracti64x4_epi64(size, 1));
    __m128i two = _mm_max_epu16(_mm256_castsi256_si128(four), _mm256_extracti128_si256(four, 1));
    return 0xffff & ~_mm_cvtsi128_si32(_mm_minpos_epu16(_mm_xor_si128(two, _mm_set1_epi16(-1))));
}

/* The codes of a block of bf16 as words; 0 where it is a rare one. */
TARGET static ALWAYS int FN(mx_block)(__m512i x, int codec, __m512i *codes, uint8_t *shared)
{
    const int exponent_bits = codec == MXE4M3 ? 4 : codec == MXE5M2 ? 5 : 2, mantissa_bits = BITS[codec] - 1 - exponent_bits;
    const int top = codec == MXE4M3 ? 8 : codec == MXE5M2 ? 15 : 2, largest = codec == MXE4M3 ? 0x7e : codec == MXE5M2 ? 0x7b : 7;
    __m512i size = _mm512_and_si512(x, WORDS(0x7fff));
    int most = FN(most_words)(size), scale = most ? (most >> 7) - top : 0;
    if (most && (scale < 26 || most >= 0x7f80))
        return 0;
    /* Of a block of zeros anything is right that is above them. */
    __m512i least = WORDS((most ? scale : 127) + 2 - (1 << (exponent_bits - 1)));
    __m512i code = FN(small_sizes)(x, size, least, mantissa_bits, largest);
    *codes = _mm512_ternarylogic_epi64(_mm512_srli_epi16(x, 16 - BITS[codec]), WORDS(1 << (BITS[codec] - 1)), code, 0xea);
    *shared = (uint8_t)scale;
    return 1;
}

/* From bf16, or from binary32 that is rounded to odd first. */
TARGET static ALWAYS void FN(to_mx)(const uint8_t *from, int source, int64_t n, uint8_t *to, uint8_t *ts, int codec,
                                    writer write)
{
    const int step = MX_GROUP * BITS[source] / 8, each = MX_GROUP * BITS[codec] / 8;
    for (; n > 0; n -= MX_GROUP, from += step, to += each, ts++) {
        __m512i codes, x = _mm512_loadu_si512(from);
        if (source == FP32)
            x = FN(odd)(x, _mm512_loadu_si512(from + 64));
        if (!FN(mx_block)(x, codec, &codes, ts)) {
            FN(mx_rare)(source == FP32 ? FN(read_fp32) : FN(read_bf16), write, from, NULL, to, ts);
        } else if (codec == MXE2M1) {
            __m256i bytes = _mm512_cvtepi16_epi8(codes), pairs = _mm256_maddubs_epi16(bytes, _mm256_set1_epi16(0x1001));
            _mm_storeu_si128((__m128i *)(void *)to, _mm256_cvtepi16_epi8(pairs)); /* even + 16 * odd */
        } else {
            _mm256_storeu_si256((__m256i *)(void *)to, _mm512_cvtepi16_epi8(codes));
        }
    }
}

#define MX(NAME, CODEC)                                                                                           \
    TARGET static void FN(NAME##_bf16)(const uint8_t *from, const uint8_t *fs, int64_t n, uint8_t *to,            \
                                       uint8_t *ts)                                                               \
    {                                                                                                             \
        (void)ts;                                                                                                 \
        FN(mx_bf16)(from, fs, n, to, CODEC, FN(read_##NAME));                                                     \
    }                                                                                                             \
    TARGET static void FN(bf16_##NAME)(const uint8_t *from, const uint8_t *fs, int64_t n, uint8_t *to,            \
                                       uint8_t *ts)                                                               \
    {                                                                                                             \
        (void)fs;                                                                                                 \
        FN(to_mx)(from, BF16, n, to, ts, CODEC, FN(write_##NAME));                                                \
    }                                                                                                             \
    TARGET static void FN(fp32_##NAME)(const u32 *restrict x, int64_t n, uint8_t *to, uint8_t *ts)                \
    {                                                                                                             \
        FN(to_mx)((const uint8_t *)(const void *)x, FP32, n, to, ts, CODEC, FN(write_##NAME));                    \
    }

MX(mxe4m3, MXE4M3)
MX(mxe5m2, MXE5M2)
MX(mxe2m1, MXE2M1)
#undef MX
