/* A nest of loops, built from the program: outer loops over boxes, and what is done with a box.
 *
 * A box goes through up to three scratches, each small enough for a near cache, so that every codec and every order need
 * one kernel each, and memory is read and written once:
 *
 *     source page -> decoded (a grouped codec, in the source's order) -> moved (the target's order) -> image -> target page
 *
 * Steps that have nothing to do fall away.  What reads a page reads in its order, and an image is written in the target's,
 * past the caches where it fills lines.
 */
#include <stddef.h>

#include "_liner.h"

/* Bytes of a scratch, of elements of the widest kind that a box is held in. */
#define ROOM (32 << 10)

struct room {
    uint8_t decoded[ROOM], moved[ROOM], image[ROOM + ROOM / GROUP], shared[ROOM / GROUP];
};

/* Contiguous elements from which on a run is converted where it lies, without being moved first. */
#define LONG 64

enum { COPY, KEEP, PIPE, SLOW, WHOLE_LINES };

struct nest {
    int kind, outer, inner, mid, moves, converts;
    struct loop loop[MAX_LOOPS + 2], in[MAX_LOOPS + 2];
    int64_t elements, last_row, last_col; /* of a box */
    int64_t stretches, stretch, stretch_at[MAX_RUNS]; /* elements: contiguous in a grouped source */
    int64_t span; /* elements of a grouped source from the first to the last, where these are decoded with all between, or 0 */
    int64_t outs, out, out_at[MAX_RUNS];              /* elements: contiguous in the target */
    int lines;                                        /* whether these are whole lines, if the box begins on one */
    int64_t unit;                                     /* elements of one token that are contiguous in the target */
    int unit_level;
    const uint8_t *next;  /* where the next piece lies, if this one is a single box */
    struct soon ahead[4]; /* what is asked for meanwhile, for each piece of a bundle */
    struct lines line;
    struct move move, put; /* put: the image into the target */
    fusion fused;   /* moves and converts at once, or NULL */
    fission parted; /* decodes and moves at once, or NULL */
    struct conversion decode, encode, edge; /* edge: of a piece's part, element by element */
    struct work work;
    struct room *room;
};

static int width_of(int codec) { return BITS[codec] / 8; }

static int chains(const struct loop *a, const struct loop *b, int whole)
{
    if (a->src != b->src * b->ext || a->dst != b->dst * b->ext)
        return 0;
    return whole || (a->row == b->row * b->ext && a->col == b->col * b->ext);
}

/* A box that takes parts of groups: what lies between its first and its last element is decoded as a whole, unless that is
 * far more. */
static int plan_span(struct nest *t, struct loop *within)
{
    int64_t last = 0, elements = 1;
    for (int i = 0; i < t->inner; i++) {
        last += (t->in[i].ext - 1) * t->in[i].src;
        elements *= t->in[i].ext;
    }
    if (last >= 4 * elements || (last + 2 * group_of(t->work.src_codec)) * 4 > ROOM)
        return 0;
    memcpy(within, t->in, (size_t)t->inner * sizeof *within);
    t->span = last + 1;
    t->stretches = 1;
    return 1;
}

/* The stretches of a grouped source that a box fills, and its loops with strides within what is decoded of them; 0 where it
 * does not fill whole groups, and no span either. */
static int plan_decode(struct nest *t, struct loop *within)
{
    const int64_t size = group_of(t->work.src_codec);
    int order[MAX_LOOPS + 2];
    for (int i = 0; i < t->inner; i++) {
        int k = i;
        for (; k > 0 && t->in[order[k - 1]].src > t->in[i].src; k--)
            order[k] = order[k - 1];
        order[k] = i;
    }
    int64_t run = 1, dense = 1;
    int used = 0;
    t->span = 0;
    while (used < t->inner && t->in[order[used]].src == run)
        run *= t->in[order[used++]].ext;
    if (run % size)
        return plan_span(t, within);
    struct loop rest[MAX_LOOPS + 2];
    int rests = 0;
    for (int k = t->inner - 1; k >= used; k--) {
        if (t->in[order[k]].src % size)
            return plan_span(t, within);
        rest[rests++] = t->in[order[k]];
    }
    for (int k = 0; k < t->outer; k++)
        if (t->loop[k].src % size)
            return plan_span(t, within);
    t->stretch = run;
    t->stretches = spread(rest, rests, 0, t->stretch_at, MAX_RUNS);
    for (int k = 0; k < t->inner; k++) {
        within[order[k]] = t->in[order[k]];
        within[order[k]].src = dense;
        dense *= t->in[order[k]].ext;
    }
    return t->stretches > 0;
}

/* Groups of two halves of their elements, or whole, that are put in order while they are decoded. */
static fission plan_parted(struct nest *t)
{
    struct move *m = &t->move;
    const int codec = t->work.src_codec, apart = m->run == movers()->unweave[0][1] && m->nb == GROUP / 2;
    if (t->stretches != 1 || t->span || t->mid != BF16 || (codec != BFP8 && codec != BFP4) || m->runs % 2 ||
        !(apart || (m->run == movers()->runs && m->bytes == 2 * GROUP)))
        return NULL;
    by_source(m);
    for (int64_t k = 0; k < m->runs; k++)
        if (m->src_at[k] != k * 2 * GROUP)
            return NULL;
    return converters()->parted[apart][codec - BFP8];
}

/* Groups of a target that are read where they lie: whole, or woven of two halves. */
static void plan_fused(struct nest *t, float factor)
{
    struct move *m = &t->move;
    const int to = t->work.dst_codec, width = width_of(t->mid);
    const int woven = m->run == movers()->weave[0][width == 4 ? 2 : width - 1];
    t->fused = NULL;
    if ((to != BFP8 && to != BFP4) || factor != 1 ||
        !(woven ? m->na == GROUP / 2 : m->run == movers()->runs && m->bytes == GROUP * width))
        return;
    t->fused = converters()->fused[t->mid][woven][to - BFP8];
    if (!t->fused)
        return;
    by_source(m);
    pair_runs(m, GROUP * width, woven ? GROUP * width / 2 : GROUP * width);
    if (t->mid != BF16 && !m->lined)
        t->fused = NULL;
}

/* What is done with the box that the loops `in` are; 0 where tables do not hold it. */
static int plan_box(struct nest *t, int whole)
{
    struct work *w = &t->work;
    const int64_t size = group_of(w->dst_codec), bits = BITS[w->dst_codec];
    int level = t->inner;
    t->out = 1;
    for (; level > 0 && t->in[level - 1].dst == t->out; level--)
        t->out *= t->in[level - 1].ext;
    /* What edges need comes first: every kind of box has them. */
    t->edge = conversion(group_of(w->src_codec) > 1 ? FP32 : w->src_codec, w->dst_codec,
                         group_of(w->src_codec) > 1 ? 1 : w->src_factor, w->dst_factor);
    t->unit = 1;
    for (t->unit_level = t->inner; t->unit_level > level && !t->in[t->unit_level - 1].row; t->unit_level--)
        t->unit *= t->in[t->unit_level - 1].ext;
    if (whole && w->same && size == 1 && plan_lines(&t->line, t->in, t->inner, width_of(w->src_codec))) {
        t->kind = WHOLE_LINES;
        t->lines = 1;
        return 1;
    }
    if (w->same && size == 1 && t->out * width_of(w->src_codec) < 8) {
        struct loop l[MAX_LOOPS + 2];
        const int n = merge(t->in, t->inner, l), width = width_of(w->src_codec);
        t->kind = COPY;
        return n ? move_strided(&t->move, l, n, width) : move_runs(&t->move, l, n, width); /* none: one element */
    }
    t->outs = spread(t->in, level, 1, t->out_at, MAX_RUNS);
    if (t->outs < 0 || t->out % size)
        return 0;
    t->put.run = movers()->runs;
    t->put.far = 0; /* an image lies in a near cache */
    t->put.runs = t->outs;
    t->put.bytes = t->out * bits / 8;
    for (int64_t k = 0; k < t->outs; k++) {
        t->put.src_at[k] = k * t->put.bytes;
        t->put.dst_at[k] = t->out_at[k] * bits / 8;
    }
    int64_t all = t->out;
    for (int64_t k = 0; k < t->outs; k++)
        all |= t->out_at[k];
    t->lines = all * bits % 512 == 0;
    t->kind = PIPE;
    t->mid = w->src_codec;
    struct loop within[MAX_LOOPS + 2], l[MAX_LOOPS + 2];
    memcpy(within, t->in, sizeof within);
    int n = merge(t->in, t->inner, l);
    if (w->same && size == 1) {
        t->kind = COPY;
        /* Short runs through a scratch only where they have to be woven, or read and written far apart. */
        if (!n || (l[n - 1].src == 1 && l[n - 1].dst == 1 && (n == 1 || l[n - 1].ext * width_of(w->src_codec) >= 16)))
            return move_runs(&t->move, l, n, width_of(w->src_codec));
        t->kind = PIPE;
    }
    int group_src = group_of(w->src_codec);
    if (w->same && size > 1 && l[n - 1].src == 1 && l[n - 1].ext % size == 0) {
        t->kind = KEEP;
        for (int k = 0; k < n - 1; k++)
            if (l[k].src % size)
                t->kind = SLOW;
        for (int k = 0; k < t->outer; k++)
            if (t->loop[k].src % size)
                t->kind = SLOW;
        return move_runs(&t->move, l, n, 1);
    }
    if (group_src > 1) {
        if (!plan_decode(t, within)) {
            t->kind = SLOW;
            return 1;
        }
        t->mid = size == 1 ? w->dst_codec : through_bf16(w->src_codec, w->dst_codec) ? BF16 : FP32;
        t->decode = conversion(w->src_codec, t->mid, 1, size == 1 ? w->dst_factor : 1);
    }
    int done = w->same && size == 1;
    t->converts = !done && t->mid != w->dst_codec;
    if (group_src == 1 && !w->same)
        t->converts = 1;
    t->encode = conversion(t->mid, w->dst_codec, group_src > 1 ? 1 : w->src_factor, w->dst_factor);
    if (!plan_move(&t->move, within, t->inner, width_of(t->mid)))
        return 0;
    t->moves = (group_src > 1 && t->span) || t->move.runs > 1 || t->move.run != movers()->runs;
    plan_fused(t, group_src > 1 ? 1 : w->src_factor);
    t->parted = group_src > 1 && !t->fused ? plan_parted(t) : NULL;
    return 1;
}

/* Elements that a box may have. */
static int64_t most_elements(const struct work *w)
{
    int bits = BITS[w->src_codec] > BITS[w->dst_codec] ? BITS[w->src_codec] : BITS[w->dst_codec];
    if (group_of(w->src_codec) > 1)
        bits = 32;
    return ROOM * 8 / bits;
}

/* Lay out `t` from `n` loops; `whole` for pieces without partial rows and columns.  0 where they do not fit. */
static int build(struct nest *t, const struct loop *loops, int n, int whole, const struct work *facts)
{
    struct loop l[MAX_LOOPS + 2];
    int count = 0;
    memset(t, 0, offsetof(struct nest, line));
    for (int i = 0; i < n; i++) {
        if (loops[i].ext == 1)
            continue;
        if (count && chains(&l[count - 1], &loops[i], whole)) {
            int64_t ext = l[count - 1].ext * loops[i].ext;
            l[count - 1] = loops[i];
            l[count - 1].ext = ext;
        } else {
            l[count++] = loops[i];
        }
    }
    t->work = *facts;
    const int64_t size = group_of(t->work.dst_codec), most = most_elements(&t->work);
    if (size > 1 && !fill_stretches(l, &count, size, 1))
        return 0;
    /* As many loops as fit, from the innermost on; one that is too long is cut, as long as that gives a box worth while. */
    int from = count;
    int64_t elements = 1;
    while (from > 0 && elements * l[from - 1].ext <= most)
        elements *= l[--from].ext;
    if (from > 0 && elements < 1024 && count <= MAX_LOOPS) {
        int64_t low = most / elements;
        while (l[from - 1].ext % low)
            low--;
        if (low > 1) {
            struct loop *cut = &l[from - 1];
            memmove(cut + 1, cut, (size_t)(count - from + 1) * sizeof *cut);
            count++;
            cut[1].ext = low;
            *cut = (struct loop){cut->ext / low, cut->src * low, cut->dst * low, cut->row * low, cut->col * low};
        }
    }
    for (;; from++) {
        t->outer = from;
        t->inner = count - from;
        memcpy(t->loop, l, (size_t)from * sizeof *l);
        memcpy(t->in, l + from, (size_t)(count - from) * sizeof *l);
        if (plan_box(t, whole))
            break;
        if (from == count)
            return 0;
    }
    t->elements = 1;
    for (int i = 0; i < t->inner; i++) {
        t->elements *= t->in[i].ext;
        t->last_row += (t->in[i].ext - 1) * t->in[i].row;
        t->last_col += (t->in[i].ext - 1) * t->in[i].col;
    }
    return 1;
}
