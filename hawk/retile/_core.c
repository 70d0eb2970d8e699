/* The C core of the CPU retile: the program of `program.py`, executed without the interpreter lock.
 *
 * A piece is a nest of loops, walked box by box (`_nest.h`): a box is decoded, put in order, converted and written, each step
 * by one kernel for all layouts.  Boxes that an edge of the token range or of dim cuts are filled element by element.
 * Codecs are those of `layouts/codecs.py`, bit for bit.
 *
 * Stable ABI of Python 3.11, C11, gcc or clang; one build runs on every CPU of its architecture.
 */
#define PY_SSIZE_T_CLEAN
#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030b0000
#endif
#include <Python.h>

#include "_ahead.h"

/* Fill `view` with `object`'s bytes; `words` of `word` bytes at least, aligned (0 for any number). */
static int take(PyObject *object, Py_buffer *view, int flags, Py_ssize_t word, Py_ssize_t words)
{
    if (PyObject_GetBuffer(object, view, flags) < 0)
        return 0;
    if (view->len / word < words || ((uintptr_t)view->buf % (uintptr_t)word && view->len)) {
        PyBuffer_Release(view);
        PyErr_SetString(PyExc_ValueError, "an array is too short, or not aligned");
        return 0;
    }
    return 1;
}

/* Buffers of `o`; words of `word[k]` bytes, writable from `outs` on.  How many were taken. */
static int take_all(PyObject *const *o, Py_buffer *view, int n, const Py_ssize_t *word, int outs)
{
    for (int k = 0; k < n; k++)
        if (!take(o[k], &view[k], k < outs ? PyBUF_SIMPLE : PyBUF_WRITABLE, word[k], 0))
            return k;
    return n;
}

static void let_go(Py_buffer *view, Py_ssize_t held)
{
    while (held > 0)
        PyBuffer_Release(&view[--held]);
}

/* All that a call works with but its arguments: too much for the stack of a small thread. */
struct job {
    struct call call;
    struct course course;
};

#define LINE 64

static PyObject *retile(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *facts_o, *loops_o, *columns_o, *src_o, *dst_o, *result = NULL;
    long long begin, end;
    int flags, held = 0, ok = 0;
    if (!PyArg_ParseTuple(args, "OOOOOLLi", &facts_o, &loops_o, &columns_o, &src_o, &dst_o, &begin, &end, &flags))
        return NULL;
    Py_ssize_t columns = PySequence_Size(columns_o), ins = PySequence_Size(src_o), outs = PySequence_Size(dst_o);
    if (columns < 0 || ins < 0 || outs < 0)
        return NULL;
    if (columns != COLUMNS || begin < 0 || end < begin || ins > INT32_MAX || outs > INT32_MAX)
        return PyErr_Format(PyExc_ValueError, "columns or range out of order");
    Py_buffer few[64];
    Py_ssize_t wanted = 2 + COLUMNS + ins + outs;
    Py_buffer *views = wanted <= 64 ? few : PyMem_Malloc((size_t)wanted * sizeof *views);
    if (!views)
        return PyErr_NoMemory();
    struct misfit bad = {-1, 0, 0, 0};
    struct job *job = NULL;
    void *memory = PyMem_Malloc(sizeof *job + LINE);
    if (!memory) {
        PyErr_NoMemory();
        goto done;
    }
    job = (struct job *)(((uintptr_t)memory + LINE - 1) / LINE * LINE);
    struct call *c = &job->call;
    memset(c, 0, offsetof(struct call, whole));
    if (!take(facts_o, &views[held], PyBUF_SIMPLE, 8, 6))
        goto done;
    const int64_t *facts = views[held++].buf;
    if (!take(loops_o, &views[held], PyBUF_SIMPLE, 8, 0))
        goto done;
    const struct loop *loops = views[held].buf;
    Py_ssize_t n = views[held++].len / (Py_ssize_t)sizeof *loops;
    for (int k = 0; k < COLUMNS; k++) {
        PyObject *item = PySequence_GetItem(columns_o, k);
        int taken = item && take(item, &views[held], PyBUF_SIMPLE, 8, (Py_ssize_t)end);
        Py_XDECREF(item);
        if (!taken)
            goto done;
        c->column[k] = views[held++].buf;
    }
    c->src = &views[held];
    c->dst = c->src + ins;
    for (Py_ssize_t k = 0; k < ins + outs; k++) {
        PyObject *item = k < ins ? PySequence_GetItem(src_o, k) : PySequence_GetItem(dst_o, k - ins);
        int taken = item && take(item, &views[held], k < ins ? PyBUF_SIMPLE : PyBUF_WRITABLE, 1, 0);
        Py_XDECREF(item);
        if (!taken)
            goto done;
        held++;
    }
    c->channels_in = (int)ins;
    c->channels_out = (int)outs;
    c->src_elements = facts[2];
    c->dst_elements = facts[3];
    const int64_t most = (int64_t)1 << 40; /* elements; keeps every product below in range */
    if (facts[0] < 0 || facts[0] >= CODECS || facts[1] < 0 || facts[1] >= CODECS || facts[2] < 1 || facts[2] > most ||
        facts[3] < 1 || facts[3] > most || n > MAX_LOOPS)
        goto misfit;
    /* A page holds whole groups: half a byte at its end would be read as one. */
    if (facts[2] % group_of((int)facts[0]) || facts[3] % group_of((int)facts[1]))
        goto misfit;
    for (Py_ssize_t k = 0; k < n; k++) {
        const struct loop *l = &loops[k];
        if (l->ext < 1 || l->ext > most || l->src < 0 || l->src > most || l->dst < 0 || l->dst > most || l->row < 0 ||
            l->row > most || l->col < 0 || l->col > most)
            goto misfit;
        int64_t step, *total[4] = {&c->last_src, &c->last_dst, &c->last_row, &c->last_col};
        const int64_t by[4] = {l->src, l->dst, l->row, l->col};
        for (int f = 0; f < 4; f++)
            if (__builtin_mul_overflow(l->ext - 1, by[f], &step) || __builtin_add_overflow(*total[f], step, total[f]))
                goto misfit;
        c->loop[k] = *l;
    }
    if (c->last_dst >= c->dst_elements)
        goto misfit;
    c->loops = (int)n;
    struct work w = {.src_codec = (int)facts[0], .dst_codec = (int)facts[1]};
    w.src_factor = float_of((uint32_t)facts[4]);
    w.dst_factor = float_of((uint32_t)facts[5]);
    w.same = w.src_codec == w.dst_codec && facts[4] == facts[5];
    w.src_header = header_bytes(w.src_codec, facts[2]);
    w.dst_header = header_bytes(w.dst_codec, facts[3]);
    c->src_page = w.src_header + facts[2] * BITS[w.src_codec] / 8;
    c->dst_page = w.dst_header + facts[3] * BITS[w.dst_codec] / 8;
    if (!build(&c->whole, c->loop, c->loops, 1, &w) || !build(&c->partial, c->loop, c->loops, 0, &w))
        goto misfit;
    Py_BEGIN_ALLOW_THREADS
    ok = flags & CHECK_ONLY ? check(c, begin, end, &bad) : execute(c, &job->course, begin, end, flags, &bad);
    Py_END_ALLOW_THREADS
misfit:
    if (ok) {
        Py_INCREF(Py_None);
        result = Py_None;
    } else {
        result = Py_BuildValue("(LLLL)", (long long)bad.piece, (long long)bad.column, (long long)bad.got, (long long)bad.limit);
    }
done:
    let_go(views, held);
    if (views != few)
        PyMem_Free(views);
    PyMem_Free(memory);
    return result;
}

/* Above this many bytes in one call, targets go past the caches. */
#define LARGE (4 << 20)
/* Segments up to this size end before the hardware's prefetch has paid: the next but one is asked for meanwhile. */
#define SHORT (64 << 10)
#define FAR 4

#if defined(X86)
#define PAGE 4096

/* A long segment, four pages at a time. */
static void copy_long(uint8_t *to, const uint8_t *from, size_t n)
{
    size_t head = (size_t)(-(uintptr_t)to & 63);
    PICK(stream)(to, from, head, NULL);
    to += head;
    from += head;
    n -= head;
    for (; n >= 4 * PAGE; n -= 4 * PAGE, to += 4 * PAGE, from += 4 * PAGE) {
        uint8_t *const tos[4] = {to, to + PAGE, to + 2 * PAGE, to + 3 * PAGE};
        const uint8_t *const froms[4] = {from, from + PAGE, from + 2 * PAGE, from + 3 * PAGE};
        /* At the end there is nothing behind: look at what has been read. */
        const uint8_t *next = n >= 8 * PAGE ? from + 4 * PAGE : from;
        const uint8_t *const ahead[4] = {next, next + PAGE, next + 2 * PAGE, next + 3 * PAGE};
        PICK(stream4)(tos, froms, ahead, PAGE);
    }
    PICK(stream)(to, from, n, NULL);
}

/* Segments i to i + 3 at once, if they are alike and begin on lines; how many were copied, 4 or 0. */
static int copy_four(const int64_t *bases, const int32_t *region, const int64_t *local, int64_t source, const int64_t *remote,
                     const int64_t *nbytes, Py_ssize_t i, Py_ssize_t n)
{
    if (i + 4 > n || nbytes[i] % 64)
        return 0;
    uint8_t *tos[4];
    const uint8_t *froms[4], *ahead[4];
    for (int k = 0; k < 4; k++) {
        if (nbytes[i + k] != nbytes[i])
            return 0;
        tos[k] = (uint8_t *)(uintptr_t)(bases[region[i + k]] + local[i + k]);
        froms[k] = (const uint8_t *)(uintptr_t)(source + remote[i + k]);
        if ((uintptr_t)tos[k] & 63)
            return 0;
        int more = i + k + 4 < n && nbytes[i + k + 4] >= nbytes[i];
        ahead[k] = more ? (const uint8_t *)(uintptr_t)(source + remote[i + k + 4]) : froms[k];
        /* The targets of the next but one four, one line each, so that their addresses are translated in time. */
        if (i + k + 8 < n)
            __builtin_prefetch((const uint8_t *)(uintptr_t)(bases[region[i + k + 8]] + local[i + k + 8]), 0, 2);
    }
    PICK(stream4)(tos, froms, ahead, (size_t)nbytes[i]);
    return 4;
}
#endif

static void copy_all(const int64_t *bases, const int32_t *region, const int64_t *local, int64_t source, const int64_t *remote,
                     const int64_t *nbytes, Py_ssize_t n)
{
    uint64_t total = 0;
    for (Py_ssize_t i = 0; i < n; i++)
        total += (uint64_t)nbytes[i];
    for (Py_ssize_t i = 0; i < n; i++) {
        uint8_t *to = (uint8_t *)(uintptr_t)(bases[region[i]] + local[i]);
        const uint8_t *from = (const uint8_t *)(uintptr_t)(source + remote[i]);
#if defined(X86)
        if (total >= LARGE && nbytes[i] >= 256) {
            if (nbytes[i] > SHORT) {
                copy_long(to, from, (size_t)nbytes[i]);
                continue;
            }
            int four = copy_four(bases, region, local, source, remote, nbytes, i, n);
            if (four) {
                i += four - 1;
                continue;
            }
            const uint8_t *ahead = NULL;
            if (nbytes[i] <= SHORT && i + 2 < n)
                ahead = (const uint8_t *)(uintptr_t)(source + remote[i + 2]);
            /* Farther ahead, one line each, so that both addresses are translated in time. */
            if (ahead && i + FAR < n) {
                __builtin_prefetch((const uint8_t *)(uintptr_t)(source + remote[i + FAR]), 0, 2);
                __builtin_prefetch((const uint8_t *)(uintptr_t)(bases[region[i + FAR]] + local[i + FAR]), 0, 2);
            }
            PICK(stream)(to, from, (size_t)nbytes[i], ahead);
            continue;
        }
#endif
        memcpy(to, from, (size_t)nbytes[i]);
    }
#if defined(X86)
    _mm_sfence();
#endif
}

static PyObject *copy_segments(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *o[5], *result = NULL;
    long long source;
    if (!PyArg_ParseTuple(args, "OOOLOO", &o[0], &o[1], &o[2], &source, &o[3], &o[4]))
        return NULL;
    static const Py_ssize_t word[5] = {8, 4, 8, 8, 8};
    Py_buffer view[5];
    int held = take_all(o, view, 5, word, 5);
    if (held < 5)
        goto done;
    const Py_ssize_t n = view[1].len / 4;
    if (view[2].len / 8 < n || view[3].len / 8 < n || view[4].len / 8 < n) {
        PyErr_SetString(PyExc_ValueError, "the tables do not fit each other");
        goto done;
    }
    Py_BEGIN_ALLOW_THREADS
    copy_all(view[0].buf, view[1].buf, view[2].buf, source, view[3].buf, view[4].buf, n);
    Py_END_ALLOW_THREADS
    Py_INCREF(Py_None);
    result = Py_None;
done:
    let_go(view, held);
    return result;
}

#include "_guard.h"
#include "_plan.h"
#include "_bound.h"

static PyObject *level(PyObject *self, PyObject *args)
{
    (void)self;
    (void)args;
    return PyUnicode_FromString(LEVELS[level_of]);
}

/* For tests: the kernels of a lower level give the same bytes. */
static PyObject *set_level(PyObject *self, PyObject *args)
{
    const char *name;
    if (!PyArg_ParseTuple(args, "s", &name))
        return NULL;
    for (int k = 0; k <= detect(); k++)
        if (!strcmp(name, LEVELS[k])) {
            level_of = k;
            return level(self, NULL);
        }
    return PyErr_Format(PyExc_ValueError, "this CPU has no such level: %s", name);
}

#include "_calls.h"

static PyMethodDef methods[] = {
    {"retile", retile, METH_VARARGS, "Check, then retile pieces [begin, end)."},
    {"copy_segments", copy_segments, METH_VARARGS, "Copy segments between absolute addresses."},
    {"copy_guarded", copy_guarded, METH_VARARGS, "Copy segments if a guard stands before and after."},
    {"post_guard", post_guard, METH_VARARGS, "Put up a guard, or take it down."},
    {"bind_runs", bind_runs, METH_VARARGS, "The runs of a plane's blocks."},
    {"bind_pieces", bind_pieces, METH_VARARGS, "Where the pieces of a plane's blocks lie in the arena."},
    {"first_outside", first_outside, METH_VARARGS, "Where a table leaves its bounds."},
    {"bind_terms", bind_terms, METH_VARARGS, "The pages at which blocks begin."},
    {"bind_base", bind_base, METH_VARARGS, "Where planes begin in the arena."},
    {"bind_groups", bind_groups, METH_VARARGS, "The rows of all planes as groups."},
    {"bind_pages", bind_pages, METH_VARARGS, "Where the source pages of pieces are."},
    {"spread_rows", spread_rows, METH_VARARGS, "Write out the rows of some groups."},
    {"calls", calls, METH_VARARGS, "Calls of a library, one after the other."},
    {"level", level, METH_NOARGS, "The instruction set in use."},
    {"set_level", set_level, METH_VARARGS, "Use the kernels of a lower level; for tests."},
    {NULL, NULL, 0, NULL},
};

static int start(PyObject *module)
{
    (void)module;
    level_of = detect();
    return 0;
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, (void *)start}, {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_core", "The C core of the CPU retile.", 0, methods, slots, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__core(void) { return PyModuleDef_Init(&definition); }
