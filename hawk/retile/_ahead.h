/* The pieces of a call carried out, and what they read asked for ahead. */
#include "_call.h"

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
#define GROUP_PIECES 96 /* two groups, and a little more, have to find room in the ring */
#define GROUP_LINES (GROUP_BYTES / 64)
#define TRIES 4

/* The lines of a group that leaves gaps, as byte offsets from its lowest, in the order of addresses: found once for all groups
 * whose pieces lie alike. */
struct trail {
    int64_t pieces, each, skip; /* each: lines for each piece; skip: from the line that the lowest is in */
    int tries;                  /* how often lines may still be found */
    int64_t at[GROUP_PIECES];   /* the pieces */
    int32_t line[GROUP_LINES + GROUP_PIECES + MAX_RUNS];
};

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
            if (!inspect(o->c, o->loaded, &o->seen, &o->at[o->loaded % RING])) {
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

/* The lines of group `g`, which leaves gaps; 0 where it is not like those that are known. */
static int find_trail(struct course *o, const struct group *g, uintptr_t low)
{
    struct trail *t = &o->trail;
    const int64_t pieces = g->last - g->first, skip = (int64_t)(low & 63);
    int like = t->pieces == pieces && t->skip == skip;
    for (int64_t i = 0; like && i < pieces; i++)
        like = t->at[i] == (int64_t)((uintptr_t)o->at[(g->first + i) % RING].from - low);
    if (like || !o->from.lines || !t->tries)
        return like;
    uint64_t taken[GROUP_LINES / 64 + 1] = {0};
    for (int64_t i = 0; i < pieces; i++) {
        t->at[i] = (int64_t)((uintptr_t)o->at[(g->first + i) % RING].from - low);
        for (int k = 0; k < o->from.lines; k++) {
            const int64_t line = (skip + t->at[i] + o->from.at[k]) / 64;
            taken[line / 64] |= (uint64_t)1 << line % 64;
        }
    }
    int64_t lines = 0;
    for (int64_t word = 0; word <= GROUP_LINES / 64; word++)
        for (uint64_t rest = taken[word]; rest && lines < GROUP_LINES; rest &= rest - 1)
            t->line[lines++] = (int32_t)((word * 64 + __builtin_ctzll(rest)) * 64);
    for (int k = 0; k < GROUP_PIECES + MAX_RUNS; k++) /* whoever asks for more than there are asks for the last again */
        t->line[lines + k] = t->line[lines - 1];
    t->pieces = pieces;
    t->each = (lines + pieces - 1) / pieces;
    t->skip = skip;
    t->tries--;
    return 1;
}

/* Written field by field, and never copied: a load that is wider than the stores before it waits for these, and they for all
 * that goes past the caches. */
static void find_group(struct course *o, int64_t first, struct group *g)
{
    const struct piece *p = whole_piece(o, first);
    int64_t last = first + 1;
    g->first = first;
    g->from = NULL;
    g->gaps = 0;
    if (p) {
        const uint8_t *from = p->from, *page = p->src;
        uintptr_t low = (uintptr_t)from, high = low + (uintptr_t)o->span;
        for (int same = 0; same < 2 && !g->from; same++) {
            for (; last < first + GROUP_PIECES && (p = whole_piece(o, last)); last++) {
                uintptr_t at = (uintptr_t)p->from, behind = at + (uintptr_t)o->span;
                if (at < low || (same ? p->src != page : at >= high) || behind > low + GROUP_BYTES)
                    break;
                high = behind > high ? behind : high;
            }
            g->bytes = (int64_t)(high - low);
            if (o->each >= (g->bytes - (g->bytes >> 2)) / (last - first))
                g->from = from;
        }
        g->last = last;
        if (!g->from && g->bytes <= GROUP_BYTES && find_trail(o, g, low)) {
            g->from = from - (low & 63);
            g->gaps = 1;
        }
    }
    g->last = last;
}

/* The lines that are asked for while piece i is carried out; from NULL where the table of lines has to tell. */
static struct soon ask(struct course *o, int64_t i)
{
    while (i >= o->group[o->now].last) {
        o->now ^= 1;
        find_group(o, o->group[o->now].last, &o->group[o->now ^ 1]);
    }
    const struct group *now = &o->group[o->now], *next = &o->group[o->now ^ 1];
    struct soon soon = {NULL, NULL};
    if (!next->from)
        return soon;
    if (now->last - now->first == 1) { /* the next piece alone would be too late */
        const struct piece *far = whole_piece(o, i + o->far);
        if (far) {
            soon.from = far->from;
            if (next->gaps && next->last - next->first == 1) {
                soon.from -= o->trail.skip;
                soon.at = o->trail.line;
            }
        }
        return soon;
    }
    soon.from = next->from;
    if (next->gaps) {
        const int64_t done = i - now->first;
        soon.at = o->trail.line + (done < o->trail.pieces ? done : 0) * o->trail.each;
    } else {
        const int64_t done = (i - now->first) * o->each;
        soon.from += done + o->each <= next->bytes ? done : 0;
    }
    return soon;
}

static void ask_lines(const struct ahead *a, const uint8_t *from)
{
    for (int k = 0; k < a->lines; k++)
        __builtin_prefetch(from + a->at[k], 0, 2);
}

/* Lines of the target that several pieces fill, and pieces that lie beside each other on it. */
struct bundle {
    int pieces;    /* 0 where there are none */
    int64_t apart; /* elements of the target from one to the next */
};

static struct bundle find_bundle(struct call *c, struct course *o, int64_t begin)
{
    const struct bundle none = {0, 0};
    const struct piece *a = whole_piece(o, begin), *b = whole_piece(o, begin + 1);
    if (!movers()->lines[0] || !a || !b || a->dst != b->dst || a->d >= b->d || c->loops >= MAX_LOOPS || c->last_src >= APART)
        return none;
    const int64_t apart = b->d - a->d;
    for (int pieces = 4; pieces > 1; pieces /= 2) {
        struct loop l[MAX_LOOPS];
        int n = c->loops;
        memcpy(l, c->loop, sizeof l);
        for (; n > 0 && l[n - 1].dst < apart; n--)
            l[n] = l[n - 1];
        l[n] = (struct loop){pieces, APART, apart, 0, 0};
        if (build(&c->bundled, l, c->loops + 1, 1, &c->whole.work) && c->bundled.kind == WHOLE_LINES && !c->bundled.outer &&
            (c->whole.kind != WHOLE_LINES || c->bundled.line.second == 64)) /* else one alone writes as much in a row */
            return (struct bundle){pieces, apart};
    }
    return none;
}

/* Does piece i begin a bundle?  Then `from` are its pieces. */
static int go_together(struct course *o, const struct bundle *b, int64_t i, const uint8_t **from)
{
    const struct piece *first = whole_piece(o, i);
    from[0] = first->from;
    for (int k = 1; k < b->pieces; k++) {
        const struct piece *p = whole_piece(o, i + k);
        if (!p || p->dst != first->dst || p->d != first->d + k * b->apart)
            return 0;
        from[k] = p->from;
    }
    return 1;
}

/* Carry out [begin, end); 0, and `bad` says where, if a piece does not fit. */
static int execute(struct call *c, struct course *o, int64_t begin, int64_t end, int flags, struct misfit *bad)
{
    struct nest *t = &c->whole;
    const int stream = (flags & STREAM) != 0, bits = BITS[t->work.src_codec];
    memset(o, 0, offsetof(struct course, trail));
    o->trail.pieces = 0;
    o->trail.tries = TRIES;
    for (int k = 0; k < MAX_RUNS; k++)
        o->along[k] = 64 * k;
    o->c = c;
    o->end = end;
    o->loaded = begin;
    o->seen = (struct inspection){.seen = {-1, -1, -1}, .reach = -1};
    o->span = (c->last_src + 1) * bits / 8;
    uint64_t each = (uint64_t)bits; /* of loops that step nowhere it may be anything */
    for (int i = 0; i < c->loops; i++)
        each *= (uint64_t)c->loop[i].ext;
    o->each = (int64_t)(each / 8);
    look_ahead(&o->from, c, 0);
    look_ahead(&o->into, c, 1);
    const struct bundle bundle = find_bundle(c, o, begin);
    o->far = AHEAD;
    if (bundle.pieces || t->kind == WHOLE_LINES)
        o->far = o->each >= AHEAD_BYTES ? 1 : o->each < AHEAD_BYTES / BATCH ? BATCH : AHEAD_BYTES / o->each;
    o->group[0].last = begin; /* nothing yet */
    find_group(o, begin, &o->group[1]);
    if (stream && (bundle.pieces || t->lines))
        o->into.lines = 0; /* what goes past the caches is not read first */
    t->move.far = !o->from.lines;
    /* Lines of a piece where they are asked for as a group's: what pieces share is asked for once. */
    const int64_t lines = o->from.lines < o->each / 64 ? o->from.lines : o->each / 64;
    for (int64_t i = begin; i < o->end; i++) {
        const struct piece *p = piece(o, i), *far;
        if (i >= o->end)
            break;
        if (!p->whole) {
            int64_t limit[3] = {c->column[LO][i], c->column[HI][i], c->column[COLS][i]};
            prepare(&c->partial, c, p);
            walk_partial(&c->partial, 0, p->s, p->d, 0, 0, limit);
            continue;
        }
        struct soon meanwhile = ask(o, i);
        if (o->into.lines && (far = whole_piece(o, i + AHEAD)))
            ask_lines(&o->into, far->to);
        const uint8_t *from[4];
        if (bundle.pieces && go_together(o, &bundle, i, from)) {
            struct nest *many = &c->bundled;
            const int gaps = meanwhile.at != NULL;
            for (int k = 0; k < bundle.pieces; k++) {
                many->ahead[k].from = meanwhile.from ? meanwhile.from : from[k];
                many->ahead[k].at = meanwhile.at ? meanwhile.at : gaps ? o->along : NULL;
                if (k + 1 < bundle.pieces)
                    meanwhile = ask(o, ++i);
            }
            put_lines(many, from, p->to, stream);
            continue;
        }
        prepare(t, c, p);
        if (t->kind == WHOLE_LINES) {
            t->ahead[0].from = t->ahead[1].from = meanwhile.from ? meanwhile.from : p->from;
            t->ahead[0].at = meanwhile.at;
            if (meanwhile.at)
                t->ahead[1].at = meanwhile.at + t->line.count;
            else
                t->ahead[1].from += 64 * t->line.count;
            if (!t->outer) {
                from[0] = p->from;
                put_lines(t, from, p->to, stream);
                continue;
            }
        } else if (meanwhile.from) {
            for (int k = 0; k < lines; k++)
                __builtin_prefetch(meanwhile.from + (meanwhile.at ? meanwhile.at[k] : 64 * k), 0, 2);
        } else if ((far = whole_piece(o, i + AHEAD))) {
            ask_lines(&o->from, far->from);
        }
        t->next = !t->outer && (far = whole_piece(o, i + 1)) ? far->from : NULL;
        walk(t, 0, p->s, p->d, stream);
    }
#if defined(X86)
    if (stream)
        _mm_sfence();
#endif
    *bad = o->seen.bad;
    return o->end == end;
}
