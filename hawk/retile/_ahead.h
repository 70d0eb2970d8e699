/* The pieces of a call carried out, and what they read asked for ahead. */
#include "_course.h"

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
    t->twos = lines % (2 * pieces) == 0;
    for (int64_t k = 0; k < lines && t->twos; k += 2)
        t->twos = t->line[k + 1] == t->line[k] + 64;
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

/* The lines that are asked for while piece i is carried out, as `struct soon` has them; NULL where the table of lines has to tell.
 * No struct is returned: the compiler would write its halves, and read it as a whole. */
static const uint8_t *ask(struct course *o, int64_t i, const int32_t **at)
{
    while (i >= o->group[o->now].last) {
        o->now ^= 1;
        find_group(o, o->group[o->now].last, &o->group[o->now ^ 1]);
    }
    const struct group *now = &o->group[o->now], *next = &o->group[o->now ^ 1];
    *at = NULL;
    if (!next->from || i < now->first)
        return NULL;
    if (now->last - now->first == 1) { /* the next piece alone would be too late */
        const struct piece *far = whole_piece(o, i + o->far);
        if (!far || !next->gaps || next->last - next->first > 1)
            return far ? far->from : NULL;
        *at = o->trail.line;
        return far->from - o->trail.skip;
    }
    if (next->gaps) {
        const int64_t done = i - now->first;
        *at = o->trail.line + (done < o->trail.pieces ? done : 0) * o->trail.each;
        return next->from;
    }
    const int64_t done = (i - now->first) * o->each;
    return next->from + (done + o->each <= next->bytes ? done : 0);
}

static void ask_lines(const struct ahead *a, const uint8_t *from)
{
    for (int k = 0; k < a->lines; k++)
        __builtin_prefetch(from + a->at[k], 0, 2);
}

/* Lines of the target that several pieces fill, and pieces that lie beside each other on it. */
#define MOST_EVERY 8
struct bundle {
    int pieces;    /* 0 where there are none */
    int every;     /* how many bundles are among each other: piece i goes with i + every, i + 2 * every, ... */
    int64_t apart; /* elements of the target from one to the next */
};

static struct bundle find_bundle(struct call *c, struct course *o, int64_t begin)
{
    const struct bundle none = {0, 0, 0};
    const struct piece *a = whole_piece(o, begin), *b = NULL;
    int every = 0;
    if (!movers()->lines[0] || !a || c->loops >= MAX_LOOPS || c->last_src >= APART)
        return none;
    while (!b && every < MOST_EVERY) {
        b = whole_piece(o, begin + ++every);
        if (!b)
            return none;
        if (a->dst != b->dst || a->d >= b->d)
            b = NULL;
    }
    if (!b)
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
            return (struct bundle){pieces, every, apart};
    }
    return none;
}

/* Do bundles begin with piece i, as many as are among each other? */
static int go_together(struct course *o, const struct bundle *b, int64_t i)
{
    for (int j = 0; j < b->every; j++) {
        const struct piece *first = whole_piece(o, i + j);
        if (!first)
            return 0;
        const uint8_t *dst = first->dst;
        const int64_t d = first->d;
        for (int k = 1; k < b->pieces; k++) {
            const struct piece *p = whole_piece(o, i + j + k * b->every);
            if (!p || p->dst != dst || p->d != d + k * b->apart)
                return 0;
        }
    }
    return 1;
}

/* What is asked for between the lines of piece i, which lies at `from`; `lines` that are not for that are asked for at once. */
static ALWAYS void ask_between(struct course *o, int64_t i, const uint8_t *from, int lines, struct soon *to)
{
    const int32_t *at;
    const uint8_t *soon = ask(o, i, &at);
    if (at && !o->trail.twos) {
        for (int k = 0; k < lines; k++)
            __builtin_prefetch(soon + at[k], 0, 2);
        soon = NULL;
        at = NULL;
    }
    to->from = soon ? soon : from;
    to->at = at;
}

/* Those bundles; what is asked for meanwhile lies behind all of them. */
static void put_bundles(struct course *o, struct nest *t, const struct bundle *b, int64_t i, int lines, int stream)
{
    const int64_t behind = b->every > 1 ? (b->pieces - 1) * b->every : 0;
    const uint8_t *from[4];
    for (int j = 0, n = 0; j < b->every; j++) {
        for (int k = 0; k < b->pieces; k++, n++) {
            from[k] = piece(o, i + j + k * b->every)->from;
            ask_between(o, i + n + behind, from[k], lines, &t->ahead[k]);
            if (!t->ahead[k].at && t->ahead[0].at)
                t->ahead[k].at = o->along;
        }
        put_lines(t, from, piece(o, i + j)->to, stream);
    }
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
    if (stream)
        find_order(o, begin);
    const struct bundle bundle = find_bundle(c, o, begin);
    o->far = AHEAD;
    if (bundle.pieces || t->kind == WHOLE_LINES)
        o->far = o->each >= AHEAD_BYTES ? 1 : o->each < AHEAD_BYTES / BATCH ? BATCH : AHEAD_BYTES / o->each;
    if (o->far < 2 * bundle.pieces) /* those of this bundle are being read */
        o->far = 2 * bundle.pieces;
    o->group[0].last = begin; /* nothing yet */
    find_group(o, begin, &o->group[1]);
    if (stream && (bundle.pieces || t->lines))
        o->into.lines = 0; /* what goes past the caches is not read first */
    t->move.far = !o->from.lines;
    /* Lines of a piece where they are asked for as a group's: what pieces share is asked for once. */
    const int lines = o->from.lines < o->each / 64 ? o->from.lines : (int)(o->each / 64);
    const int quick = t->kind != SLOW && group_of(t->work.src_codec) == 1 && group_of(t->work.dst_codec) == 1;
    struct rest rest;
    if (quick)
        lay_out(&rest, c->loop, c->loops, (int)width_of(t->work.dst_codec));
    for (int64_t i = begin; i < o->end; i++) {
        const struct piece *p = piece(o, i), *far;
        if (i >= o->end)
            break;
        if (!p->whole) {
            const int64_t at = ordered(&o->order, i);
            const int64_t limit[3] = {c->column[LO][at], c->column[HI][at], c->column[COLS][at]};
            if (quick && limit[0] <= 0 && p->src && p->s + c->last_src < c->src_elements) {
                prepare(t, c, p);
                t->next = NULL;
                t->ahead[0] = (struct soon){p->from, NULL};
                t->ahead[1].from = p->from + 64 * t->line.count;
                walk(t, 0, p->s, p->d, 0);
                rest.dst = p->dst + t->work.dst_header;
                rest.rows = limit[1];
                rest.cols = limit[2];
                clear_rest(&rest, 0, p->d, 0, 0);
                continue;
            }
            prepare(&c->partial, c, p);
            walk_partial(&c->partial, 0, p->s, p->d, 0, 0, limit);
            continue;
        }
        if (bundle.pieces && go_together(o, &bundle, i)) {
            put_bundles(o, &c->bundled, &bundle, i, lines, stream);
            i += bundle.pieces * bundle.every - 1;
            continue;
        }
        if (o->into.lines && (far = whole_piece(o, i + AHEAD)))
            ask_lines(&o->into, far->to);
        prepare(t, c, p);
        if (t->kind == WHOLE_LINES) {
            ask_between(o, i, p->from, lines, &t->ahead[0]);
            t->ahead[1].from = t->ahead[0].from + 64 * t->line.count; /* where there are no gaps */
            if (!t->outer) {
                const uint8_t *const from[1] = {p->from};
                put_lines(t, from, p->to, stream);
                continue;
            }
        } else {
            const int32_t *at;
            const uint8_t *soon = ask(o, i, &at);
            for (int k = 0; k < lines && soon; k++)
                __builtin_prefetch(soon + (at ? at[k] : 64 * k), 0, 2);
            if (!soon && (far = whole_piece(o, i + AHEAD)))
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
