/* Which boxes are moved as whole lines, and the tables for it: see `_lines.h`. */
#include "_mover.h"

/* Do the innermost loops fill whole stretches of `size` target elements, each of one token where `tokens` is set?  Cuts the
 * loop that reaches beyond one. */
static int fill_stretches(struct loop *l, int *count, int64_t size, int tokens)
{
    int64_t filled = 1;
    int i = *count;
    while (filled < size) {
        if (--i < 0 || l[i].dst != filled || (tokens && l[i].row))
            return 0;
        if (filled * l[i].ext > size) {
            int64_t low = size / filled;
            if (size % filled || l[i].ext % low || *count > MAX_LOOPS)
                return 0;
            memmove(&l[i + 1], &l[i], (size_t)(*count - i) * sizeof *l);
            ++*count;
            l[i + 1].ext = low;
            l[i] = (struct loop){l[i].ext / low, l[i].src * low, l[i].dst * low, l[i].row * low, l[i].col * low};
            i++;
            filled = size;
        } else {
            filled *= l[i].ext;
        }
    }
    while (--i >= 0)
        if (l[i].dst % size)
            return 0;
    return filled == size;
}

/* Source stride of the loop over the pieces of a bundle: farther than a page reaches. */
#define APART ((int64_t)1 << 48)

static void set_part(struct lines *m, int k, int64_t at, int width)
{
    m->of[k] = (int)(at / APART);
    m->part[k] = at % APART * width;
}

/* `at` are the source offsets of the elements of two lines: the four halves of a line that hold them, and where in these
 * each is found; 0 where there are not four. */
static int find_halves(struct lines *m, const int64_t *at, int width)
{
    const int half = 32 / width;
    int place[128], missing[128];
    for (int i = 0; i < 4 * half; i++)
        missing[i] = 1;
    for (int part = 0; part < 4; part++) {
        int64_t least = INT64_MAX;
        int count = 0;
        for (int i = 0; i < 4 * half; i++)
            if (missing[i] && at[i] < least)
                least = at[i];
        for (int i = 0; i < 4 * half; i++)
            if (missing[i] && at[i] - least < half) {
                place[i] = part * half + (int)(at[i] - least);
                missing[i] = 0;
                count++;
            }
        if (count != half)
            return 0;
        set_part(m, part, least, width);
    }
    for (int i = 0; i < 64; i++) {
        int word = width == 4 ? place[i / 2] * 2 + i % 2 : width == 2 ? place[i] : place[2 * i] / 2;
        if (width == 1 && (place[2 * i] % 2 || place[2 * i + 1] != place[2 * i] + 1))
            return 0;
        m->index[i / 32][i % 32] = (uint16_t)word;
    }
    return 1;
}

static int is_full(const struct lines *m, int k)
{
    return m->of[k] == m->of[k + 1] && m->part[k] + 32 == m->part[k + 1];
}

/* Lines two by two, as the steps of `l` give them: 0 where that does not do, or does not read whole
 * lines though it is to. */
static int pair_lines(struct lines *m, struct loop *l, int64_t *at, int width, int full)
{
    const int size = 64 / width;
    if (l->ext % 2)
        return 0;
    for (int i = 0; i < size; i++)
        at[size + i] = at[i] + l->src;
    if (!find_halves(m, at, width) || (full && !(is_full(m, 0) && is_full(m, 2))))
        return 0;
    m->run = movers()->lines[is_full(m, 0) && is_full(m, 2) ? 2 : 3];
    m->second = l->dst * width;
    *l = (struct loop){l->ext / 2, 2 * l->src, 2 * l->dst, 0, 0};
    return 1;
}

/* Loops that give columns of the source one by one, from a step of `run` elements on, until there are 16 elements: where their lines
 * go, and what is left of these loops. */
static int take_columns(struct lines *m, struct loop *l, int n, int64_t run, int width)
{
    for (int64_t count = 1; run < 16;) {
        int k = 0;
        while (k < n && (l[k].src != run || l[k].ext == 1))
            k++;
        if (k == n)
            return 0;
        const int64_t part = l[k].ext < 16 / run ? l[k].ext : 16 / run;
        if (l[k].ext % part || 16 % (run * part))
            return 0;
        for (int64_t i = count; i < part * count; i++)
            m->column[i] = m->column[i % count] + i / count * l[k].dst * width;
        count *= part;
        run *= part;
        l[k] = (struct loop){l[k].ext / part, l[k].src * part, l[k].dst * part, 0, 0};
    }
    return 1;
}

static void set_rows(struct lines *m, int first, const int64_t *at, int n, int64_t by, int width)
{
    for (int i = 0; i < n; i++) {
        m->row_of[first + i] = (int)((at[i] + by) / APART);
        m->row[first + i] = (at[i] + by) % APART * width;
        if (m->pieces <= m->row_of[first + i])
            m->pieces = m->row_of[first + i] + 1;
    }
}

/* A loop of an even number of steps, of those that go `dst` elements of the target on, or of any; the one that reaches least far
 * in the source. */
static int find_even(const struct loop *l, int n, int64_t dst)
{
    int found = -1;
    for (int k = 0; k < n; k++)
        if (l[k].ext % 2 == 0 && (!dst || l[k].dst == dst) && (found < 0 || l[k].src < l[found].src))
            found = k;
    return found;
}

static void halve(struct loop *l) { *l = (struct loop){l->ext / 2, 2 * l->src, 2 * l->dst, 0, 0}; }

/* Lines that are columns of the source, or half and half of two neighbours; 0 where they are not. */
static int turn_lines(struct lines *m, struct loop *outer, int n, const int64_t *at, int width)
{
    struct loop l[MAX_LOOPS + 2];
    int pairs = 1;
    if (width != 2)
        return 0;
    memcpy(l, outer, (size_t)n * sizeof *l);
    for (int i = 0; i < 16; i++)
        pairs &= at[16 + i] == at[i] + 1;
    if (!take_columns(m, l, n, pairs ? 2 : 1, width))
        return 0;
    const int other = find_even(l, n, pairs ? 0 : 32);
    m->pieces = m->sets = 1;
    set_rows(m, 0, at, pairs ? 16 : 32, 0, width);
    if (pairs) {
        if (other < 0)
            return 0;
        set_rows(m, 16, at, 16, l[other].src, width);
        for (int i = 0; i < 8; i++)
            m->column[8 + i] = m->column[i] + l[other].dst * width;
        halve(&l[other]);
    } else if (other >= 0) {
        m->sets = 2;
        m->beside = 64;
        set_rows(m, 32, at, 32, l[other].src, width);
        halve(&l[other]);
    }
    m->run = movers()->lines[pairs ? 7 : 6];
    memcpy(outer, l, (size_t)n * sizeof *l);
    return m->pieces == 1 || m->pieces == 2 || m->pieces == 4;
}

/* How lines are filled whose elements lie at `at`; a loop of `outer` may give every other line of a pair. */
static int fill_line(struct lines *m, struct loop *outer, int outers, int64_t *at, int width)
{
    const int size = 64 / width;
    int run = 1;
    while (run < size && at[run] == at[run - 1] + 1)
        run++;
    if (run == size) {
        for (int k = 0; k < outers; k++)
            if (outer[k].src == size && outer[k].dst == size)
                return 0; /* what is longer is copied */
        m->run = movers()->lines[5];
        set_part(m, 0, at[0], width);
        return 1;
    }
    /* Of two pieces a line each, side by side. */
    for (int k = 0; k < outers; k++)
        if (outer[k].src == APART)
            return pair_lines(m, &outer[k], at, width, 0) || turn_lines(m, outer, outers, at, width);
    /* Reading whole lines comes first. */
    for (int k = 0; k < outers; k++)
        if (pair_lines(m, &outer[k], at, width, 1))
            return 1;
    for (int parts = 2; parts <= 4; parts += 2) {
        const int each = size / parts;
        int fits = run >= each;
        for (int i = 0; i < size; i++)
            fits &= at[i] == at[i / each * each] + i % each;
        if (!fits)
            continue;
        m->run = movers()->lines[parts / 2 - 1];
        for (int k = 0; k < 4; k++)
            set_part(m, k, at[k % parts * each], width);
        return 1;
    }
    for (int k = 0; k < outers; k++)
        if (pair_lines(m, &outer[k], at, width, 0))
            return 1;
    return turn_lines(m, outer, outers, at, width);
}

/* A box as whole lines; 0 where that does not do. */
static int plan_lines(struct lines *m, const struct loop *loops, int n, int width)
{
    const int size = 64 / width;
    struct loop l[MAX_LOOPS + 2];
    int64_t at[128];
    if (!movers()->lines[0] || n > MAX_LOOPS)
        return 0;
    memset(m, 0, sizeof *m);
    memcpy(l, loops, (size_t)n * sizeof *l);
    if (!fill_stretches(l, &n, size, 0))
        return 0;
    int outers = n;
    for (int64_t filled = 1; filled < size; filled *= l[outers].ext)
        outers--;
    spread(&l[outers], n - outers, 0, at, size);
    if (!fill_line(m, l, outers, at, width))
        return 0;
    for (int i = 0; i < outers; i++) {
        if (l[i].src < APART || l[i].ext == 1)
            continue;
        if (l[i].src != 2 * APART || l[i].ext != 2 || m->run != movers()->lines[3])
            return 0;
        m->run = movers()->lines[4];
        m->beside = l[i].dst * width;
        l[i] = (struct loop){1, 0, 0, 0, 0};
    }
    m->count = spread(l, outers, 0, m->at, MAX_RUNS);
    if (m->count < 0)
        return 0;
    spread(l, outers, 1, m->to, MAX_RUNS);
    scale(m->at, m->count, width);
    return scale(m->to, m->count, width);
}
