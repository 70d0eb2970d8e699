/* Copying out of memory that another process may take back: the reader says where it is, and looks whether it may.
 *
 * The owner keeps a board, three words a slot: a state that only holders of the grant know, and the range `[low, high)`
 * that it covers.  Each reader has a word of its own that the owner sees: the mark of the grant that it is in, which stands
 * on no board, or 0.  The reader writes its word before it looks at the board, the owner takes the state down before it
 * looks at the words, each with a fence between the two; so one of them sees the other.  After the copy the reader looks
 * again: what it copied counts only if the state stood until then.
 */

enum { STATE, LOW, HIGH, WORDS };

static int stands(const uint64_t *at, uint64_t state, uint64_t low, uint64_t high)
{
    return __atomic_load_n(&at[STATE], __ATOMIC_ACQUIRE) == state && __atomic_load_n(&at[LOW], __ATOMIC_RELAXED) <= low &&
           high <= __atomic_load_n(&at[HIGH], __ATOMIC_RELAXED);
}

static PyObject *copy_guarded(PyObject *self, PyObject *args)
{
    (void)self;
    enum { WORD, BOARD, BASES, REGION, LOCAL, REMOTE, NBYTES, ALL };
    static const Py_ssize_t word[ALL] = {8, 8, 8, 4, 8, 8, 8};
    PyObject *o[ALL], *result = NULL;
    Py_buffer v[ALL];
    unsigned long long slot, state, mark;
    long long source, size;
    int held = 0;
    if (!PyArg_ParseTuple(args, "OOKKKOOOLLOO", &o[WORD], &o[BOARD], &slot, &state, &mark, &o[BASES], &o[REGION], &o[LOCAL],
                          &source, &size, &o[REMOTE], &o[NBYTES]))
        return NULL;
    Py_ssize_t n = 0;
    for (; held < ALL; held++) {
        if (!take(o[held], &v[held], held == WORD ? PyBUF_WRITABLE : PyBUF_SIMPLE, word[held],
                  held == WORD ? 1 : held > REGION ? n : 0))
            goto done;
        if (held == REGION)
            n = v[REGION].len / 4;
    }
    if (slot >= (unsigned long long)(v[BOARD].len / 8 / WORDS)) {
        PyErr_SetString(PyExc_ValueError, "the board has no such slot");
        goto done;
    }
    const int64_t *remote = v[REMOTE].buf, *nbytes = v[NBYTES].buf;
    int64_t low = INT64_MAX, high = 0;
    for (Py_ssize_t i = 0; i < n; i++) {
        int64_t end;
        if (remote[i] < 0 || nbytes[i] < 0 || __builtin_add_overflow(remote[i], nbytes[i], &end))
            goto refused;
        low = remote[i] < low ? remote[i] : low;
        high = end > high ? end : high;
    }
    if (n == 0 || state == 0 || mark == 0 || high > size)
        goto refused;
    const uint64_t *at = (const uint64_t *)v[BOARD].buf + slot * WORDS;
    uint64_t *mine = v[WORD].buf;
    __atomic_store_n(mine, mark, __ATOMIC_SEQ_CST);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    int ok = stands(at, state, (uint64_t)low, (uint64_t)high);
    if (ok) {
        copy_all(v[BASES].buf, v[REGION].buf, v[LOCAL].buf, source, remote, nbytes, n);
        __atomic_thread_fence(__ATOMIC_SEQ_CST);
        ok = stands(at, state, (uint64_t)low, (uint64_t)high);
    }
    __atomic_store_n(mine, 0, __ATOMIC_SEQ_CST);
    result = PyBool_FromLong(ok);
    goto done;
refused:
    result = PyBool_FromLong(0);
done:
    let_go(v, held);
    return result;
}

/* The owner's side: writes a slot, its state last; a state of 0 takes it down before anything that follows. */
static PyObject *post_guard(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *board;
    Py_buffer view;
    unsigned long long slot, state, low, high;
    if (!PyArg_ParseTuple(args, "OKKKK", &board, &slot, &state, &low, &high) || !take(board, &view, PyBUF_WRITABLE, 8, 0))
        return NULL;
    int fits = slot < (unsigned long long)(view.len / 8 / WORDS);
    if (fits) {
        uint64_t *at = (uint64_t *)view.buf + slot * WORDS;
        __atomic_store_n(&at[STATE], 0, __ATOMIC_SEQ_CST);
        if (state) {
            __atomic_store_n(&at[LOW], low, __ATOMIC_SEQ_CST);
            __atomic_store_n(&at[HIGH], high, __ATOMIC_SEQ_CST);
            __atomic_store_n(&at[STATE], state, __ATOMIC_SEQ_CST);
        }
        __atomic_thread_fence(__ATOMIC_SEQ_CST);
    }
    PyBuffer_Release(&view);
    if (!fits)
        return PyErr_Format(PyExc_ValueError, "the board has no such slot");
    Py_INCREF(Py_None);
    return Py_None;
}
