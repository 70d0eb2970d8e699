/* Whole lines of the target, put together in registers.  Included for AVX-512 alone: a register is a line there.
 *
 * A line is of parts that are contiguous in the source, or two lines are of four such parts of 32 bytes whose elements go to
 * the one or the other, or they are columns of the source.  Few instructions a line matter more than anything else here: the processor looks so far ahead that it
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

/* `parts` is 1, 2 or 4: a line is of so many.  `gaps`: what is asked for stands in a table, where two lines
 * at a time follow each other. */
TARGET static ALWAYS void FN(fill_lines)(const struct lines *m, const uint8_t *const *from, uint8_t *to,
                                         const struct soon *ahead, int parts, int gaps, int past)
{
    const uint8_t *part[4];
    for (int i = 0; i < 4; i++)
        part[i] = from[m->of[i]] + m->part[i];
    const uint8_t *soon = ahead[0].from;
    const int32_t *lines = ahead[0].at;
    const int64_t count = m->count;
    for (int64_t k = 0; k < count; k++) {
        const int64_t at = m->at[k];
        __m512i line;
        __builtin_prefetch(soon + (gaps ? lines[k] : 64 * k), 0, 2);
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
    const uint8_t *part[2][4], *soon[4];
    const int32_t *lines = ahead[0].at;
    for (int i = 0; i < 4; i++) {
        part[0][i] = from[m->of[i]] + m->part[i];
        part[1][i] = twins == 2 ? from[m->of[i] + 2] + m->part[i] : NULL;
        soon[i] = ahead[i < 2 * twins && !gaps ? i : 0].from;
    }
    const int64_t count = m->count, other = m->second, beside = m->beside;
    for (int64_t k = 0; k < count; k++) {
        const int64_t at = m->at[k];
        uint8_t *into = to + m->to[k];
        __m512i a[2], b[2];
        if (gaps) {
            for (int i = 0; i < 2 * twins; i += 2) { /* all pieces' lines follow each other in one table */
                const uint8_t *two = soon[0] + lines[2 * twins * k + i];
                __builtin_prefetch(two, 0, 2);
                __builtin_prefetch(two + 64, 0, 2);
            }
        } else {
            for (int i = 0; i < 2 * twins; i++)
                __builtin_prefetch(soon[i] + 64 * k, 0, 2);
        }
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

/* Eight columns of words of 32 rows, a line each. */
TARGET static ALWAYS void FN(turn)(const uint8_t *const *row, int64_t at, __m512i *x)
{
    for (int r = 0; r < 8; r++) {
        x[r] = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)(const void *)(row[r] + at)));
        x[r] = _mm512_inserti32x4(x[r], _mm_loadu_si128((const __m128i *)(const void *)(row[r + 8] + at)), 1);
        x[r] = _mm512_inserti32x4(x[r], _mm_loadu_si128((const __m128i *)(const void *)(row[r + 16] + at)), 2);
        x[r] = _mm512_inserti32x4(x[r], _mm_loadu_si128((const __m128i *)(const void *)(row[r + 24] + at)), 3);
    }
    for (int turn = 0; turn < 3; turn++) {
        __m512i y[8];
        for (int i = 0; i < 4; i++) {
            y[2 * i] = _mm512_unpacklo_epi16(x[i], x[i + 4]);
            y[2 * i + 1] = _mm512_unpackhi_epi16(x[i], x[i + 4]);
        }
        for (int i = 0; i < 8; i++)
            x[i] = y[i];
    }
}

/* Sixteen columns at a time.  With `pairs` the first 16 rows and the others are of lines of their own, each of which is of two
 * columns; `sets` is 2 where the lines beside are filled, too. */
TARGET static ALWAYS void FN(turn_columns)(const struct lines *m, const uint8_t *const *from, uint8_t *to,
                                           const struct soon *ahead, int pairs, int sets, int gaps, int past)
{
    const uint8_t *row[64], *soon[4];
    const int32_t *lines[4];
    for (int i = 0; i < 32 * sets; i++)
        row[i] = from[m->row_of[i]] + m->row[i];
    for (int i = 0; i < 4; i++) {
        soon[i] = ahead[i < m->pieces ? i : 0].from;
        lines[i] = ahead[i < m->pieces ? i : 0].at;
    }
    const int64_t count = m->count, beside = m->beside;
    const int mask = m->pieces - 1, share = m->pieces == 4 ? 2 : m->pieces - 1;
    for (int64_t k = 0, n = 0; k < 2 * count; k++) {
        const int64_t at = m->at[k / 2] + k % 2 * 16;
        const int64_t *column = m->column + k % 2 * (pairs ? 4 : 8);
        uint8_t *into = to + m->to[k / 2];
        __m512i x[2][8];
        for (int i = 0; i < 8 * sets; i++, n++) {
            __builtin_prefetch(soon[n & mask] + (gaps ? lines[n & mask][n >> share] : 64 * (n >> share)), 0, 2);
        }
        for (int i = 0; i < sets; i++)
            FN(turn)(row + 32 * i, at, x[i]);
        for (int c = 0; pairs && c < 4; c++)
            FN(put_line)(into + column[c], _mm512_shuffle_i64x2(x[0][2 * c], x[0][2 * c + 1], 0x44), past);
        for (int c = 0; pairs && c < 4; c++)
            FN(put_line)(into + column[8 + c], _mm512_shuffle_i64x2(x[0][2 * c], x[0][2 * c + 1], 0xee), past);
        for (int c = 0; !pairs && c < 8; c++)
            for (int i = 0; i < sets; i++)
                FN(put_line)(into + column[c] + i * beside, x[i][c], past);
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
LINES(line_column_pairs, turn_columns, 1, 1)
LINES(line_single_columns, turn_columns, 0, 1)
LINES(line_twin_columns, turn_columns, 0, 2)
#undef LINES

TARGET static void FN(line_columns)(const struct lines *m, const uint8_t *const *from, uint8_t *to, const struct soon *ahead, int past)
{
    if (m->sets == 2)
        FN(line_twin_columns)(m, from, to, ahead, past);
    else
        FN(line_single_columns)(m, from, to, ahead, past);
}
