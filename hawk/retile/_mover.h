/* Which mover goes through a box, and its tables. */
#include "_slow.h"

/* Offsets of `n` loops' steps from the first, most significant loop first, by their source (`to` 0) or target stride;
 * how many, or -1 where they are more than `most`. */
static int64_t spread(const struct loop *l, int n, int to, int64_t *at, int64_t most)
{
    int64_t count = 1;
    at[0] = 0;
    for (int i = n - 1; i >= 0; i--) {
        if (l[i].ext > most / count)
            return -1;
        for (int64_t k = 1; k < l[i].ext; k++)
            for (int64_t j = 0; j < count; j++)
                at[k * count + j] = k * (to ? l[i].dst : l[i].src) + at[j];
        count *= l[i].ext;
    }
    return count;
}

/* Loops whose outer neighbour goes on where they end become one. */
static int merge(const struct loop *loops, int n, struct loop *out)
{
    int count = 0;
    for (int i = 0; i < n; i++) {
        if (loops[i].ext == 1)
            continue;
        struct loop *last = &out[count - 1];
        if (count && last->src == loops[i].src * loops[i].ext && last->dst == loops[i].dst * loops[i].ext) {
            int64_t ext = last->ext * loops[i].ext;
            *last = loops[i];
            last->ext = ext;
        } else {
            out[count++] = loops[i];
        }
    }
    return count;
}

static int scale(int64_t *at, int64_t n, int64_t by)
{
    for (int64_t k = 0; k < n; k++)
        at[k] *= by;
    return n >= 0;
}

static int finish(struct move *m, const struct loop *outer, int n, int width)
{
    m->runs = spread(outer, n, 0, m->src_at, MAX_RUNS);
    if (m->runs < 0)
        return 0;
    spread(outer, n, 1, m->dst_at, MAX_RUNS);
    scale(m->dst_at, m->runs, width);
    scale(m->src_at, m->runs, width);
    for (int k = 0; k < LEAD; k++)
        m->src_at[m->runs + k] = m->src_at[m->runs - 1];
    return 1;
}

/* Contiguous runs, in the target's order. */
static int move_runs(struct move *m, const struct loop *l, int n, int width)
{
    m->run = movers()->runs;
    m->bytes = width;
    if (n && l[n - 1].src == 1 && l[n - 1].dst == 1)
        m->bytes *= l[--n].ext;
    return finish(m, l, n, width);
}

/* Element by element, with a step on either side: what the target has no runs of. */
static int move_strided(struct move *m, const struct loop *l, int n, int width)
{
    m->run = movers()->strided[width == 4 ? 2 : width - 1];
    m->bytes = width;
    m->nb = l[n - 1].ext;
    m->from_step = l[n - 1].src;
    m->to_step = l[n - 1].dst;
    return finish(m, l, n - 1, width);
}

/* In the source's order: what reads is fetched ahead, what is written lies in a scratch. */
static void by_source(struct move *m)
{
    for (int64_t i = 1; i < m->runs; i++) {
        int64_t s = m->src_at[i], d = m->dst_at[i], k = i;
        for (; k > 0 && m->src_at[k - 1] > s; k--) {
            m->src_at[k] = m->src_at[k - 1];
            m->dst_at[k] = m->dst_at[k - 1];
        }
        m->src_at[k] = s;
        m->dst_at[k] = d;
    }
    for (int k = 0; k < LEAD; k++)
        m->src_at[m->runs + k] = m->src_at[m->runs - 1];
}

/* What is known of runs of `bytes` in the target, of which the next goes on `step` bytes behind in the source: see `struct move`. */
static void pair_runs(struct move *m, int64_t bytes, int64_t step)
{
    m->paired = m->runs % 2 == 0;
    for (int64_t k = 0; k + 1 < m->runs; k += 2)
        m->paired &= m->src_at[k + 1] == m->src_at[k] + step;
    m->lined = m->paired && m->runs % 8 == 0;
    for (int64_t k = 0; k < m->runs; k++)
        m->lined &= k % 8 < 2 ? m->dst_at[k] % (4 * bytes) == 0 : m->dst_at[k] == m->dst_at[k - 2] + bytes;
}

/* How `loops`, elements of `width` bytes in the target's order, become a dense scratch; 0 where a table is too short for
 * them. */
static int plan_move(struct move *m, const struct loop *loops, int n, int width)
{
    struct loop dense[MAX_LOOPS + 2], l[MAX_LOOPS + 2];
    int64_t filled = 1;
    memset(m, 0, sizeof *m);
    for (int i = n - 1; i >= 0; i--) {
        dense[i] = (struct loop){loops[i].ext, loops[i].src, filled, 0, 0};
        filled *= loops[i].ext;
    }
    n = merge(dense, n, l);
    const struct movers *use = movers();
    const int w = width == 4 ? 2 : width - 1;
    const int lanes = 16 / width;
    if (!n || l[n - 1].src == 1) {
        if (!move_runs(m, l, n, width))
            return 0;
        by_source(m);
        return 1;
    }
    /* `wide`: loops whose steps together are contiguous in the source, the narrowest first. */
    int wide[MAX_LOOPS + 2], wides = 0, inner = n, is_wide[MAX_LOOPS + 2] = {0};
    for (int64_t run = 1; wides < n;) {
        int i = 0;
        while (i < n && (is_wide[i] || l[i].src != run))
            i++;
        if (i == n)
            break;
        is_wide[wide[wides++] = i] = 1;
        run *= l[i].ext;
    }
    while (inner > 0 && !is_wide[inner - 1])
        inner--;
    m->nb = spread(&l[inner], n - inner, 0, m->b_at, MAX_RUNS);
    struct loop outer[MAX_LOOPS + 2];
    int outers = 0;
    if (wides && m->nb > 0) {
        const struct loop *first = &l[wide[0]];
        if (inner == n && (first->ext == 2 || first->ext == 4) && l[n - 1].src == first->ext) {
            m->run = use->unweave[first->ext == 4][w];
            m->nb = l[n - 1].ext;
            for (int k = 0; k < first->ext; k++)
                m->a_at[k] = k * first->dst * width;
            for (int i = 0; i < n - 1; i++)
                if (i != wide[0])
                    outer[outers++] = l[i];
            return finish(m, outer, outers, width);
        }
        if ((m->nb == 2 || m->nb == 4) && wide[0] == inner - 1) {
            m->run = use->weave[m->nb == 4][w];
            m->na = first->ext;
            scale(m->b_at, m->nb, width);
            return finish(m, l, inner - 1, width);
        }
        struct loop run[MAX_LOOPS + 2];
        int used = 0;
        int64_t na = 1;
        while (used < wides && wide[used] < inner && na * l[wide[used]].ext <= MAX_RUNS)
            na *= l[wide[used++]].ext;
        for (int k = 0; k < used; k++)
            run[used - 1 - k] = l[wide[k]];
        if (na >= lanes && m->nb >= lanes) {
            m->run = use->transpose[w];
            m->na = spread(run, used, 1, m->a_at, MAX_RUNS);
            scale(m->a_at, m->na, width);
            scale(m->b_at, m->nb, width);
            for (int k = 0; k < used; k++)
                is_wide[wide[k]] = 2;
            for (int i = 0; i < inner; i++)
                if (is_wide[i] != 2)
                    outer[outers++] = l[i];
            return finish(m, outer, outers, width);
        }
    }
    /* As many inner loops as there is room for; one that is too long is cut. */
    if (l[n - 1].ext > MAX_RUNS && n <= MAX_LOOPS) {
        int64_t low = MAX_RUNS;
        while (l[n - 1].ext % low)
            low--;
        l[n] = (struct loop){low, l[n - 1].src, l[n - 1].dst, 0, 0};
        l[n - 1] = (struct loop){l[n - 1].ext / low, l[n - 1].src * low, l[n - 1].dst * low, 0, 0};
        n++;
    }
    for (inner = n, filled = 1; inner > 0 && filled * l[inner - 1].ext <= MAX_RUNS; inner--)
        filled *= l[inner - 1].ext;
    m->run = use->gather[w];
    m->nb = spread(&l[inner], n - inner, 0, m->b_at, MAX_RUNS);
    scale(m->b_at, m->nb, width);
    return finish(m, l, inner, width);
}
