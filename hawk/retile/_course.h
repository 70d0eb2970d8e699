/* The pieces of a call in the order in which they are carried out, looked at once and some way ahead. */
#include "_call.h"

/* Lines of a whole piece on one side, as byte offsets from its first element; `lines` is 0 where there are so many that the
 * hardware sees ahead by itself.  A page is small and the next one anywhere, so that even what is contiguous is told. */
#define MAX_LINES 128
struct ahead {
    int lines;
    int64_t run; /* bytes that follow each other */
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
    a->run = bytes;
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


/* Pieces between a prefetch and its use, and bytes where these are few. */
#define AHEAD 2
#define AHEAD_BYTES 4096

/* Bytes of a group at most, for it has to stay in the second cache until it is read. */
#define GROUP_BYTES (128 << 10)

/* Pieces [first, last) whose places in the source lie among each other, or leave gaps but are of one page: they are asked for as
 * one, in the order of addresses, while the group before is carried out.  The hardware sees that order and hurries ahead of it. */
struct group {
    int64_t first, last;
    const uint8_t *from; /* NULL where nothing is known of its lines */
    int64_t bytes;
    int gaps;
};

#define RING 256
#define GROUP_PIECES 80 /* two groups behind the bundles at work, and a little more, have to find room in the ring */
#define GROUP_LINES (GROUP_BYTES / 64)
#define TRIES 4

/* The lines of a group that leaves gaps, as byte offsets from its lowest, in the order of addresses: found once for all groups
 * whose pieces lie alike. */
struct trail {
    int64_t pieces, each, skip; /* each: lines for each piece; skip: from the line that the lowest is in */
    int tries;                  /* how often lines may still be found */
    int twos;                   /* whether they come in twos that follow each other, for each piece */
    int64_t at[GROUP_PIECES];   /* the pieces */
    int32_t line[GROUP_LINES + GROUP_PIECES + MAX_RUNS];
};

/* In which order pieces are carried out.  Where those that read one page come back to it, after those that read others, they come
 * one after the other instead: of `every` pieces `run` are of one page, and so are those of the next `every`, `times` times. */
struct order {
    int64_t begin, end; /* pieces of whole windows; as many as are reordered */
    uint32_t run, every, times;
};

static int64_t ordered(const struct order *r, int64_t i)
{
    if (i >= r->end)
        return i;
    const uint32_t window = r->every * r->times, at = (uint32_t)((uint64_t)(i - r->begin) % window), part = at / r->run;
    return i - at + part % r->times * r->every + part / r->times * r->run + at % r->run;
}

/* What `execute` goes through: pieces are looked at once, some way ahead, and kept until they are carried out. */
#define BATCH 16
#define COLUMNS_AHEAD (3 * BATCH)
struct course {
    const struct call *c;
    int64_t end, loaded, span, each; /* bytes of a piece: from its first to its last, and its elements' own */
    struct group group[2]; /* in turn: what is carried out, and what comes next */
    int now;
    int64_t far; /* pieces */
    struct ahead from, into;
    struct inspection seen;
    struct order order;
    struct trail trail;
    int32_t along[MAX_RUNS]; /* lines without gaps */
    struct piece at[RING];
};

/* Piece i; where it does not fit the course ends before it. */
static const struct piece *piece(struct course *o, int64_t i)
{
    if (i >= o->loaded) {
        int64_t last = i + BATCH < o->end ? i + BATCH : o->end;
        for (int k = 0; k < COLUMNS; k++)
            for (int64_t j = 0; j < BATCH; j += 8)
                __builtin_prefetch(o->c->column[k] + i + COLUMNS_AHEAD + j, 0, 3);
        for (; o->loaded < last; o->loaded++)
            if (!inspect(o->c, ordered(&o->order, o->loaded), &o->seen, &o->at[o->loaded % RING])) {
                o->at[o->loaded % RING].whole = 0;
                last = o->end = o->loaded;
            }
    }
    return &o->at[i % RING];
}

static const struct piece *whole_piece(struct course *o, int64_t i)
{
    const struct piece *p = i < o->end ? piece(o, i) : NULL;
    return p && i < o->end && p->whole ? p : NULL;
}

/* Source pages of more bytes are not gone through at once. */
#define PAGE_BYTES (64 << 10)
#define MOST_WINDOW 128
/* Nor are those of which a piece takes longer runs. */
#define SHORT_RUN 128

/* The order is found by where the first pieces lie. */
static void find_order(struct course *o, int64_t begin)
{
    const struct call *c = o->c;
    const struct piece *p = whole_piece(o, begin);
    if (!p || c->src_page > PAGE_BYTES || o->from.run > SHORT_RUN)
        return;
    const uint8_t *page = p->src;
    int64_t run = 1, every, times = 1;
    while (run < MOST_WINDOW && (p = whole_piece(o, begin + run)) && p->src == page)
        run++;
    for (every = run; every <= MOST_WINDOW / 2 && (p = whole_piece(o, begin + every)) && p->src != page;)
        every++;
    if (!p || p->src != page || every > MOST_WINDOW / 2 || every % run)
        return;
    while ((times + 1) * every <= MOST_WINDOW && (p = whole_piece(o, begin + times * every)) && p->src == page)
        times++;
    const int64_t window = every * times;
    if (times > 1)
        o->order = (struct order){begin, begin + (o->end - begin) / window * window, (uint32_t)run, (uint32_t)every, (uint32_t)times};
    o->loaded = begin; /* they are looked at anew */
}
