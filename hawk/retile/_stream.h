/* Bytes past the caches.  Included once for every instruction set, see `_convert.h`. */

/* memcpy past the caches, any alignment and size.  `ahead` is what will be read next, or NULL where that goes on
 * behind `from` and the hardware sees it coming. */
TARGET static void FN(stream)(uint8_t *to, const uint8_t *from, size_t n, const uint8_t *ahead)
{
    int64_t skip = ahead ? ahead - from : 0;
    size_t head = (size_t)(-(uintptr_t)to & 63);
    head = head < n ? head : n;
    memcpy(to, from, head);
    to += head;
    from += head;
    n -= head;
    for (; n >= 64; n -= 64, to += 64, from += 64) {
        if (skip)
            __builtin_prefetch(from + skip, 0, 2);
#ifdef WITH_AVX2
        __m256i a = _mm256_loadu_si256((const __m256i *)(const void *)from);
        __m256i b = _mm256_loadu_si256((const __m256i *)(const void *)(from + 32));
        _mm256_stream_si256((__m256i *)(void *)to, a);
        _mm256_stream_si256((__m256i *)(void *)(to + 32), b);
#else
        for (int i = 0; i < 64; i += 16)
            _mm_stream_si128((__m128i *)(void *)(to + i), _mm_loadu_si128((const __m128i *)(const void *)(from + i)));
#endif
    }
    memcpy(to, from, n);
}

/* Four streams of `n` bytes at once, `n` a multiple of 64 and every target on a line: memory serves several pages
 * at a time faster than one after the other.  `ahead[k]` is what stream k's place in the next call will read. */
TARGET static void FN(stream4)(uint8_t *const to[4], const uint8_t *const from[4], const uint8_t *const ahead[4], size_t n)
{
    for (size_t i = 0; i < n; i += 64)
        for (int k = 0; k < 4; k++) {
            __builtin_prefetch(ahead[k] + i, 0, 2);
#ifdef WITH_AVX2
            __m256i a = _mm256_loadu_si256((const __m256i *)(const void *)(from[k] + i));
            __m256i b = _mm256_loadu_si256((const __m256i *)(const void *)(from[k] + i + 32));
            _mm256_stream_si256((__m256i *)(void *)(to[k] + i), a);
            _mm256_stream_si256((__m256i *)(void *)(to[k] + i + 32), b);
#else
            for (int j = 0; j < 64; j += 16)
                _mm_stream_si128((__m128i *)(void *)(to[k] + i + (size_t)j),
                                 _mm_loadu_si128((const __m128i *)(const void *)(from[k] + i + (size_t)j)));
#endif
        }
}

#ifdef WITH_AVX2
/* Long runs, the lines of those some way ahead asked for meanwhile: behind the last one those of `next`. */
TARGET static void FN(stream_far)(const struct move *m, const uint8_t *from, uint8_t *to, const uint8_t *next)
{
    const int64_t lead = m->bytes < FAR_BYTES ? FAR_BYTES / m->bytes : 1;
    for (int64_t k = 0; k < m->runs; k++) {
        const uint8_t *f = from + m->src_at[k];
        uint8_t *t = to + m->dst_at[k];
        const int64_t then = k + lead;
        const uint8_t *ahead = then < m->runs ? from + m->src_at[then] : next + m->src_at[then % m->runs];
        for (int64_t i = 0; i < m->bytes; i += 64) {
            __builtin_prefetch(ahead + i, 0, 2);
#ifdef WITH_AVX512
            _mm512_stream_si512((void *)(t + i), _mm512_loadu_si512(f + i));
#else
            __m256i a = _mm256_loadu_si256((const __m256i *)(const void *)(f + i));
            __m256i b = _mm256_loadu_si256((const __m256i *)(const void *)(f + i + 32));
            _mm256_stream_si256((__m256i *)(void *)(t + i), a);
            _mm256_stream_si256((__m256i *)(void *)(t + i + 32), b);
#endif
        }
    }
}
#endif

/* The runs of `m`, of whole 16-byte words, one after the other on lines of the target that they fill.  `next`: from where this goes
 * on. */
TARGET static void FN(stream_runs)(const struct move *m, const uint8_t *from, uint8_t *to, const uint8_t *next)
{
#ifdef WITH_AVX2
    if (m->far && m->bytes % 64 == 0) {
        FN(stream_far)(m, from, to, next);
        return;
    }
    if (m->bytes == 32 && !m->far) {
        for (int64_t k = 0; k < m->runs; k++)
            _mm256_stream_si256((__m256i *)(void *)(to + m->dst_at[k]),
                                _mm256_loadu_si256((const __m256i *)(const void *)(from + m->src_at[k])));
        return;
    }
#endif
    (void)next;
    for (int64_t k = 0; k < m->runs; k++) {
        const uint8_t *f = from + m->src_at[k];
        uint8_t *t = to + m->dst_at[k];
        if (m->far)
            __builtin_prefetch(from + m->src_at[k + LEAD], 0, 3);
#ifdef WITH_AVX2
        if (m->bytes % 32 == 0) {
            for (int64_t i = 0; i < m->bytes; i += 32)
                _mm256_stream_si256((__m256i *)(void *)(t + i), _mm256_loadu_si256((const __m256i *)(const void *)(f + i)));
            continue;
        }
#endif
        for (int64_t i = 0; i < m->bytes; i += 16)
            _mm_stream_si128((__m128i *)(void *)(t + i), _mm_loadu_si128((const __m128i *)(const void *)(f + i)));
    }
}
