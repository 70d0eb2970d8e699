/* The rest of binding a plan to block tables: what a few dozen small calls of numpy would do, each in one.
 *
 * As in `_plan.h` nothing here knows a layout, and every index is checked.
 */

/* Where in `blocks` the first number is that is not in [0, limit), or -1. */
static int64_t outside(const int64_t *blocks, int64_t n, int64_t limit)
{
    for (int64_t i = 0; i < n; i++)
        if (blocks[i] < 0 || blocks[i] >= limit)
            return i;
    return -1;
}

static PyObject *first_outside(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *blocks;
    Py_buffer view;
    long long limit;
    if (!PyArg_ParseTuple(args, "OL", &blocks, &limit) || !take(blocks, &view, PyBUF_SIMPLE, 8, 0))
        return NULL;
    int64_t found = outside(view.buf, view.len / 8, limit);
    PyBuffer_Release(&view);
    return PyLong_FromLongLong(found);
}

/* The page at which each block begins: a digit of its number, times what that is worth, summed. */
static PyObject *bind_terms(PyObject *self, PyObject *args)
{
    (void)self;
    enum { BLOCKS, DIGITS, TO, ALL };
    static const Py_ssize_t word[ALL] = {8, 8, 8};
    PyObject *o[ALL], *result = NULL;
    Py_buffer v[ALL];
    long long add;
    if (!PyArg_ParseTuple(args, "OOLO", &o[BLOCKS], &o[DIGITS], &add, &o[TO]))
        return NULL;
    int held = take_all(o, v, ALL, word, TO);
    if (held < ALL)
        goto done;
    const int64_t *block = v[BLOCKS].buf, *digit = v[DIGITS].buf;
    int64_t *to = v[TO].buf, n = v[BLOCKS].len / 8, digits = v[DIGITS].len / 24;
    int fits = v[TO].len / 8 >= n && v[DIGITS].len == digits * 24;
    for (int64_t d = 0; fits && d < digits; d++)
        fits = digit[3 * d] > 0 && digit[3 * d + 1] > 0;
    if (!fits || outside(block, n, INT64_MAX) >= 0) {
        PyErr_SetString(PyExc_ValueError, "the tables do not fit each other");
        goto done;
    }
    for (int64_t i = 0; i < n; i++) {
        uint64_t sum = (uint64_t)add;
        for (int64_t d = 0; d < digits; d++)
            sum += (uint64_t)(block[i] / digit[3 * d] % digit[3 * d + 1]) * (uint64_t)digit[3 * d + 2];
        to[i] = (int64_t)sum;
    }
    Py_INCREF(Py_None);
    result = Py_None;
done:
    let_go(v, held);
    return result;
}

/* Where each plane's part of each channel begins in the arena, [planes, channels]; how many bytes there are. */
static PyObject *bind_base(PyObject *self, PyObject *args)
{
    (void)self;
    enum { KIND, BYTES, BASE, ALL };
    static const Py_ssize_t word[ALL] = {8, 8, 8};
    PyObject *o[ALL], *result = NULL;
    Py_buffer v[ALL];
    long long channels;
    if (!PyArg_ParseTuple(args, "OOLO", &o[KIND], &o[BYTES], &channels, &o[BASE]))
        return NULL;
    int held = take_all(o, v, ALL, word, BASE);
    if (held < ALL)
        goto done;
    const int64_t *kind = v[KIND].buf, *bytes = v[BYTES].buf;
    int64_t planes = v[KIND].len / 8, *base = v[BASE].buf, at = 0;
    int fits = channels > 0 && v[BASE].len / 8 == planes * channels;
    if (!fits || outside(kind, planes, v[BYTES].len / 8 / channels) >= 0) {
        PyErr_SetString(PyExc_ValueError, "the tables do not fit each other");
        goto done;
    }
    for (int64_t c = 0; c < channels; c++)
        for (int64_t p = 0; p < planes; p++) {
            base[p * channels + c] = at;
            at = (int64_t)((uint64_t)at + (uint64_t)bytes[kind[p] * channels + c]);
        }
    result = PyLong_FromLongLong(at);
done:
    let_go(v, held);
    return result;
}

/* One group for each channel of each plane that has rows there; how many. */
static PyObject *bind_groups(PyObject *self, PyObject *args)
{
    (void)self;
    enum { CHANNEL, ENDS, KIND, BUFFER, SHIFT, BASE, PLACE, OFFSET, FIRST, COUNT, WHICH, REGION, UP, ON, ALL };
    static const Py_ssize_t word[ALL] = {4, 8, 8, 8, 8, 8, 4, 8, 8, 8, 8, 4, 8, 8};
    PyObject *o[ALL], *result = NULL;
    Py_buffer v[ALL];
    long long channels, arena;
    if (!PyArg_ParseTuple(args, "LLOOOOOOOOOOOOOO", &channels, &arena, &o[0], &o[1], &o[2], &o[3], &o[4], &o[5], &o[6], &o[7],
                          &o[8], &o[9], &o[10], &o[11], &o[12], &o[13]))
        return NULL;
    int held = take_all(o, v, ALL, word, FIRST);
    if (held < ALL)
        goto done;
    const int32_t *channel = v[CHANNEL].buf, *place = v[PLACE].buf;
    const int64_t *ends = v[ENDS].buf, *kind = v[KIND].buf, *buffer = v[BUFFER].buf, *shift = v[SHIFT].buf;
    const int64_t *base = v[BASE].buf, *offset = v[OFFSET].buf;
    int64_t *first = v[FIRST].buf, *count = v[COUNT].buf, *which = v[WHICH].buf, *up = v[UP].buf, *on = v[ON].buf;
    int32_t *region = v[REGION].buf;
    int64_t kinds = v[ENDS].len / 8, planes = v[KIND].len / 8, rows = v[CHANNEL].len / 4, groups = 0;
    int fits = channels > 0 && kinds > 0;
    if (fits) {
        int64_t lists = kinds * channels, all = planes * channels, buffers = v[PLACE].len / 4 / channels;
        fits = v[FIRST].len / 8 == lists && v[COUNT].len / 8 == lists && v[WHICH].len / 8 == all && v[REGION].len / 4 == all &&
               v[UP].len / 8 == all && v[ON].len / 8 == all && v[BASE].len / 8 == all && v[BUFFER].len / 8 == planes &&
               v[SHIFT].len / 8 == planes && v[PLACE].len / 4 == v[OFFSET].len / 8 && outside(kind, planes, kinds) < 0 &&
               outside(buffer, planes, buffers) < 0 && ends[kinds - 1] == rows;
    }
    if (fits)
        memset(count, 0, (size_t)(kinds * channels) * sizeof *count);
    for (int64_t k = 0, r = 0; fits && k < kinds; k++) {
        fits = ends[k] >= r && ends[k] <= rows;
        /* Rows are sorted by channel, so those of one are neighbours. */
        for (; fits && r < ends[k]; r++) {
            fits = channel[r] >= 0 && channel[r] < channels;
            if (fits)
                count[k * channels + channel[r]]++;
        }
    }
    if (!fits) {
        PyErr_SetString(PyExc_ValueError, "the tables do not fit each other");
        goto done;
    }
    for (int64_t k = 0, at = 0; k < kinds * channels; at += count[k], k++)
        first[k] = at;
    for (int64_t c = 0; c < channels; c++)
        for (int64_t p = 0; p < planes; p++) {
            int64_t list = kind[p] * channels + c, there = buffer[p] * channels + c;
            if (!count[list])
                continue;
            which[groups] = list;
            region[groups] = place[there];
            up[groups] = offset[there] + shift[p];
            on[groups++] = base[p * channels + c] + arena;
        }
    result = PyLong_FromLongLong(groups);
done:
    let_go(v, held);
    return result;
}

/* Byte offset of the source page of every piece: its own, moved as far as its entry's block is. */
static PyObject *bind_pages(PyObject *self, PyObject *args)
{
    (void)self;
    enum { TERM, ENTRY, AT, TO, ALL };
    static const Py_ssize_t word[ALL] = {8, 8, 8, 8};
    PyObject *o[ALL], *result = NULL;
    Py_buffer v[ALL];
    long long stride;
    if (!PyArg_ParseTuple(args, "OOOLO", &o[TERM], &o[ENTRY], &o[AT], &stride, &o[TO]))
        return NULL;
    int held = take_all(o, v, ALL, word, TO);
    if (held < ALL)
        goto done;
    const int64_t *term = v[TERM].buf, *entry = v[ENTRY].buf, *at = v[AT].buf;
    int64_t *to = v[TO].buf, rows = v[ENTRY].len / 8, all = v[AT].len / 8, each = rows ? all / rows : 0;
    if (v[TO].len != v[AT].len || all != each * rows || outside(entry, rows, v[TERM].len / 8) >= 0) {
        PyErr_SetString(PyExc_ValueError, "the tables do not fit each other");
        goto done;
    }
    for (int64_t r = 0; r < rows; r++, at += each, to += each) {
        int64_t up = (int64_t)((uint64_t)term[entry[r]] * (uint64_t)stride);
        for (int64_t k = 0; k < each; k++)
            to[k] = at[k] + up;
    }
    Py_INCREF(Py_None);
    result = Py_None;
done:
    let_go(v, held);
    return result;
}
