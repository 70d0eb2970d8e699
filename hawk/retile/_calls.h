/* Calls of a library that was loaded by name, one after the other, without the interpreter lock in between.
 *
 * Each is a row of words: what to do with its result, the function's address, then its arguments.  Whole numbers and pointers
 * take a word of 64 bits each, in registers as on the stack, on the machines that HAWK runs on (System V for x86-64, AAPCS64),
 * and one that takes fewer leaves the rest alone.
 */
#include <errno.h>
#include <time.h>

enum { CALL_ONCE, CALL_UNTIL };
enum { CALL_ARGUMENTS = 11, CALL_WORDS = 2 + CALL_ARGUMENTS };

typedef int (*called)(uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t,
                      uint64_t);

static int call_row(const uint64_t *row)
{
    const uint64_t *a = row + 2;
    return ((called)(uintptr_t)row[1])(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10]);
}

static int64_t call_clock(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* CALL_UNTIL: again and again while the result is argument 1: for argument 2 nanoseconds at once, then with pauses of
 * argument 3, or the part of the time so far that argument 5 is the divisor of, where that is longer, until argument 4
 * nanoseconds have passed; then it is given up, which is no fault.  The function has one argument.
 */
static int call_until(const uint64_t *row)
{
    const uint64_t *a = row + 2;
    const int64_t began = call_clock();
    int found;
    while ((found = call_row(row)) == (int)a[1]) {
        const int64_t spent = call_clock() - began;
        if (spent >= (int64_t)a[4])
            return 0;
        if (spent >= (int64_t)a[2]) {
            const int64_t part = spent / (int64_t)a[5], pause = part > (int64_t)a[3] ? part : (int64_t)a[3];
            struct timespec nap = {(time_t)(pause / 1000000000), (long)(pause % 1000000000)};
            nanosleep(&nap, NULL);
        }
    }
    return found;
}

static PyObject *calls(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *rows;
    Py_buffer view;
    if (!PyArg_ParseTuple(args, "O", &rows) || !take(rows, &view, PyBUF_SIMPLE, 8, 0))
        return NULL;
    const uint64_t *words = view.buf;
    const Py_ssize_t count = view.len / (8 * CALL_WORDS);
    Py_ssize_t at = 0;
    int found = 0;
    Py_BEGIN_ALLOW_THREADS
    for (; at < count; at++, words += CALL_WORDS) {
        found = words[0] == CALL_UNTIL ? call_until(words) : call_row(words);
        if (found)
            break;
    }
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&view);
    if (!found)
        Py_RETURN_NONE;
    return Py_BuildValue("ni", at, found);
}
