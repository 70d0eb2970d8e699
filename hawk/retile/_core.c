/* The C core of the CPU retile: the program of `program.py`, executed without the interpreter lock.
 *
 * A piece is a nest of loops.  The innermost ones form a *unit* that a kernel handles at once: a contiguous run, two
 * runs woven into one, or a group of 16 elements that share an exponent.  Pieces without a partial row or column go
 * through the kernels alone; in the others each unit is looked at, and only those cut in two go element by element.
 * Codecs are those of `layouts/codecs.py`, bit for bit.
 *
 * Stable ABI of Python 3.11, C11, gcc or clang; one build runs on every CPU of its architecture.
 */
#define PY_SSIZE_T_CLEAN
#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030b0000
#endif
#include <Python.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define ALWAYS inline __attribute__((always_inline))
#define MAX_LOOPS 16
#define GROUP 16

enum { BF16, FP16, FP32, BFP8, BFP4, CODECS };
enum { SRC_CHANNEL, SRC_PAGE, SRC_START, DST_CHANNEL, DST_PAGE, DST_START, LO, HI, COLS, COLUMNS };
enum { CHECK_ONLY = 1, STREAM = 2 };

static const int BITS[CODECS] = {16, 16, 32, 8, 4};

struct loop {
    int64_t ext, src, dst, row, col;
};

/* What a kernel needs: the two pages, and the unit. */
struct work {
    const uint8_t *src;
    uint8_t *dst;
    int64_t src_header, dst_header;
    int src_codec, dst_codec, width; /* width: bytes of an element where both codecs are the same */
    int stream;                      /* the target's words are aligned and go past the caches */
    int64_t unit;                    /* elements of a unit */
    int64_t us, ud;                  /* the unit's strides; us is 0 where it has more than one */
    int64_t apart;                   /* distance of the two source runs of a woven unit, else 0 */
    int64_t at[GROUP], col[GROUP];   /* source offsets and dims of a group's elements */
};

typedef void (*kernel)(const struct work *, int64_t s, int64_t d, int64_t n, int64_t ss, int64_t ds);

/* A nest whose innermost loops are a unit, the next one `rows`, and the rest `outer`. */
struct nest {
    int outer;
    struct loop loop[MAX_LOOPS], rows;
    struct loop in[5]; /* the loops of the unit, for the slow way */
    int inner;
    int64_t unit_col, unit_row; /* largest steps within a unit */
    struct work work;
    kernel run;
};

/* -- elements ------------------------------------------------------------------------------------------------ */

static ALWAYS uint16_t get16(const void *p) { uint16_t x; memcpy(&x, p, 2); return x; }
static ALWAYS uint32_t get32(const void *p) { uint32_t x; memcpy(&x, p, 4); return x; }
static ALWAYS void put16(void *p, uint16_t x) { memcpy(p, &x, 2); }
static ALWAYS void put32(void *p, uint32_t x) { memcpy(p, &x, 4); }

static ALWAYS uint32_t to_bf16(uint32_t x)
{
    uint32_t rounded = (x + 0x7fff + (x >> 16 & 1)) >> 16;
    return (x & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded;
}

static ALWAYS uint32_t from_fp16(uint32_t x)
{
    uint32_t sign = (x & 0x8000) << 16, e = x >> 10 & 31, m = x & 0x3ff;
    if (e == 31)
        return sign | 0x7f800000 | m << 13;
    if (e)
        return sign | (e + 112) << 23 | m << 13;
    if (!m)
        return sign;
    int up = __builtin_clz(m) - 21; /* brings the leading 1 to bit 10 */
    return sign | (uint32_t)(113 - up) << 23 | (m << up & 0x3ff) << 13;
}

static ALWAYS uint32_t to_fp16(uint32_t x)
{
    uint32_t sign = x >> 16 & 0x8000, size = x & 0x7fffffff, e = size >> 23;
    if (size > 0x7f800000)
        return 0x7e00;
    if (e >= 143)
        return sign | 0x7c00;
    uint32_t sig = (size & 0x7fffff) | 0x800000, drop = e >= 113 ? 13 : 126 - e < 25 ? 126 - e : 25;
    uint32_t kept = sig >> drop, rest = sig & ((1u << drop) - 1), half = 1u << (drop - 1);
    kept += rest > half || (rest == half && (kept & 1));
    /* A normal significand brings its hidden 1 along, which adds one to the exponent's field. */
    return sign | (e >= 113 ? ((e - 113) << 10) + kept : kept);
}

/* +-m * 2^(E - 126 - bits) of a sign-and-magnitude code. */
static ALWAYS uint32_t decode_one(int bits, uint32_t exponent, uint32_t code)
{
    int keep = bits - 1;
    uint32_t m = code & ((1u << keep) - 1), sign = code >> keep << 31;
    if (!m)
        return sign;
    int top = 31 - __builtin_clz(m), e = (int)exponent + 1 - keep + top;
    if (e >= 255)
        return sign | 0x7f800000;
    if (e <= 0)
        return sign | m << (exponent + 23 - (uint32_t)keep);
    return sign | (uint32_t)e << 23 | (m << (23 - top) & 0x7fffff);
}

/* The aligned group at position `s`, without branches where no value is denormal. */
static ALWAYS void decode_group(const struct work *w, int bits, int64_t s, uint32_t *y)
{
    const uint8_t *from = w->src + w->src_header + s * bits / 8;
    uint32_t exponent = w->src[s / GROUP], code[GROUP];
    int keep = bits - 1;
    for (int k = 0; k < GROUP; k++)
        code[k] = bits == 8 ? from[k] : from[k / 2] >> (k & 1) * 4 & 15;
    if ((int)exponent < keep) { /* the smallest magnitude would be denormal */
        for (int k = 0; k < GROUP; k++)
            y[k] = decode_one(bits, exponent, code[k]);
        return;
    }
    int32_t scale = ((int32_t)exponent - 126 - keep) * (1 << 23);
    for (int k = 0; k < GROUP; k++) {
        uint32_t m = code[k] & ((1u << keep) - 1), bits32;
        float value = (float)(int32_t)m; /* exact; the scale is added to its exponent as an integer */
        memcpy(&bits32, &value, 4);
        bits32 += (uint32_t)scale;
        bits32 = bits32 < 0x7f800000 ? bits32 : 0x7f800000;
        y[k] = (m ? bits32 : 0) | code[k] >> keep << 31;
    }
}

/* -- kernels, once for each instruction set -------------------------------------------------------------------- */

#define FN(name) name##_baseline
#define TARGET
#include "_kernels.h"
#undef FN
#undef TARGET

#if defined(__x86_64__)
#define FN(name) name##_avx2
#define TARGET __attribute__((target("avx2")))
#define WITH_AVX2
#include "_kernels.h"
#undef FN
#undef TARGET
#undef WITH_AVX2
#include "_avx512.h"
#define PICK(name) (level_of >= AVX2 ? name##_avx2 : name##_baseline)
#define PICK512(name) (level_of >= AVX512 ? name##_avx512 : PICK(name))
#else
#define PICK(name) name##_baseline
#define PICK512(name) name##_baseline
#endif

enum { BASELINE, AVX2, AVX512 };
static int level_of;
static const char *const LEVELS[] = {"baseline", "avx2", "avx512"};

static int detect(void)
{
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx2"))
        return AVX512;
    if (__builtin_cpu_supports("avx2"))
        return AVX2;
#endif
    return BASELINE;
}

/* -- the slow way: units cut in two, and pairs of codecs without a kernel ------------------------------------------ */

static uint32_t load_one(const struct work *w, int64_t s)
{
    switch (w->src_codec) {
    case BF16: return (uint32_t)get16(w->src + s * 2) << 16;
    case FP16: return from_fp16(get16(w->src + s * 2));
    case FP32: return get32(w->src + s * 4);
    case BFP8: return decode_one(8, w->src[s / GROUP], w->src[w->src_header + s]);
    default: return decode_one(4, w->src[s / GROUP], w->src[w->src_header + s / 2] >> (s & 1) * 4 & 15);
    }
}

static void store_one(const struct work *w, int64_t d, uint32_t x)
{
    switch (w->dst_codec) {
    case BF16: put16(w->dst + d * 2, (uint16_t)to_bf16(x)); break;
    case FP16: put16(w->dst + d * 2, (uint16_t)to_fp16(x)); break;
    default: put32(w->dst + d * 4, x); break;
    }
}

/* One element of an elementwise target, or zero. */
static void element(const struct work *w, int64_t s, int64_t d, int valid)
{
    int bytes = BITS[w->dst_codec] / 8;
    if (!valid)
        memset(w->dst + d * bytes, 0, (size_t)bytes);
    else if (w->src_codec == w->dst_codec)
        memcpy(w->dst + d * bytes, w->src + s * bytes, (size_t)bytes);
    else
        store_one(w, d, load_one(w, s));
}

/* One group of a grouped target; elements from dim `cols` on are zero. */
static void group(const struct work *w, int64_t s, int64_t d, int64_t cols)
{
    uint32_t x[GROUP];
    int bits = BITS[w->dst_codec];
    for (int k = 0; k < GROUP; k++)
        x[k] = w->col[k] < cols ? load_one(w, s + w->at[k]) : 0;
    encode_baseline(x, bits, w->dst + w->dst_header + d * bits / 8, w->dst + d / GROUP);
}

/* Grouped to grouped.  Whole groups that both sides form alike keep their bytes: another packer may have rounded
 * otherwise. */
static void regroup(const struct work *w, int64_t s, int64_t d, int64_t n, int64_t ss, int64_t ds)
{
    int64_t bits = BITS[w->dst_codec];
    for (; n > 0; n--, s += ss, d += ds) {
        if (w->src_codec == w->dst_codec && w->us == 1 && s % GROUP == 0) {
            memcpy(w->dst + w->dst_header + d * bits / 8, w->src + w->src_header + s * bits / 8, (size_t)(2 * bits));
            w->dst[d / GROUP] = w->src[s / GROUP];
        } else {
            group(w, s, d, INT64_MAX);
        }
    }
}

static void decode_strided(const struct work *w, int64_t s, int64_t d, int64_t n, int64_t ss, int64_t ds)
{
    for (; n > 0; n--, s += ss, d += ds)
        for (int64_t i = 0; i < w->unit; i++)
            store_one(w, d + i * w->ud, load_one(w, s + i * w->us));
}

/* Elements of a cut unit: `level` counts its loops from the outermost. */
static void scatter(const struct nest *t, int level, int64_t s, int64_t d, int64_t row, int64_t col, const int64_t *limit)
{
    if (level == t->inner) {
        if (row >= limit[0])
            element(&t->work, s, d, row < limit[1] && col < limit[2]);
        return;
    }
    const struct loop *l = &t->in[level];
    for (int64_t i = 0; i < l->ext; i++)
        scatter(t, level + 1, s + i * l->src, d + i * l->dst, row + i * l->row, col + i * l->col, limit);
}

/* -- a nest ---------------------------------------------------------------------------------------------------- */

static int chains(const struct loop *a, const struct loop *b, int whole)
{
    if (a->src != b->src * b->ext || a->dst != b->dst * b->ext)
        return 0;
    return whole || (a->row == b->row * b->ext && a->col == b->col * b->ext);
}

static kernel choose(const struct work *w, int woven)
{
    int a = w->src_codec, b = w->dst_codec, run = w->us == 1 && w->ud == 1;
    if (b >= BFP8) {
        if (a >= BFP8)
            return regroup;
        if (a == BF16)
            return b == BFP8 ? PICK512(bf16_to_bfp8) : PICK512(bf16_to_bfp4);
        if (a == FP16)
            return b == BFP8 ? PICK(fp16_to_bfp8) : PICK(fp16_to_bfp4);
        return b == BFP8 ? PICK(fp32_to_bfp8) : PICK(fp32_to_bfp4);
    }
    if (a == b)
        return woven ? PICK(weave_run) : run ? PICK(copy_run) : PICK(copy_strided);
    if (a == BF16)
        return b == FP32 ? PICK(bf16_to_fp32) : PICK(bf16_to_fp16);
    if (a == FP32)
        return b == BF16 ? PICK(fp32_to_bf16) : PICK(fp32_to_fp16);
    if (a == FP16)
        return b == BF16 ? PICK(fp16_to_bf16) : PICK(fp16_to_fp32);
    return decode_strided;
}

/* Kernel for whole aligned groups of the source that are contiguous in both pages; else NULL. */
static kernel choose_groups(const struct work *w)
{
    if (w->src_codec < BFP8 || w->us != 1 || w->ud != 1 || w->unit % GROUP)
        return NULL;
    if (w->dst_codec == BF16)
        return w->src_codec == BFP8 ? PICK(bfp8_to_bf16) : PICK(bfp4_to_bf16);
    if (w->dst_codec == FP32)
        return w->src_codec == BFP8 ? PICK(bfp8_to_fp32) : PICK(bfp4_to_fp32);
    return NULL;
}

/* Lay out `t` from `n` loops; `whole` for pieces without partial rows and columns.  0 where they do not fit. */
static int build(struct nest *t, const struct loop *loops, int n, int whole, const struct work *facts)
{
    struct loop l[MAX_LOOPS + 2];
    int count = 0;
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
    struct work *w = &t->work;
    *w = *facts;
    int inner = 0, woven = 0;
    if (w->dst_codec >= BFP8) {
        int64_t filled = 1;
        while (filled < GROUP) {
            if (inner == count || inner == 4)
                return 0;
            struct loop *last = &l[count - 1 - inner];
            if (last->dst != filled || last->row)
                return 0;
            if (filled * last->ext > GROUP) {
                /* Cut the loop in two: the lower part fills the group. */
                int64_t low = GROUP / filled;
                if (last->ext % low || count > MAX_LOOPS)
                    return 0;
                memmove(last + 1, last, (size_t)(inner + 1) * sizeof *last);
                count++;
                last[1].ext = low;
                last->ext /= low;
                last->src *= low;
                last->dst *= low;
                last->row *= low;
                last->col *= low;
                filled = GROUP;
            } else {
                filled *= last->ext;
            }
            inner++;
        }
        if (filled != GROUP)
            return 0;
        for (int i = 0; i < count - inner; i++)
            if (l[i].dst % GROUP)
                return 0;
        for (int k = 0; k < GROUP; k++) {
            int64_t rest = k;
            w->at[k] = w->col[k] = 0;
            for (int i = count - 1; i >= count - inner; i--) {
                w->at[k] += rest % l[i].ext * l[i].src;
                w->col[k] += rest % l[i].ext * l[i].col;
                rest /= l[i].ext;
            }
        }
        w->unit = GROUP;
        int run = 1, weave = 1;
        for (int k = 0; k < GROUP; k++) {
            run &= w->at[k] == k;
            weave &= w->at[k] == k / 2 + (k & 1) * w->at[1];
        }
        w->us = run;
        w->apart = !run && weave ? w->at[1] : 0;
    } else {
        struct loop *last = &l[count - 1];
        inner = count ? 1 : 0;
        w->unit = count ? last->ext : 1;
        w->us = count ? last->src : 1;
        w->ud = count ? last->dst : 1;
        w->apart = 0;
        if (count > 1 && w->src_codec == w->dst_codec && w->width == 2 && last->ext == 2 && last->dst == 1 &&
            last[-1].src == 1 && last[-1].dst == 2) {
            woven = 1;
            inner = 2;
            w->apart = last->src;
            w->unit = 2 * last[-1].ext;
            w->us = 0;
        }
    }
    t->inner = inner;
    t->unit_row = t->unit_col = 0;
    for (int i = 0; i < inner; i++) {
        t->in[i] = l[count - inner + i];
        t->unit_row += (t->in[i].ext - 1) * t->in[i].row;
        t->unit_col += (t->in[i].ext - 1) * t->in[i].col;
    }
    count -= inner;
    t->rows = (struct loop){1, 0, 0, 0, 0};
    if (count)
        t->rows = l[--count];
    if (count > MAX_LOOPS)
        return 0;
    memcpy(t->loop, l, (size_t)count * sizeof *l);
    t->outer = count;
    t->run = choose(w, woven);
    return 1;
}

static void walk(const struct nest *t, int level, int64_t s, int64_t d)
{
    if (level == t->outer) {
        t->run(&t->work, s, d, t->rows.ext, t->rows.src, t->rows.dst);
        return;
    }
    const struct loop *l = &t->loop[level];
    for (int64_t i = 0; i < l->ext; i++, s += l->src, d += l->dst)
        walk(t, level + 1, s, d);
}

/* The same for a partial piece; `limit` is lo, hi and cols. */
static void walk_partial(const struct nest *t, int level, int64_t s, int64_t d, int64_t row, int64_t col, const int64_t *limit)
{
    if (level <= t->outer) {
        const struct loop *l = level < t->outer ? &t->loop[level] : &t->rows;
        for (int64_t i = 0; i < l->ext; i++)
            walk_partial(t, level + 1, s + i * l->src, d + i * l->dst, row + i * l->row, col + i * l->col, limit);
        return;
    }
    if (row + t->unit_row < limit[0])
        return;
    if (row >= limit[0] && row + t->unit_row < limit[1] && col + t->unit_col < limit[2])
        t->run(&t->work, s, d, 1, 0, 0);
    else if (t->work.dst_codec >= BFP8)
        group(&t->work, s, d, row < limit[1] ? limit[2] - col : INT64_MIN);
    else
        scatter(t, 0, s, d, row, col, limit);
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

/* -- a call ----------------------------------------------------------------------------------------------------- */

struct call {
    struct nest whole, partial;
    struct loop loop[MAX_LOOPS];
    int loops, channels_in, channels_out;
    int64_t src_elements, dst_elements, src_page, dst_page, last_src, last_dst, last_row, last_col;
    const int64_t *column[COLUMNS];
    Py_buffer *src, *dst;
};

static int64_t header_bytes(int codec, int64_t elements) { return codec >= BFP8 ? elements / GROUP : 0; }

static int is_whole(const struct call *c, int64_t i)
{
    return c->column[LO][i] <= 0 && c->column[HI][i] > c->last_row && c->column[COLS][i] > c->last_col;
}

/* Source lines of a whole piece, as byte offsets from its first element; `lines` is 0 where the hardware sees far
 * enough ahead by itself, because the runs are long. */
#define MAX_LINES 96
struct ahead {
    int lines;
    int64_t at[MAX_LINES];
};

static void look_ahead(struct ahead *a, const struct call *c)
{
    struct loop l[MAX_LOOPS];
    int n = 0, bits = BITS[c->whole.work.src_codec];
    a->lines = 0;
    for (int i = 0; i < c->loops; i++) { /* by source stride, smallest first */
        if (c->loop[i].ext == 1)
            continue;
        int k = n++;
        for (; k > 0 && l[k - 1].src > c->loop[i].src; k--)
            l[k] = l[k - 1];
        l[k] = c->loop[i];
    }
    int64_t run = 1, lines = 1;
    int first = 0;
    while (first < n && l[first].src == run)
        run *= l[first++].ext;
    int64_t bytes = run * bits / 8;
    if (bytes > 1024 || n == first)
        return;
    lines = (bytes + 63) / 64;
    for (int i = first; i < n; i++)
        if (__builtin_mul_overflow(lines, l[i].ext, &lines) || lines > MAX_LINES)
            return;
    for (int64_t k = 0; k < lines; k++) {
        int64_t rest = k / ((bytes + 63) / 64), at = k % ((bytes + 63) / 64) * 64;
        for (int i = first; i < n; i++) {
            at += rest % l[i].ext * l[i].src * bits / 8;
            rest /= l[i].ext;
        }
        a->at[k] = at;
    }
    a->lines = (int)lines;
}

struct misfit {
    int64_t piece, column, got, limit;
};

static int within(struct misfit *bad, const struct call *c, int64_t i, int column, int64_t limit)
{
    int64_t got = c->column[column][i];
    if (got >= 0 && got <= limit)
        return 1;
    *bad = (struct misfit){i, column, got, limit};
    return 0;
}

/* Does every piece in [begin, end) stay in its pages, and its pages in their channels? */
static int check(const struct call *c, int64_t begin, int64_t end, struct misfit *bad)
{
    int64_t seen[3] = {-1, -1, -1}, seen_reach = -1;
    int grouped = c->whole.work.dst_codec >= BFP8;
    for (int64_t i = begin; i < end; i++) {
        if (!within(bad, c, i, DST_CHANNEL, c->channels_out - 1) ||
            !within(bad, c, i, DST_PAGE, c->dst[c->column[DST_CHANNEL][i]].len - c->dst_page) ||
            !within(bad, c, i, DST_START, c->dst_elements - 1 - c->last_dst))
            return 0;
        if (grouped && c->column[DST_START][i] % GROUP) {
            *bad = (struct misfit){i, DST_START, c->column[DST_START][i], c->column[DST_START][i] / GROUP * GROUP};
            return 0;
        }
        int64_t far = c->last_src;
        if (!is_whole(c, i)) {
            int64_t limit[3] = {c->column[LO][i], c->column[HI][i], c->column[COLS][i]};
            if (memcmp(limit, seen, sizeof seen)) {
                memcpy(seen, limit, sizeof seen);
                seen_reach = reach(c->loop, c->loops, 0, 0, 0, limit);
            }
            far = seen_reach;
            if (far < 0)
                continue; /* reads nothing */
        }
        if (!within(bad, c, i, SRC_CHANNEL, c->channels_in - 1) ||
            !within(bad, c, i, SRC_PAGE, c->src[c->column[SRC_CHANNEL][i]].len - c->src_page) ||
            !within(bad, c, i, SRC_START, c->src_elements - 1 - far))
            return 0;
    }
    return 1;
}

/* Streaming stores pay where whole lines are filled one after the other, and long enough for a memory page to stay
 * open: does a whole piece write at least this many bytes in a row? */
#define STREAM_RUN 512

static int fills_lines(const struct call *c)
{
    int64_t filled = 1;
    for (int i = c->loops - 1; i >= 0 && (c->loop[i].dst == filled || c->loop[i].ext == 1); i--)
        filled *= c->loop[i].ext;
    return filled * BITS[c->whole.work.dst_codec] / 8 >= STREAM_RUN;
}

/* The piece must begin on a line (else two pieces share one, and each writes a part of it), its units on words. */
static int stream_fits(const struct nest *t, int64_t start)
{
    int64_t bits = BITS[t->work.dst_codec];
    if (((uintptr_t)(t->work.dst + t->work.dst_header) + (uintptr_t)(start * bits / 8)) % 64)
        return 0;
    uint64_t all = (uint64_t)((t->rows.dst | t->work.unit) * bits);
    for (int i = 0; i < t->outer; i++)
        all |= (uint64_t)(t->loop[i].dst * bits);
    return (all & 127) == 0;
}

static void prepare(struct nest *t, const struct call *c, int64_t i, int reads)
{
    t->work.dst = (uint8_t *)c->dst[c->column[DST_CHANNEL][i]].buf + c->column[DST_PAGE][i];
    t->work.src = NULL;
    if (reads)
        t->work.src = (const uint8_t *)c->src[c->column[SRC_CHANNEL][i]].buf + c->column[SRC_PAGE][i];
}

/* Pieces between a prefetch and its use. */
#ifndef AHEAD
#define AHEAD 2
#endif

static void execute(struct call *c, int64_t begin, int64_t end, int flags)
{
    struct nest *t = &c->whole;
    kernel plain = t->run, groups = choose_groups(&t->work), streamed = NULL;
#if defined(__SSE2__)
    if (flags & STREAM && fills_lines(c)) {
        if (plain == PICK(copy_run))
            streamed = PICK(stream_run);
        if (plain == PICK512(bf16_to_bfp8) || (plain == PICK(weave_run) && t->work.unit % 16 == 0))
            streamed = plain;
    }
#endif
    struct ahead ahead;
    look_ahead(&ahead, c);
    int steps_aligned = t->rows.src % GROUP == 0;
    for (int k = 0; k < t->outer; k++)
        steps_aligned &= t->loop[k].src % GROUP == 0;
    for (int64_t i = begin; i < end; i++) {
        int64_t s = c->column[SRC_START][i], d = c->column[DST_START][i];
        if (i + AHEAD < end && is_whole(c, i + AHEAD)) {
            const uint8_t *next = (const uint8_t *)c->src[c->column[SRC_CHANNEL][i + AHEAD]].buf +
                                  c->column[SRC_PAGE][i + AHEAD] + t->work.src_header +
                                  c->column[SRC_START][i + AHEAD] * BITS[t->work.src_codec] / 8;
            for (int k = 0; k < ahead.lines; k++)
                __builtin_prefetch(next + ahead.at[k], 0, 2);
        }
        if (is_whole(c, i)) {
            prepare(t, c, i, 1);
            t->run = groups && steps_aligned && s % GROUP == 0 ? groups : plain;
            t->work.stream = streamed && stream_fits(t, d);
            if (t->work.stream)
                t->run = streamed;
            walk(t, 0, s, d);
        } else {
            int64_t limit[3] = {c->column[LO][i], c->column[HI][i], c->column[COLS][i]};
            prepare(&c->partial, c, i, limit[1] > limit[0] && limit[1] > 0 && limit[2] > 0);
            walk_partial(&c->partial, 0, s, d, 0, 0, limit);
        }
    }
#if defined(__SSE2__)
    if (streamed)
        _mm_sfence();
#endif
}

/* -- Python ------------------------------------------------------------------------------------------------------- */

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
    struct call c;
    struct misfit bad = {-1, 0, 0, 0};
    memset(&c, 0, sizeof c);

    if (!take(facts_o, &views[held], PyBUF_SIMPLE, 8, 4))
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
        c.column[k] = views[held++].buf;
    }
    c.src = &views[held];
    c.dst = c.src + ins;
    for (Py_ssize_t k = 0; k < ins + outs; k++) {
        PyObject *item = k < ins ? PySequence_GetItem(src_o, k) : PySequence_GetItem(dst_o, k - ins);
        int taken = item && take(item, &views[held], k < ins ? PyBUF_SIMPLE : PyBUF_WRITABLE, 1, 0);
        Py_XDECREF(item);
        if (!taken)
            goto done;
        held++;
    }
    c.channels_in = (int)ins;
    c.channels_out = (int)outs;
    c.src_elements = facts[2];
    c.dst_elements = facts[3];
    const int64_t most = (int64_t)1 << 40; /* elements; keeps every product below in range */
    if (facts[0] < 0 || facts[0] >= CODECS || facts[1] < 0 || facts[1] >= CODECS || facts[2] < 1 || facts[2] > most ||
        facts[3] < 1 || facts[3] > most || n > MAX_LOOPS)
        goto misfit;
    for (Py_ssize_t k = 0; k < n; k++) {
        const struct loop *l = &loops[k];
        if (l->ext < 1 || l->ext > most || l->src < 0 || l->src > most || l->dst < 0 || l->dst > most || l->row < 0 ||
            l->row > most || l->col < 0 || l->col > most)
            goto misfit;
        int64_t step, *total[4] = {&c.last_src, &c.last_dst, &c.last_row, &c.last_col};
        const int64_t by[4] = {l->src, l->dst, l->row, l->col};
        for (int f = 0; f < 4; f++)
            if (__builtin_mul_overflow(l->ext - 1, by[f], &step) || __builtin_add_overflow(*total[f], step, total[f]))
                goto misfit;
        c.loop[k] = *l;
    }
    if (c.last_dst >= c.dst_elements)
        goto misfit;
    c.loops = (int)n;
    struct work w = {.src_codec = (int)facts[0], .dst_codec = (int)facts[1]};
    w.width = BITS[w.dst_codec] / 8;
    w.src_header = header_bytes(w.src_codec, facts[2]);
    w.dst_header = header_bytes(w.dst_codec, facts[3]);
    c.src_page = w.src_header + facts[2] * BITS[w.src_codec] / 8;
    c.dst_page = w.dst_header + facts[3] * BITS[w.dst_codec] / 8;
    if (!build(&c.whole, c.loop, c.loops, 1, &w) || !build(&c.partial, c.loop, c.loops, 0, &w))
        goto misfit;
    Py_BEGIN_ALLOW_THREADS
    ok = check(&c, begin, end, &bad);
    if (ok && !(flags & CHECK_ONLY))
        execute(&c, begin, end, flags);
    Py_END_ALLOW_THREADS
misfit:
    if (ok) {
        Py_INCREF(Py_None);
        result = Py_None;
    } else {
        result = Py_BuildValue("(LLLL)", (long long)bad.piece, (long long)bad.column, (long long)bad.got, (long long)bad.limit);
    }
done:
    while (held > 0)
        PyBuffer_Release(&views[--held]);
    if (views != few)
        PyMem_Free(views);
    return result;
}

/* Above this many bytes in one call, targets go past the caches. */
#define LARGE (4 << 20)

static void copy_all(const int64_t *bases, const int32_t *region, const int64_t *local, int64_t source, const int64_t *remote,
                     const int64_t *nbytes, Py_ssize_t n)
{
    uint64_t total = 0;
    for (Py_ssize_t i = 0; i < n; i++)
        total += (uint64_t)nbytes[i];
    for (Py_ssize_t i = 0; i < n; i++) {
        uint8_t *to = (uint8_t *)(uintptr_t)(bases[region[i]] + local[i]);
        const uint8_t *from = (const uint8_t *)(uintptr_t)(source + remote[i]);
#if defined(__SSE2__)
        if (total >= LARGE && nbytes[i] >= 256) {
            PICK(stream)(to, from, (size_t)nbytes[i]);
            continue;
        }
#endif
        memcpy(to, from, (size_t)nbytes[i]);
    }
#if defined(__SSE2__)
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
    int held = 0;
    Py_ssize_t n = 0;
    for (; held < 5; held++) {
        if (!take(o[held], &view[held], PyBUF_SIMPLE, word[held], held > 1 ? n : 0))
            goto done;
        if (held == 1)
            n = view[1].len / 4;
    }
    Py_BEGIN_ALLOW_THREADS
    copy_all(view[0].buf, view[1].buf, view[2].buf, source, view[3].buf, view[4].buf, n);
    Py_END_ALLOW_THREADS
    Py_INCREF(Py_None);
    result = Py_None;
done:
    while (held > 0)
        PyBuffer_Release(&view[--held]);
    return result;
}

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

static PyMethodDef methods[] = {
    {"retile", retile, METH_VARARGS, "Check, then retile pieces [begin, end)."},
    {"copy_segments", copy_segments, METH_VARARGS, "Copy segments between absolute addresses."},
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
