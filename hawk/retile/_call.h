/* One call: its pieces checked against the buffers, then carried out. */
#include "_walk.h"

struct call {
    struct nest whole, partial;
    struct loop loop[MAX_LOOPS];
    int loops, channels_in, channels_out;
    int64_t src_elements, dst_elements, src_page, dst_page, last_src, last_dst, last_row, last_col;
    const int64_t *column[COLUMNS];
    Py_buffer *src, *dst;
    struct room *room;
};

static int64_t header_bytes(int codec, int64_t elements) { return codec >= BFP8 ? elements / group_of(codec) : 0; }

static int is_whole(const struct call *c, int64_t i)
{
    return c->column[LO][i] <= 0 && c->column[HI][i] > c->last_row && c->column[COLS][i] > c->last_col;
}

/* Lines of a whole piece on one side, as byte offsets from its first element; `lines` is 0 where there are so many that the
 * hardware sees ahead by itself.  A page is small and the next one anywhere, so that even what is contiguous is told. */
#define MAX_LINES 96
struct ahead {
    int lines;
    int64_t at[MAX_LINES];
};

static void look_ahead(struct ahead *a, const struct call *c, int target)
{
    struct loop l[MAX_LOOPS];
    int n = 0, bits = BITS[target ? c->whole.work.dst_codec : c->whole.work.src_codec];
    a->lines = 0;
    for (int i = 0; i < c->loops; i++) { /* by stride, smallest first */
        if (c->loop[i].ext == 1)
            continue;
        int64_t step = target ? c->loop[i].dst : c->loop[i].src;
        int k = n++;
        for (; k > 0 && l[k - 1].src > step; k--)
            l[k] = l[k - 1];
        l[k] = (struct loop){c->loop[i].ext, step, 0, 0, 0};
    }
    int64_t run = 1, lines = 1;
    int first = 0;
    while (first < n && l[first].src == run)
        run *= l[first++].ext;
    int64_t bytes = run * bits / 8;
    lines = (bytes + 63) / 64;
    if (lines > MAX_LINES)
        return;
    for (int i = first; i < n; i++)
        if (__builtin_mul_overflow(lines, l[i].ext, &lines) || lines > MAX_LINES)
            return;
    for (int64_t k = 0; k < lines; k++) {
        int64_t rest = k / ((bytes + 63) / 64), at = k % ((bytes + 63) / 64) * 64;
        for (int i = first; i < n; i++) {
            at += rest % l[i].ext * l[i].src * bits / 8;
            rest /= l[i].ext;
        }
        a->at[k] = at;
    }
    a->lines = (int)lines;
}

struct misfit {
    int64_t piece, column, got, limit;
};

static int within(struct misfit *bad, const struct call *c, int64_t i, int column, int64_t limit)
{
    int64_t got = c->column[column][i];
    if (got >= 0 && got <= limit)
        return 1;
    *bad = (struct misfit){i, column, got, limit};
    return 0;
}

/* Does every piece in [begin, end) stay in its pages, and its pages in their channels? */
static int check(const struct call *c, int64_t begin, int64_t end, struct misfit *bad)
{
    int64_t seen[3] = {-1, -1, -1}, seen_reach = -1;
    int grouped = c->whole.work.dst_codec >= BFP8, size = group_of(c->whole.work.dst_codec);
    for (int64_t i = begin; i < end; i++) {
        if (!within(bad, c, i, DST_CHANNEL, c->channels_out - 1) ||
            !within(bad, c, i, DST_PAGE, c->dst[c->column[DST_CHANNEL][i]].len - c->dst_page) ||
            !within(bad, c, i, DST_START, c->dst_elements - 1 - c->last_dst))
            return 0;
        if (grouped && c->column[DST_START][i] % size) {
            *bad = (struct misfit){i, DST_START, c->column[DST_START][i], c->column[DST_START][i] / size * size};
            return 0;
        }
        int64_t far = c->last_src;
        if (!is_whole(c, i)) {
            int64_t limit[3] = {c->column[LO][i], c->column[HI][i], c->column[COLS][i]};
            if (memcmp(limit, seen, sizeof seen)) {
                memcpy(seen, limit, sizeof seen);
                seen_reach = reach(c->loop, c->loops, 0, 0, 0, limit);
            }
            far = seen_reach;
            if (far < 0)
                continue; /* reads nothing */
        }
        if (!within(bad, c, i, SRC_CHANNEL, c->channels_in - 1) ||
            !within(bad, c, i, SRC_PAGE, c->src[c->column[SRC_CHANNEL][i]].len - c->src_page) ||
            !within(bad, c, i, SRC_START, c->src_elements - 1 - far))
            return 0;
    }
    return 1;
}

static void prepare(struct nest *t, const struct call *c, int64_t i, int reads)
{
    t->room = c->room;
    t->work.dst = (uint8_t *)c->dst[c->column[DST_CHANNEL][i]].buf + c->column[DST_PAGE][i];
    t->work.src = NULL;
    if (reads)
        t->work.src = (const uint8_t *)c->src[c->column[SRC_CHANNEL][i]].buf + c->column[SRC_PAGE][i];
}

/* Pieces between a prefetch and its use. */
#define AHEAD 2

static void execute(struct call *c, int64_t begin, int64_t end, int flags)
{
    struct nest *t = &c->whole;
    const int stream = (flags & STREAM) != 0;
    struct ahead from, into;
    look_ahead(&from, c, 0);
    look_ahead(&into, c, 1);
    if (stream && t->lines)
        into.lines = 0; /* what goes past the caches is not read first */
    t->move.far = !from.lines;
    for (int64_t i = begin; i < end; i++) {
        int64_t s = c->column[SRC_START][i], d = c->column[DST_START][i], next = i + AHEAD;
        if (next < end && is_whole(c, next)) {
            const uint8_t *read = (const uint8_t *)c->src[c->column[SRC_CHANNEL][next]].buf + c->column[SRC_PAGE][next] +
                                  t->work.src_header + c->column[SRC_START][next] * BITS[t->work.src_codec] / 8;
            const uint8_t *written = (const uint8_t *)c->dst[c->column[DST_CHANNEL][next]].buf + c->column[DST_PAGE][next] +
                                     t->work.dst_header + c->column[DST_START][next] * BITS[t->work.dst_codec] / 8;
            for (int k = 0; k < from.lines; k++)
                __builtin_prefetch(read + from.at[k], 0, 2);
            for (int k = 0; k < into.lines; k++)
                __builtin_prefetch(written + into.at[k], 1, 2);
        }
        if (is_whole(c, i)) {
            prepare(t, c, i, 1);
            walk(t, 0, s, d, stream);
        } else {
            int64_t limit[3] = {c->column[LO][i], c->column[HI][i], c->column[COLS][i]};
            prepare(&c->partial, c, i, limit[1] > limit[0] && limit[1] > 0 && limit[2] > 0);
            walk_partial(&c->partial, 0, s, d, 0, 0, limit);
        }
    }
#if defined(X86)
    if (stream)
        _mm_sfence();
#endif
}
