/* Whole lines of the target, put together in registers.  Included for AVX-512 alone: a register is a line there.
 *
 * A line is of parts that are contiguous in the source, or two lines are of four such parts of 32 bytes whose elements go to
 * the one or the other.  Few instructions a line matter more than anything else here: the processor looks so far ahead that it
 * reads the next pieces meanwhile, and how many of these it sees is a question of how long a piece is.
 */

TARGET static ALWAYS __m512i FN(two_halves)(const uint8_t *a, const uint8_t *b)
{
    return _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)(const void *)a)),
                              _mm256_loadu_si256((const __m256i *)(const void *)b), 1);
}

TARGET static ALWAYS void FN(put_line)(uint8_t *to, __m512i line, int past)
{
    if (past)
        _mm512_stream_si512((void *)to, line);
    else
        _mm512_storeu_si512(to, line);
}

/* `parts` is 1, 2 or 4: a line is of so many.  `gaps`: what is asked for stands in a table, which costs a tenth more. */
TARGET static ALWAYS void FN(fill_lines)(const struct lines *m, const uint8_t *const *from, uint8_t *to,
                                         const struct soon *ahead, int parts, int gaps, int past)
{
    const uint8_t *part[4];
    for (int i = 0; i < 4; i++)
        part[i] = from[m->of[i]] + m->part[i];
    const struct soon soon = ahead[0];
    const int64_t count = m->count;
    for (int64_t k = 0; k < count; k++) {
        const int64_t at = m->at[k];
        __m512i line;
        __builtin_prefetch(soon.from + (gaps ? soon.at[k] : 64 * k), 0, 2);
        if (parts == 1) {
            line = _mm512_loadu_si512(part[0] + at);
        } else if (parts == 2) {
            line = FN(two_halves)(part[0] + at, part[1] + at);
        } else {
            line = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)(const void *)(part[0] + at)));
            line = _mm512_inserti32x4(line, _mm_loadu_si128((const __m128i *)(const void *)(part[1] + at)), 1);
            line = _mm512_inserti32x4(line, _mm_loadu_si128((const __m128i *)(const void *)(part[2] + at)), 2);
            line = _mm512_inserti32x4(line, _mm_loadu_si128((const __m128i *)(const void *)(part[3] + at)), 3);
        }
        FN(put_line)(to + m->to[k], line, past);
    }
}

/* Two lines at a time, of the words of four halves; `full` where these are two lines of the source.  `twins` is 2 where the two
 * pieces behind fill the lines beside: memory takes what is longer in a row at a better rate. */
TARGET static ALWAYS void FN(sort_words)(const struct lines *m, const uint8_t *const *from, uint8_t *to,
                                         const struct soon *ahead, int full, int twins, int gaps, int past)
{
    const __m512i first = _mm512_loadu_si512(m->index[0]), second = _mm512_loadu_si512(m->index[1]);
    const uint8_t *part[2][4];
    struct soon soon[4];
    for (int i = 0; i < 4; i++) {
        part[0][i] = from[m->of[i]] + m->part[i];
        part[1][i] = twins == 2 ? from[m->of[i] + 2] + m->part[i] : NULL;
        soon[i] = ahead[i < 2 * twins ? i : 0];
    }
    const int64_t count = m->count, other = m->second, beside = m->beside;
    for (int64_t k = 0; k < count; k++) {
        const int64_t at = m->at[k];
        uint8_t *into = to + m->to[k];
        __m512i a[2], b[2];
        for (int i = 0; i < 2 * twins; i++)
            __builtin_prefetch(soon[i].from + (gaps ? soon[i].at[k] : 64 * k), 0, 2);
        for (int i = 0; i < twins; i++) {
            if (full) {
                a[i] = _mm512_loadu_si512(part[i][0] + at);
                b[i] = _mm512_loadu_si512(part[i][2] + at);
            } else {
                a[i] = FN(two_halves)(part[i][0] + at, part[i][1] + at);
                b[i] = FN(two_halves)(part[i][2] + at, part[i][3] + at);
            }
        }
        for (int i = 0; i < twins; i++)
            FN(put_line)(into + i * beside, _mm512_permutex2var_epi16(a[i], first, b[i]), past);
        for (int i = 0; i < twins; i++)
            FN(put_line)(into + other + i * beside, _mm512_permutex2var_epi16(a[i], second, b[i]), past);
    }
}

#define LINES(NAME, CALL, ...)                                                                                    \
    TARGET static void FN(NAME)(const struct lines *m, const uint8_t *const *from, uint8_t *to,                   \
                                const struct soon *ahead, int past)                                               \
    {                                                                                                             \
        if (past && ahead[0].at)                                                                                  \
            FN(CALL)(m, from, to, ahead, __VA_ARGS__, 1, 1);                                                      \
        else if (past)                                                                                            \
            FN(CALL)(m, from, to, ahead, __VA_ARGS__, 0, 1);                                                      \
        else                                                                                                      \
            FN(CALL)(m, from, to, ahead, __VA_ARGS__, 0, 0);                                                      \
    }
LINES(line_whole, fill_lines, 1)
LINES(line_halves, fill_lines, 2)
LINES(line_quarters, fill_lines, 4)
LINES(line_pairs, sort_words, 1, 1)
LINES(line_words, sort_words, 0, 1)
LINES(line_twins, sort_words, 0, 2)
#undef LINES
