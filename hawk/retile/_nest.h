/* A nest of loops with a unit that a kernel handles: built from the program, and walked over a piece. */
#include "_small.h"

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

/* -- kernels, once for each instruction set -------------------------------------------------------------------- */

#define FN(name) name##_baseline
#define TARGET
#include "_kernels.h"
#undef FN
#undef TARGET

#if defined(X86)
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
#if defined(X86)
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
    case E4M3:
    case E5M2:
    case INT8: return small_fp32[w->src_codec - E4M3][w->src[s]];
    case MXE4M3:
    case MXE5M2:
    case MXE2M1: return mx_one(w, s);
    case BFP8: return decode_one(8, w->src[s / GROUP], w->src[w->src_header + s]);
    default: return decode_one(4, w->src[s / GROUP], w->src[w->src_header + s / 2] >> (s & 1) * 4 & 15);
    }
}

static void store_one(const struct work *w, int64_t d, uint32_t x)
{
    switch (w->dst_codec) {
    case BF16: put16(w->dst + d * 2, (uint16_t)to_bf16(x)); break;
    case FP16: put16(w->dst + d * 2, (uint16_t)to_fp16(x)); break;
    case FP32: put32(w->dst + d * 4, x); break;
    default: w->dst[d] = to_small(w->dst_codec, x); break;
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
    uint32_t x[MX_GROUP];
    int bits = BITS[w->dst_codec], size = group_of(w->dst_codec);
    for (int k = 0; k < size; k++)
        x[k] = w->col[k] < cols ? load_one(w, s + w->at[k]) : 0;
    if (w->dst_codec >= MXE4M3) {
        mx_encode(x, w->dst_codec, w->dst + w->dst_header + d * bits / 8, w->dst + d / MX_GROUP);
        return;
    }
    encode_baseline(x, bits, w->dst + w->dst_header + d * bits / 8, w->dst + d / GROUP);
}

/* Grouped, or of eight bits, to grouped.  Whole groups that both sides form alike keep their bytes: another packer may have rounded
 * otherwise. */
static void regroup(const struct work *w, int64_t s, int64_t d, int64_t n, int64_t ss, int64_t ds)
{
    int64_t bits = BITS[w->dst_codec], size = group_of(w->dst_codec);
    for (; n > 0; n--, s += ss, d += ds) {
        if (w->src_codec == w->dst_codec && w->us == 1 && s % size == 0) {
            memcpy(w->dst + w->dst_header + d * bits / 8, w->src + w->src_header + s * bits / 8, (size_t)(size * bits / 8));
            w->dst[d / size] = w->src[s / size];
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
        if (a >= BFP8 || is_small(a) || b >= MXE4M3)
            return regroup;
        if (a == BF16)
            return b == BFP8 ? PICK512(bf16_to_bfp8) : PICK512(bf16_to_bfp4);
        if (a == FP16)
            return b == BFP8 ? PICK(fp16_to_bfp8) : PICK(fp16_to_bfp4);
        return b == BFP8 ? PICK(fp32_to_bfp8) : PICK(fp32_to_bfp4);
    }
    if (a == b)
        return woven ? PICK(weave_run) : run ? PICK(copy_run) : PICK(copy_strided);
    if (is_small(a) || is_small(b))
        return choose_small(a, b) ? choose_small(a, b) : decode_strided;
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
    if (w->src_codec < BFP8 || w->src_codec > BFP4 || w->us != 1 || w->ud != 1 || w->unit % GROUP)
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
        int64_t filled = 1, size = group_of(w->dst_codec);
        while (filled < size) {
            if (inner == count || inner == 4)
                return 0;
            struct loop *last = &l[count - 1 - inner];
            if (last->dst != filled || last->row)
                return 0;
            if (filled * last->ext > size) {
                /* Cut the loop in two: the lower part fills the group. */
                int64_t low = size / filled;
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
                filled = size;
            } else {
                filled *= last->ext;
            }
            inner++;
        }
        if (filled != size)
            return 0;
        for (int i = 0; i < count - inner; i++)
            if (l[i].dst % size)
                return 0;
        for (int k = 0; k < size; k++) {
            int64_t rest = k;
            w->at[k] = w->col[k] = 0;
            for (int i = count - 1; i >= count - inner; i--) {
                w->at[k] += rest % l[i].ext * l[i].src;
                w->col[k] += rest % l[i].ext * l[i].col;
                rest /= l[i].ext;
            }
        }
        w->unit = size;
        int run = 1, weave = 1;
        for (int k = 0; k < size; k++) {
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
