/* Elements of one width put in another order, from a page or a scratch into a scratch.  Included once for every instruction
 * set, see `_convert.h`.  A mover goes through all of `m->runs`, each with its place on both sides in bytes. */

#if defined(__clang__)
#define SHUFFLE(V, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(V, a, b, ...) __builtin_shuffle(a, b, (V){__VA_ARGS__})
#endif

#define FETCH(from) __builtin_prefetch((from), 0, 3)

/* Contiguous runs.  Constant sizes become a few vector moves. */
#define RUNS(SIZE)                                                                                                \
    if (m->far)                                                                                                   \
        for (; k < m->runs; k++) {                                                                                \
            FETCH(from + m->src_at[k + LEAD]);                                                                    \
            memcpy(to + m->dst_at[k], from + m->src_at[k], SIZE);                                                 \
        }                                                                                                         \
    else                                                                                                          \
        for (; k < m->runs; k++)                                                                                  \
            memcpy(to + m->dst_at[k], from + m->src_at[k], SIZE);                                                 \
    break

TARGET static void FN(move_runs)(const struct move *m, const uint8_t *from, uint8_t *to)
{
    int64_t k = 0;
    switch (m->bytes) {
    case 8: RUNS(8);
    case 16: RUNS(16);
    case 32: RUNS(32);
    case 64: RUNS(64);
    case 128: RUNS(128);
    default: RUNS((size_t)m->bytes);
    }
}
#undef RUNS

/* Any order: one element after the other, `nb` of them side by side in the target. */
#define GATHER(W, T)                                                                                              \
    TARGET static void FN(gather##W)(const struct move *m, const uint8_t *from, uint8_t *to)                      \
    {                                                                                                             \
        for (int64_t k = 0; k < m->runs; k++) {                                                                   \
            const uint8_t *f = from + m->src_at[k];                                                               \
            T *restrict t = (T *)(void *)(to + m->dst_at[k]);                                                     \
            for (int64_t b = 0; b < m->nb; b++)                                                                   \
                t[b] = *(const T *)(const void *)(f + m->b_at[b]);                                                \
        }                                                                                                         \
    }

#define STRIDED(W, T)                                                                                             \
    TARGET static void FN(strided##W)(const struct move *m, const uint8_t *from, uint8_t *to)                     \
    {                                                                                                             \
        for (int64_t k = 0; k < m->runs; k++) {                                                                   \
            const T *restrict f = (const T *)(const void *)(from + m->src_at[k]);                                 \
            T *restrict t = (T *)(void *)(to + m->dst_at[k]);                                                     \
            const int64_t fs = m->from_step, ts = m->to_step;                                                     \
            for (int64_t i = 0; i < m->nb; i++)                                                                   \
                t[i * ts] = f[i * fs];                                                                            \
        }                                                                                                         \
    }

/* `nb` source runs of `na` elements become `na` target runs of `nb` elements; a_at and b_at say where these begin. */
#define TRANSPOSE(W, V, N, LOW, HIGH)                                                                             \
    TARGET static ALWAYS void FN(zip##W)(const uint8_t *a, const uint8_t *b, uint8_t *to)                         \
    {                                                                                                             \
        V x, y, z;                                                                                                \
        memcpy(&x, a, 16);                                                                                        \
        memcpy(&y, b, 16);                                                                                        \
        z = LOW(x, y);                                                                                            \
        memcpy(to, &z, 16);                                                                                       \
        z = HIGH(x, y);                                                                                           \
        memcpy(to + 16, &z, 16);                                                                                  \
    }                                                                                                             \
    TARGET static void FN(weave2_##W)(const struct move *m, const uint8_t *from, uint8_t *to)                     \
    {                                                                                                             \
        if (m->na == N && !m->far) {                                                                              \
            for (int64_t k = 0; k < m->runs; k++)                                                                 \
                FN(zip##W)(from + m->src_at[k], from + m->src_at[k] + m->b_at[1], to + m->dst_at[k]);             \
            return;                                                                                               \
        }                                                                                                         \
        for (int64_t k = 0; k < m->runs; k++) {                                                                   \
            const uint8_t *a = from + m->src_at[k], *b = a + m->b_at[1];                                          \
            uint8_t *t = to + m->dst_at[k];                                                                       \
            int64_t i = 0;                                                                                        \
            FETCH(from + m->src_at[k + LEAD]);                                                                    \
            FETCH(from + m->src_at[k + LEAD] + m->b_at[1]);                                                       \
            for (; i + N <= m->na; i += N, t += 32)                                                               \
                FN(zip##W)(a + i * W, b + i * W, t);                                                              \
            if (i + N / 2 <= m->na) {                                                                             \
                V x = (V)(v8){get64(a + i * W), 0}, y = (V)(v8){get64(b + i * W), 0}, z = LOW(x, y);              \
                memcpy(t, &z, 16);                                                                                \
                i += N / 2;                                                                                       \
                t += 16;                                                                                          \
            }                                                                                                     \
            for (; i < m->na; i++, t += 2 * W) {                                                                  \
                memcpy(t, a + i * W, W);                                                                          \
                memcpy(t + W, b + i * W, W);                                                                      \
            }                                                                                                     \
        }                                                                                                         \
    }                                                                                                             \
    TARGET static void FN(weave4_##W)(const struct move *m, const uint8_t *from, uint8_t *to)                     \
    {                                                                                                             \
        for (int64_t k = 0; k < m->runs; k++) {                                                                   \
            const uint8_t *f = from + m->src_at[k];                                                               \
            const uint8_t *const row[4] = {f, f + m->b_at[1], f + m->b_at[2], f + m->b_at[3]};                    \
            uint8_t *t = to + m->dst_at[k];                                                                       \
            int64_t i = 0;                                                                                        \
            for (; i + N <= m->na; i += N, t += 64) {                                                             \
                uint8_t even[32], odd[32];                                                                        \
                FN(zip##W)(row[0] + i * W, row[2] + i * W, even);                                                 \
                FN(zip##W)(row[1] + i * W, row[3] + i * W, odd);                                                  \
                FN(zip##W)(even, odd, t);                                                                         \
                FN(zip##W)(even + 16, odd + 16, t + 32);                                                          \
            }                                                                                                     \
            for (; i < m->na; i++)                                                                                \
                for (int b = 0; b < 4; b++, t += W)                                                               \
                    memcpy(t, row[b] + i * W, W);                                                                 \
        }                                                                                                         \
    }                                                                                                             \
    TARGET static ALWAYS void FN(block##W)(const struct move *m, const uint8_t *f, uint8_t *t, int64_t a, int64_t b) \
    {                                                                                                             \
        V x[N], y[N];                                                                                             \
        for (int i = 0; i < N; i++)                                                                               \
            memcpy(&x[i], f + m->b_at[b + i] + a * W, 16);                                                        \
        for (int half = 1; half < N; half *= 2) {                                                                 \
            for (int i = 0; i < N / 2; i++) {                                                                     \
                y[2 * i] = LOW(x[i], x[i + N / 2]);                                                               \
                y[2 * i + 1] = HIGH(x[i], x[i + N / 2]);                                                          \
            }                                                                                                     \
            memcpy(x, y, sizeof x);                                                                               \
        }                                                                                                         \
        for (int i = 0; i < N; i++)                                                                               \
            memcpy(t + m->a_at[a + i] + b * W, &x[i], 16);                                                        \
    }                                                                                                             \
    TARGET static void FN(transpose##W)(const struct move *m, const uint8_t *from, uint8_t *to)                   \
    {                                                                                                             \
        int64_t na = m->na / N * N, nb = m->nb / N * N;                                                           \
        for (int64_t k = 0; k < m->runs; k++) {                                                                   \
            const uint8_t *f = from + m->src_at[k];                                                               \
            uint8_t *t = to + m->dst_at[k];                                                                       \
            for (int64_t b = 0; b < nb; b += N)                                                                   \
                for (int64_t a = 0; a < na; a += N)                                                               \
                    FN(block##W)(m, f, t, a, b);                                                                  \
            for (int64_t b = 0; b < m->nb; b++)                                                                   \
                for (int64_t a = b < nb ? na : 0; a < m->na; a++)                                                 \
                    memcpy(t + m->a_at[a] + b * W, f + m->b_at[b] + a * W, W);                                    \
        }                                                                                                         \
    }

/* A contiguous source run of `nb` pairs, or fours, becomes two runs, or four, of `nb` elements. */
#define PICK_APART(W, V, N, EVEN, ODD)                                                                            \
    TARGET static ALWAYS void FN(unzip##W)(const uint8_t *from, uint8_t *even, uint8_t *odd)                      \
    {                                                                                                             \
        V x, y, z;                                                                                                \
        memcpy(&x, from, 16);                                                                                     \
        memcpy(&y, from + 16, 16);                                                                                \
        z = EVEN(x, y);                                                                                           \
        memcpy(even, &z, 16);                                                                                     \
        z = ODD(x, y);                                                                                            \
        memcpy(odd, &z, 16);                                                                                      \
    }                                                                                                             \
    TARGET static void FN(unweave2_##W)(const struct move *m, const uint8_t *from, uint8_t *to)                   \
    {                                                                                                             \
        if (m->nb == N && !m->far) {                                                                              \
            for (int64_t k = 0; k < m->runs; k++)                                                                 \
                FN(unzip##W)(from + m->src_at[k], to + m->dst_at[k], to + m->dst_at[k] + m->a_at[1]);             \
            return;                                                                                               \
        }                                                                                                         \
        for (int64_t k = 0; k < m->runs; k++) {                                                                   \
            const uint8_t *f = from + m->src_at[k];                                                               \
            uint8_t *t = to + m->dst_at[k], *u = t + m->a_at[1];                                                  \
            int64_t i = 0;                                                                                        \
            FETCH(from + m->src_at[k + LEAD]);                                                                    \
            for (; i + N <= m->nb; i += N, f += 32)                                                               \
                FN(unzip##W)(f, t + i * W, u + i * W);                                                            \
            if (i + N / 2 <= m->nb) {                                                                             \
                V x;                                                                                              \
                memcpy(&x, f, 16);                                                                                \
                put64(t + i * W, ((v8)EVEN(x, x))[0]);                                                            \
                put64(u + i * W, ((v8)ODD(x, x))[0]);                                                             \
                i += N / 2;                                                                                       \
                f += 16;                                                                                          \
            }                                                                                                     \
            for (; i < m->nb; i++, f += 2 * W) {                                                                  \
                memcpy(t + i * W, f, W);                                                                          \
                memcpy(u + i * W, f + W, W);                                                                      \
            }                                                                                                     \
        }                                                                                                         \
    }                                                                                                             \
    TARGET static void FN(unweave4_##W)(const struct move *m, const uint8_t *from, uint8_t *to)                   \
    {                                                                                                             \
        for (int64_t k = 0; k < m->runs; k++) {                                                                   \
            const uint8_t *f = from + m->src_at[k];                                                               \
            uint8_t *t = to + m->dst_at[k];                                                                       \
            uint8_t *const row[4] = {t, t + m->a_at[1], t + m->a_at[2], t + m->a_at[3]};                          \
            int64_t i = 0;                                                                                        \
            for (; i + N <= m->nb; i += N, f += 64) {                                                             \
                uint8_t even[32], odd[32];                                                                        \
                FN(unzip##W)(f, even, odd);                                                                       \
                FN(unzip##W)(f + 32, even + 16, odd + 16);                                                        \
                FN(unzip##W)(even, row[0] + i * W, row[2] + i * W);                                               \
                FN(unzip##W)(odd, row[1] + i * W, row[3] + i * W);                                                \
            }                                                                                                     \
            for (; i < m->nb; i++)                                                                                \
                for (int a = 0; a < 4; a++, f += W)                                                               \
                    memcpy(row[a] + i * W, f, W);                                                                 \
        }                                                                                                         \
    }

#define LOW1(a, b) SHUFFLE(v1, a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23)
#define HIGH1(a, b) SHUFFLE(v1, a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)
#define EVEN1(a, b) SHUFFLE(v1, a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30)
#define ODD1(a, b) SHUFFLE(v1, a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31)
#define LOW2(a, b) SHUFFLE(v2, a, b, 0, 8, 1, 9, 2, 10, 3, 11)
#define HIGH2(a, b) SHUFFLE(v2, a, b, 4, 12, 5, 13, 6, 14, 7, 15)
#define EVEN2(a, b) SHUFFLE(v2, a, b, 0, 2, 4, 6, 8, 10, 12, 14)
#define ODD2(a, b) SHUFFLE(v2, a, b, 1, 3, 5, 7, 9, 11, 13, 15)
#define LOW4(a, b) SHUFFLE(v4, a, b, 0, 4, 1, 5)
#define HIGH4(a, b) SHUFFLE(v4, a, b, 2, 6, 3, 7)
#define EVEN4(a, b) SHUFFLE(v4, a, b, 0, 2, 4, 6)
#define ODD4(a, b) SHUFFLE(v4, a, b, 1, 3, 5, 7)

STRIDED(1, uint8_t)
STRIDED(2, u16)
STRIDED(4, u32)
GATHER(1, uint8_t)
GATHER(2, u16)
GATHER(4, u32)
TRANSPOSE(1, v1, 16, LOW1, HIGH1)
TRANSPOSE(2, v2, 8, LOW2, HIGH2)
TRANSPOSE(4, v4, 4, LOW4, HIGH4)
PICK_APART(1, v1, 16, EVEN1, ODD1)
PICK_APART(2, v2, 8, EVEN2, ODD2)
PICK_APART(4, v4, 4, EVEN4, ODD4)

static const struct movers FN(movers) = {
#ifdef WITH_AVX512
    .lines = {FN(line_halves), FN(line_quarters), FN(line_pairs), FN(line_words), FN(line_twins), FN(line_whole),
              FN(line_columns), FN(line_column_pairs)},
#endif
    .runs = FN(move_runs),
    .strided = {FN(strided1), FN(strided2), FN(strided4)},
    .gather = {FN(gather1), FN(gather2), FN(gather4)},
    .transpose = {FN(transpose1), FN(transpose2), FN(transpose4)},
    .weave = {{FN(weave2_1), FN(weave2_2), FN(weave2_4)}, {FN(weave4_1), FN(weave4_2), FN(weave4_4)}},
    .unweave = {{FN(unweave2_1), FN(unweave2_2), FN(unweave2_4)}, {FN(unweave4_1), FN(unweave4_2), FN(unweave4_4)}},
};

#undef SHUFFLE
#undef FETCH
#undef STRIDED
#undef GATHER
#undef TRANSPOSE
#undef PICK_APART
#undef LOW1
#undef HIGH1
#undef EVEN1
#undef ODD1
#undef LOW2
#undef HIGH2
#undef EVEN2
#undef ODD2
#undef LOW4
#undef HIGH4
#undef EVEN4
#undef ODD4
