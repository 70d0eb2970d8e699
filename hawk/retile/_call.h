/* One call: its pieces checked against the buffers, then carried out. */
#include "_walk.h"

struct call {
    struct loop loop[MAX_LOOPS];
    int loops, channels_in, channels_out;
    int64_t src_elements, dst_elements, src_page, dst_page, last_src, last_dst, last_row, last_col;
    const int64_t *column[COLUMNS];
    Py_buffer *src, *dst;
    /* What follows is large, and made where it is needed. */
    struct nest whole, bundled, partial; /* bundled: pieces that fill lines together */
    struct room room;
};

static int64_t header_bytes(int codec, int64_t elements) { return codec >= BFP8 ? elements / group_of(codec) : 0; }

static int is_whole(const struct call *c, int64_t i)
{
    return c->column[LO][i] <= 0 && c->column[HI][i] > c->last_row && c->column[COLS][i] > c->last_col;
}

struct misfit {
    int64_t piece, column, got, limit;
};

/* A piece as it is carried out. */
struct piece {
    const uint8_t *src; /* its pages */
    uint8_t *dst;
    int64_t s, d; /* its first element in these */
    const uint8_t *from;
    uint8_t *to; /* where that lies */
    int whole;
};

/* What pieces are held against, and the last partial piece's limits with how far it reads. */
struct inspection {
    int64_t seen[3], reach;
    struct misfit bad;
};

static int within(struct misfit *bad, const struct call *c, int64_t i, int column, int64_t limit)
{
    int64_t got = c->column[column][i];
    if (got >= 0 && got <= limit)
        return 1;
    *bad = (struct misfit){i, column, got, limit};
    return 0;
}

/* Does piece i stay in its pages, and its pages in their channels?  Then `p` is what it is. */
static ALWAYS int inspect(const struct call *c, int64_t i, struct inspection *seen, struct piece *p)
{
    const struct work *w = &c->whole.work;
    struct misfit *bad = &seen->bad;
    if (!within(bad, c, i, DST_CHANNEL, c->channels_out - 1))
        return 0;
    const Py_buffer *into = &c->dst[c->column[DST_CHANNEL][i]];
    if (!within(bad, c, i, DST_PAGE, into->len - c->dst_page) ||
        !within(bad, c, i, DST_START, c->dst_elements - 1 - c->last_dst))
        return 0;
    p->d = c->column[DST_START][i];
    p->dst = (uint8_t *)into->buf + c->column[DST_PAGE][i];
    p->to = p->dst + w->dst_header + ((uint64_t)p->d * (uint64_t)BITS[w->dst_codec] >> 3);
    if (w->dst_codec >= BFP8 && p->d % group_of(w->dst_codec)) {
        *bad = (struct misfit){i, DST_START, p->d, p->d - p->d % group_of(w->dst_codec)};
        return 0;
    }
    p->whole = is_whole(c, i);
    p->src = p->from = NULL;
    p->s = 0;
    int64_t far = c->last_src;
    if (!p->whole) {
        int64_t limit[3] = {c->column[LO][i], c->column[HI][i], c->column[COLS][i]};
        if (memcmp(limit, seen->seen, sizeof limit)) {
            memcpy(seen->seen, limit, sizeof limit);
            seen->reach = reach(c->loop, c->loops, 0, 0, 0, limit);
        }
        far = seen->reach;
        if (far < 0)
            return 1; /* reads nothing */
    }
    if (!within(bad, c, i, SRC_CHANNEL, c->channels_in - 1))
        return 0;
    const Py_buffer *taken = &c->src[c->column[SRC_CHANNEL][i]];
    if (!within(bad, c, i, SRC_PAGE, taken->len - c->src_page) ||
        !within(bad, c, i, SRC_START, c->src_elements - 1 - far))
        return 0;
    p->s = c->column[SRC_START][i];
    p->src = (const uint8_t *)taken->buf + c->column[SRC_PAGE][i];
    p->from = p->src + w->src_header + ((uint64_t)p->s * (uint64_t)BITS[w->src_codec] >> 3);
    return 1;
}

/* All of [begin, end). */
static int check(const struct call *c, int64_t begin, int64_t end, struct misfit *bad)
{
    struct inspection seen = {.seen = {-1, -1, -1}, .reach = -1};
    struct piece p;
    for (int64_t i = begin; i < end; i++)
        if (!inspect(c, i, &seen, &p)) {
            *bad = seen.bad;
            return 0;
        }
    return 1;
}

/* The nest before a piece. */
static void prepare(struct nest *t, struct call *c, const struct piece *p)
{
    t->room = &c->room;
    t->work.src = p->src;
    t->work.dst = p->dst;
}
