/* A nest carried out: over whole boxes, and over those that an edge cuts. */
#include "_nest.h"

/* Past the caches where whole lines are filled, and the caller wants that. */
static void put(uint8_t *to, const uint8_t *from, int64_t n, int stream)
{
#if defined(X86)
    if (stream && n >= 64 && (((uintptr_t)to | (uintptr_t)n) & 63) == 0) {
        PICK(stream)(to, from, (size_t)n, NULL);
        return;
    }
#else
    (void)stream;
#endif
    memcpy(to, from, (size_t)n);
}

/* Lines from which on a run that does not begin on one goes past the caches. */
#define APART_LINES 8

/* The image of a box, run by run. */
static void flush(const struct nest *t, int64_t d, int stream)
{
    const struct work *w = &t->work;
    const int64_t size = group_of(w->dst_codec), each = t->out / size;
    uint8_t *codes = w->dst + w->dst_header + d * BITS[w->dst_codec] / 8;
#if defined(X86)
    if (stream && ((uintptr_t)codes & 63) == 0)
        PICK(stream_runs)(&t->put, t->room->image, codes, NULL);
    else if (stream && t->put.bytes >= APART_LINES * 64) /* but for its ends */
        for (int64_t k = 0; k < t->put.runs; k++)
            PICK(stream)(codes + t->put.dst_at[k], t->room->image + t->put.src_at[k], (size_t)t->put.bytes, NULL);
    else
#endif
        t->put.run(&t->put, t->room->image, codes);
    if (size > 1)
        for (int64_t k = 0; k < t->outs; k++)
            put(w->dst + (d + t->out_at[k]) / size, t->room->shared + k * each, each, stream);
}

/* Of a box that an edge cuts: elements from `limit` on are there, the others are 0; rows before the first stay untouched. */
static void edge_box(const struct nest *t, int64_t s, int64_t d, int64_t row, int64_t col, const int64_t *limit)
{
    if (row + t->last_row < limit[0])
        return;
    const struct work *w = &t->work;
    const int grouped = group_of(w->src_codec) > 1;
    const int64_t size = group_of(w->dst_codec);
    struct room *room = t->room;
    struct filling f = {w, t->in, t->inner, grouped ? 0 : width_of(w->src_codec), limit};
    const uint8_t *image = room->moved;
    memset(room->moved, 0, (size_t)(t->elements * (grouped ? 4 : f.width)));
    fill(&f, 0, s, row, col, room->moved);
    if (!w->same || size > 1) {
        image = room->image;
        convert(&t->edge, room->moved, room->shared, t->elements, room->image, room->shared);
    }
    if (w->same && size > 1)
        keep(&f, 0, s, row, col, 0, room->image, room->shared);
    drain(&f, 0, d, row, image, image, room->shared, t->unit, t->unit_level);
}

/* Groups that both sides form alike. */
static void keep_box(const struct nest *t, int64_t s, int64_t d, int stream)
{
    const struct work *w = &t->work;
    const int64_t bits = BITS[w->dst_codec], size = group_of(w->dst_codec), n = t->move.bytes;
    for (int64_t k = 0; k < t->move.runs; k++) {
        int64_t from = s + t->move.src_at[k], to = d + t->move.dst_at[k];
        put(w->dst + w->dst_header + to * bits / 8, w->src + w->src_header + from * bits / 8, n * bits / 8, stream);
        put(w->dst + to / size, w->src + from / size, n / size, stream);
    }
}

static void pipe_box(const struct nest *t, int64_t s, int64_t d, int stream)
{
    const struct work *w = &t->work;
    const int64_t bits = BITS[w->dst_codec], size = group_of(w->dst_codec), width = width_of(t->mid);
    const int64_t src_size = group_of(w->src_codec), src_bits = BITS[w->src_codec];
    struct room *room = t->room;
    const int straight = t->outs == 1 && !stream;
    uint8_t *codes = straight ? w->dst + w->dst_header + d * bits / 8 : room->image;
    uint8_t *shared = straight && size > 1 ? w->dst + d / size : room->shared;
    const uint8_t *now = w->src + s * width;
    if (t->parted) {
        uint8_t *to = t->converts ? room->moved : codes;
        t->parted(&t->move, w->src + w->src_header + s * src_bits / 8, w->src + s / src_size, to);
        now = to;
    } else if (src_size > 1 && t->span) {
        const int64_t skip = s % src_size, from = s - skip, n = (skip + t->span + src_size - 1) / src_size * src_size;
        convert(&t->decode, w->src + w->src_header + from * src_bits / 8, w->src + from / src_size, n, room->decoded,
                room->shared);
        now = room->decoded + skip * width;
    } else if (src_size > 1) {
        uint8_t *to = t->moves || t->converts ? room->decoded : codes;
        for (int64_t k = 0; k < t->stretches; k++) {
            int64_t from = s + t->stretch_at[k];
            convert(&t->decode, w->src + w->src_header + from * src_bits / 8, w->src + from / src_size, t->stretch,
                    to + k * t->stretch * width, room->shared);
        }
        now = to;
    }
    const int64_t run = t->move.bytes / width;
    if (t->fused) {
        uint8_t *to = w->dst + w->dst_header + d * bits / 8;
        if (stream && t->outs == 1 && t->move.lined && ((uintptr_t)to & 63) == 0) {
            t->fused(&t->move, now, to, shared, 1);
            put(w->dst + d / size, shared, t->out / size, stream);
            return;
        }
        t->fused(&t->move, now, codes, shared, 0);
    } else if (t->converts && t->move.run == movers()->runs && (run >= LONG || !t->moves) && run % size == 0) {
        for (int64_t k = 0; k < t->move.runs; k++) {
            int64_t at = t->move.dst_at[k] / width;
            __builtin_prefetch(now + t->move.src_at[k + LEAD], 0, 3);
            convert(&t->encode, now + t->move.src_at[k], room->shared, run, codes + at * bits / 8, shared + at / size);
        }
    } else {
        /* A box that lies in the page as it is still has to come into the image. */
        if (t->parted)
            ;
        else if (t->moves || (src_size == 1 && !t->converts)) {
            uint8_t *to = t->converts ? room->moved : codes;
            t->move.run(&t->move, now, to);
            now = to;
        }
        if (t->converts)
            convert(&t->encode, now, room->shared, t->elements, codes, shared);
    }
    if (!straight)
        flush(t, d, stream);
}

static const int64_t WHOLE[3] = {0, INT64_MAX, INT64_MAX};

/* `from` are the pieces that fill lines together. */
static void put_lines(const struct nest *t, const uint8_t *const *from, uint8_t *to, int stream)
{
    t->line.run(&t->line, from, to, t->ahead, stream && ((uintptr_t)to & 63) == 0);
}

static void box(const struct nest *t, int64_t s, int64_t d, int stream)
{
    const struct work *w = &t->work;
    const int64_t src_size = group_of(w->src_codec);
    if (t->kind == SLOW || (s % src_size && !t->span)) {
        edge_box(t, s, d, 0, 0, WHOLE);
    } else if (t->kind == WHOLE_LINES) {
        const int64_t width = width_of(w->dst_codec);
        const uint8_t *const from[1] = {w->src + s * width};
        put_lines(t, from, w->dst + d * width, stream);
    } else if (t->kind == COPY) {
        const int64_t width = width_of(w->dst_codec);
        uint8_t *to = w->dst + d * width;
#if defined(X86)
        if (stream && t->lines && t->move.bytes % 16 == 0 && ((uintptr_t)to & 63) == 0) {
            const uint8_t *from = w->src + s * width;
            PICK(stream_runs)(&t->move, from, to, t->next ? t->next : from);
            return;
        }
#endif
        t->move.run(&t->move, w->src + s * width, to);
    } else if (t->kind == KEEP) {
        keep_box(t, s, d, stream);
    } else {
        pipe_box(t, s, d, stream && t->lines);
    }
}

static void walk(const struct nest *t, int level, int64_t s, int64_t d, int stream)
{
    if (level == t->outer) {
        box(t, s, d, stream);
        return;
    }
    const struct loop *l = &t->loop[level];
    for (int64_t i = 0; i < l->ext; i++, s += l->src, d += l->dst)
        walk(t, level + 1, s, d, stream);
}

/* The same for a partial piece; `limit` is lo, hi and cols. */
static void walk_partial(const struct nest *t, int level, int64_t s, int64_t d, int64_t row, int64_t col, const int64_t *limit)
{
    if (level == t->outer) {
        edge_box(t, s, d, row, col, limit);
        return;
    }
    const struct loop *l = &t->loop[level];
    for (int64_t i = 0; i < l->ext; i++)
        walk_partial(t, level + 1, s + i * l->src, d + i * l->dst, row + i * l->row, col + i * l->col, limit);
}

/* A piece without rows before its own, carried out as if all of it were there, and then zeros in place of what is not: far
 * quicker than one element after the other.  `rows` and `cols` are how many are there; inside the loops from k on the row and
 * the col grow by `last_row[k]` and `last_col[k]`, and `run[k]` elements follow each other in the target, or 0 of them. */
struct rest {
    const struct loop *loop;
    int loops, width;
    uint8_t *dst;
    int64_t rows, cols, last_row[MAX_LOOPS + 1], last_col[MAX_LOOPS + 1], run[MAX_LOOPS + 1];
};

static void lay_out(struct rest *r, const struct loop *loop, int loops, int width)
{
    *r = (struct rest){.loop = loop, .loops = loops, .width = width};
    r->run[loops] = 1;
    for (int k = loops - 1; k >= 0; k--) {
        const struct loop *l = &loop[k];
        r->last_row[k] = r->last_row[k + 1] + (l->ext - 1) * l->row;
        r->last_col[k] = r->last_col[k + 1] + (l->ext - 1) * l->col;
        r->run[k] = l->ext == 1 ? r->run[k + 1] : l->dst == r->run[k + 1] ? l->ext * r->run[k + 1] : 0;
    }
}

static void clear_rest(const struct rest *r, int k, int64_t d, int64_t row, int64_t col)
{
    if (row + r->last_row[k] < r->rows && col + r->last_col[k] < r->cols)
        return;
    const int absent = row >= r->rows || col >= r->cols;
    if (absent && r->run[k]) {
        memset(r->dst + d * r->width, 0, (size_t)(r->run[k] * r->width));
        return;
    }
    const struct loop *l = &r->loop[k];
    if (absent && k == r->loops - 1 && r->width == 2) {
        const uint16_t zero = 0;
        for (int64_t i = 0; i < l->ext; i++)
            memcpy(r->dst + (d + i * l->dst) * 2, &zero, 2);
        return;
    }
    for (int64_t i = 0; i < l->ext; i++)
        clear_rest(r, k + 1, d + i * l->dst, row + i * l->row, col + i * l->col);
}

/* Largest source offset among the valid elements of a partial piece, -1 if there is none. */
static int64_t reach(const struct loop *l, int n, int64_t s, int64_t row, int64_t col, const int64_t *limit)
{
    if (n == 0)
        return row >= limit[0] && row < limit[1] && col < limit[2] ? s : -1;
    int64_t most = -1;
    for (int64_t i = 0; i < l->ext; i++) {
        int64_t got = reach(l + 1, n - 1, s + i * l->src, row + i * l->row, col + i * l->col, limit);
        most = got > most ? got : most;
    }
    return most;
}
