/* Binding a plan to block tables: what `hawk.plan` does with numpy, in one pass without tables in between.
 *
 * Nothing here knows a layout.  Blocks begin at page numbers; a table with one part per residue says which stretches of
 * pages each block has, and in which channel.  Every index is checked, for layouts and tables come from peers.
 */

/* A stretch of pages of one channel; `block` is where it came from. */
struct stretch {
    int64_t slot, count, block;
};

/* Sorts by slot; what is sorted already costs one look.  `spare` is as long as `s`. */
static void sort_stretches(struct stretch *s, struct stretch *spare, int64_t n)
{
    int64_t i = 1;
    while (i < n && s[i - 1].slot <= s[i].slot)
        i++;
    if (i >= n)
        return;
    struct stretch *from = s, *to = spare;
    for (int64_t width = 1; width < n; width *= 2) {
        for (int64_t low = 0; low < n; low += 2 * width) {
            int64_t mid = low + width < n ? low + width : n, high = low + 2 * width < n ? low + 2 * width : n;
            int64_t a = low, b = mid;
            for (int64_t k = low; k < high; k++)
                to[k] = a < mid && (b >= high || from[a].slot <= from[b].slot) ? from[a++] : from[b++];
        }
        struct stretch *swap = from;
        from = to;
        to = swap;
    }
    if (from != s)
        memcpy(s, from, (size_t)n * sizeof *s);
}

struct deal {
    const int64_t *term, *first, *channel, *slot, *count;
    int64_t blocks, channels, rows, stride, page_bytes, align, room;
    int32_t *to_channel;
    int64_t *arena, *target, *nbytes, *channel_bytes, *moved;
};

/* Rows written, or -1 where a table does not fit.  `moved` (may be NULL) takes arena minus target, [blocks, channels]. */
static int64_t deal(const struct deal *d, struct stretch *work, int64_t *begin)
{
    int64_t total = 0, rows = 0;
    memset(begin, 0, (size_t)(d->channels + 1) * sizeof *begin);
    for (int64_t b = 0; b < d->blocks; b++) {
        int64_t r = d->term[b] % d->channels;
        total += d->first[r + 1] - d->first[r];
        for (int64_t k = d->first[r]; k < d->first[r + 1]; k++)
            begin[d->channel[k] + 1]++;
    }
    if (total > d->room)
        return -1;
    for (int64_t c = 0; c < d->channels; c++)
        begin[c + 1] += begin[c];
    /* In the order of the blocks' pages, so that what follows finds each channel sorted already, or nearly. */
    struct stretch *order = work + 2 * total;
    for (int64_t b = 0; b < d->blocks; b++)
        order[b] = (struct stretch){d->term[b], 0, b};
    sort_stretches(order, order + d->blocks, d->blocks);
    for (int64_t i = 0; i < d->blocks; i++) {
        int64_t b = order[i].block, r = d->term[b] % d->channels, q = d->term[b] / d->channels;
        for (int64_t k = d->first[r]; k < d->first[r + 1]; k++)
            work[begin[d->channel[k]]++] = (struct stretch){q + d->slot[k], d->count[k], b};
    }
    for (int64_t c = 0, at = 0; c < d->channels; at = begin[c], c++) {
        sort_stretches(work + at, work + total, begin[c] - at);
        int64_t rank = 0, last = -1; /* the page behind the row before, if it can grow */
        for (int64_t k = at; k < begin[c]; k++) {
            const struct stretch *s = &work[k];
            if (d->moved)
                d->moved[s->block * d->channels + c] = (rank - s->slot) * d->stride;
            if (d->stride == d->page_bytes) {
                if (s->slot == last) {
                    d->nbytes[rows - 1] += s->count * d->stride;
                } else {
                    d->to_channel[rows] = (int32_t)c;
                    d->arena[rows] = rank * d->stride;
                    d->target[rows] = s->slot * d->stride;
                    d->nbytes[rows++] = s->count * d->stride;
                }
                last = s->slot + s->count;
            } else { /* the bytes between two pages are nobody's */
                for (int64_t p = 0; p < s->count; p++) {
                    if (rows >= d->rows)
                        return -1;
                    d->to_channel[rows] = (int32_t)c;
                    d->arena[rows] = (rank + p) * d->stride;
                    d->target[rows] = (s->slot + p) * d->stride;
                    d->nbytes[rows++] = d->page_bytes;
                }
            }
            rank += s->count;
        }
        d->channel_bytes[c] = (rank * d->stride + d->align - 1) / d->align * d->align;
    }
    return rows;
}

static PyObject *bind_runs(PyObject *self, PyObject *args)
{
    (void)self;
    enum { TERM, FIRST, CHANNEL, SLOT, COUNT, TO, ARENA, TARGET, NBYTES, BYTES, MOVED, ALL };
    static const Py_ssize_t word[ALL] = {8, 8, 8, 8, 8, 4, 8, 8, 8, 8, 8};
    PyObject *o[ALL], *result = NULL;
    Py_buffer v[ALL];
    long long stride, page_bytes, align;
    if (!PyArg_ParseTuple(args, "OOOOOLLLOOOOOO", &o[0], &o[1], &o[2], &o[3], &o[4], &stride, &page_bytes, &align, &o[5],
                          &o[6], &o[7], &o[8], &o[9], &o[10]))
        return NULL;
    int held = take_all(o, v, ALL, word, TO);
    struct stretch *work = NULL;
    int64_t *begin = NULL, rows = -1;
    if (held < ALL)
        goto done;
    int64_t channels = v[FIRST].len / 8 - 1, blocks = v[TERM].len / 8, stretches = v[CHANNEL].len / 8;
    int64_t room = v[TO].len / 4;
    struct deal d = {v[TERM].buf, v[FIRST].buf, v[CHANNEL].buf, v[SLOT].buf, v[COUNT].buf, blocks, channels, room,
                     stride, page_bytes, align, room, v[TO].buf, v[ARENA].buf, v[TARGET].buf, v[NBYTES].buf, v[BYTES].buf,
                     v[MOVED].len ? v[MOVED].buf : NULL};
    int fits = channels > 0 && channels < INT32_MAX && stride > 0 && align > 0 && v[SLOT].len / 8 == stretches &&
               v[COUNT].len / 8 == stretches && v[BYTES].len / 8 == channels && v[ARENA].len / 8 >= room &&
               v[TARGET].len / 8 >= room && v[NBYTES].len / 8 >= room &&
               (!d.moved || v[MOVED].len / 8 / channels >= blocks);
    for (int64_t c = 0; fits && c <= channels; c++)
        fits = d.first[c] >= (c ? d.first[c - 1] : 0) && d.first[c] <= stretches;
    for (int64_t k = 0; fits && k < stretches; k++)
        fits = d.channel[k] >= 0 && d.channel[k] < channels;
    for (int64_t b = 0; fits && b < blocks; b++)
        fits = d.term[b] >= 0;
    if (!fits) {
        PyErr_SetString(PyExc_ValueError, "the tables do not fit each other");
        goto done;
    }
    work = PyMem_Malloc((size_t)(2 * (room + blocks) + 1) * sizeof *work);
    begin = PyMem_Malloc((size_t)(channels + 1) * sizeof *begin);
    if (!work || !begin) {
        PyErr_NoMemory();
        goto done;
    }
    rows = deal(&d, work, begin);
    if (rows < 0)
        PyErr_SetString(PyExc_ValueError, "more runs than there is room for");
    else
        result = PyLong_FromLongLong(rows);
done:
    PyMem_Free(work);
    PyMem_Free(begin);
    let_go(v, held);
    return result;
}

/* Channel and arena offset of every piece of every block: its page is dealt by the block's residue, then moved as
 * the block's part of that channel is. */
static PyObject *bind_pieces(PyObject *self, PyObject *args)
{
    (void)self;
    enum { TERM, CHANNEL, PAGES, MOVED, TO, AT, ALL };
    static const Py_ssize_t word[ALL] = {8, 8, 8, 8, 8, 8};
    PyObject *o[ALL], *result = NULL;
    Py_buffer v[ALL];
    long long channels, stride;
    if (!PyArg_ParseTuple(args, "OOOOLLOO", &o[0], &o[1], &o[2], &o[3], &channels, &stride, &o[4], &o[5]))
        return NULL;
    int held = take_all(o, v, ALL, word, TO);
    if (held < ALL)
        goto done;
    const int64_t *term = v[TERM].buf, *channel = v[CHANNEL].buf, *page = v[PAGES].buf, *moved = v[MOVED].buf;
    int64_t *to = v[TO].buf, *at = v[AT].buf, blocks = v[TERM].len / 8, each = 0;
    int fits = channels > 0 && v[CHANNEL].len == v[PAGES].len && v[TO].len == v[AT].len;
    if (fits) {
        each = v[CHANNEL].len / 8 / channels;
        fits = v[CHANNEL].len / 8 == each * channels && v[TO].len / 8 == each * blocks &&
               v[MOVED].len / 8 == blocks * channels;
    }
    for (int64_t k = 0; fits && k < each * channels; k++)
        fits = channel[k] >= 0 && channel[k] < channels;
    for (int64_t b = 0; fits && b < blocks; b++)
        fits = term[b] >= 0;
    if (!fits) {
        PyErr_SetString(PyExc_ValueError, "the tables do not fit each other");
        goto done;
    }
    for (int64_t b = 0; b < blocks; b++, to += each, at += each, moved += channels) {
        int64_t r = term[b] % channels * each, up = term[b] / channels * stride;
        memcpy(to, channel + r, (size_t)each * sizeof *to);
        for (int64_t k = 0; k < each; k++)
            at[k] = page[r + k] + up + moved[channel[r + k]];
    }
    Py_INCREF(Py_None);
    result = Py_None;
done:
    let_go(v, held);
    return result;
}

/* Rows of groups [first, last): each the rows of one list, shifted by what the group says. */
static PyObject *spread_rows(PyObject *self, PyObject *args)
{
    (void)self;
    enum { FIRST, COUNT, LOCAL, REMOTE, NBYTES, WHICH, REGION, UP, ON, TO_REGION, TO_LOCAL, TO_REMOTE, TO_NBYTES, ALL };
    static const Py_ssize_t word[ALL] = {8, 8, 8, 8, 8, 8, 4, 8, 8, 4, 8, 8, 8};
    PyObject *o[ALL], *result = NULL;
    Py_buffer v[ALL];
    long long begin, end;
    if (!PyArg_ParseTuple(args, "OOOOOOOOOLLOOOO", &o[0], &o[1], &o[2], &o[3], &o[4], &o[5], &o[6], &o[7], &o[8], &begin,
                          &end, &o[9], &o[10], &o[11], &o[12]))
        return NULL;
    int held = take_all(o, v, ALL, word, TO_REGION);
    if (held < ALL)
        goto done;
    const int64_t *first = v[FIRST].buf, *count = v[COUNT].buf, *local = v[LOCAL].buf, *remote = v[REMOTE].buf;
    const int64_t *nbytes = v[NBYTES].buf, *which = v[WHICH].buf, *up = v[UP].buf, *on = v[ON].buf;
    const int32_t *region = v[REGION].buf;
    int64_t lists = v[FIRST].len / 8, runs = v[LOCAL].len / 8, groups = v[WHICH].len / 8, rows = 0;
    int fits = v[COUNT].len == v[FIRST].len && v[REMOTE].len == v[LOCAL].len && v[NBYTES].len == v[LOCAL].len &&
               v[REGION].len / 4 == groups && v[UP].len / 8 == groups && v[ON].len / 8 == groups && begin >= 0 &&
               begin <= end && end <= groups;
    for (int64_t k = 0; fits && k < lists; k++)
        fits = first[k] >= 0 && count[k] >= 0 && first[k] <= runs - count[k];
    for (int64_t g = begin; fits && g < end; g++) {
        fits = which[g] >= 0 && which[g] < lists;
        rows += fits ? count[which[g]] : 0;
    }
    if (!fits || v[TO_REGION].len / 4 < rows || v[TO_LOCAL].len / 8 < rows || v[TO_REMOTE].len / 8 < rows ||
        v[TO_NBYTES].len / 8 < rows) {
        PyErr_SetString(PyExc_ValueError, "the tables do not fit each other");
        goto done;
    }
    int32_t *to_region = v[TO_REGION].buf;
    int64_t *to_local = v[TO_LOCAL].buf, *to_remote = v[TO_REMOTE].buf, *to_nbytes = v[TO_NBYTES].buf;
    Py_BEGIN_ALLOW_THREADS
    for (int64_t g = begin, row = 0; g < end; g++) {
        int64_t n = count[which[g]], at = first[which[g]];
        for (int64_t k = 0; k < n; k++)
            to_region[row + k] = region[g];
        for (int64_t k = 0; k < n; k++)
            to_local[row + k] = local[at + k] + up[g];
        for (int64_t k = 0; k < n; k++)
            to_remote[row + k] = remote[at + k] + on[g];
        memcpy(to_nbytes + row, nbytes + at, (size_t)n * sizeof *nbytes);
        row += n;
    }
    Py_END_ALLOW_THREADS
    Py_INCREF(Py_None);
    result = Py_None;
done:
    let_go(v, held);
    return result;
}
