/* What a nest is carried out with, once for every instruction set, and which of these this CPU has. */
#include "_small.h"

/* Elements that are binary32 at a time: they stay in the first-level cache. */
#define CHUNK 512

/* Runs of a box, and how many of them ahead their lines are asked for. */
#define MAX_RUNS 512
#define LEAD 8
/* The same of long runs that go past the caches. */
#define FAR_BYTES 4096

typedef uint8_t v1 __attribute__((vector_size(16)));
typedef uint16_t v2 __attribute__((vector_size(16)));
typedef uint32_t v4 __attribute__((vector_size(16)));
typedef uint64_t v8 __attribute__((vector_size(16)));

/* How a mover goes through a box; offsets in bytes. */
struct move {
    void (*run)(const struct move *, const uint8_t *from, uint8_t *to);
    int64_t runs, na, nb, bytes; /* bytes of a contiguous run */
    int64_t from_step, to_step;  /* elements, of a strided mover */
    int far;                     /* whether lines are to be asked for ahead of their use: nobody else does */
    int paired;                  /* whether runs 2k and 2k + 1 follow each other in the source */
    int lined;                   /* whether, besides, runs 8k, 8k + 2, + 4, + 6 and those between fill 64 elements each */
    int64_t src_at[MAX_RUNS + LEAD], dst_at[MAX_RUNS], a_at[MAX_RUNS], b_at[MAX_RUNS];
};

/* Lines that are asked for while others are written: one for each of these, at `at[k]` bytes behind `from`; without `at` one after
 * the other. */
struct soon {
    const uint8_t *from;
    const int32_t *at;
};

/* How lines are made of parts of the source, one by one or in pairs; offsets in bytes. */
struct lines {
    void (*run)(const struct lines *, const uint8_t *const *from, uint8_t *to, const struct soon *ahead, int past);
    int of[4];               /* the piece that a part is of, where several are moved together */
    int64_t part[4], second; /* second: of a pair, from the first */
    int64_t beside;          /* the same pair of the two pieces behind these, from this one; 0 for none */
    int64_t count, at[MAX_RUNS], to[MAX_RUNS];
    uint16_t index[2][32]; /* words of the parts */
    /* Of lines that are columns of the source: the rows that a column is of, for a line or two beside each other, and where the
     * lines of 16 columns go. */
    int pieces, sets, row_of[64];
    int64_t row[64], column[16];
};

typedef void (*liner)(const struct lines *, const uint8_t *const *from, uint8_t *to, const struct soon *ahead, int past);
typedef void (*mover)(const struct move *, const uint8_t *from, uint8_t *to);
typedef void (*reader)(const uint8_t *from, const uint8_t *shared, int64_t n, u32 *restrict x);
typedef void (*writer)(const u32 *restrict x, int64_t n, uint8_t *to, uint8_t *shared);
typedef void (*pair)(const uint8_t *from, const uint8_t *from_shared, int64_t n, uint8_t *to, uint8_t *to_shared);
typedef void (*fusion)(const struct move *, const uint8_t *from, uint8_t *to, uint8_t *shared, int past);
typedef void (*fission)(const struct move *, const uint8_t *codes, const uint8_t *shared, uint8_t *to);
typedef void (*scaler)(u32 *restrict x, int64_t n, float by);

/* What the mantissas of bf16 become that are divided by a scale; see `_lanes_scaled.h`. */
struct divisor {
    uint16_t words[128];
    int shift, carried;
};

typedef void (*divider)(const struct divisor *by, const uint8_t *from, int64_t n, uint8_t *to);
typedef void (*looker)(const uint8_t *from, int64_t n, uint8_t *to, const uint8_t (*bytes)[256]);

struct converters {
    reader read[CODECS];
    writer write[CODECS];
    pair direct[CODECS][CODECS];
    fusion fused[CODECS][2][2]; /* in runs of a group or woven ones, into BFP8 and BFP4 */
    fission parted[2][2];       /* of BFP8 and BFP4 into bf16, in runs of a group or halves of it */
    divider divided[SMALLS]; /* bf16 by a scale */
    scaler multiply, divide;
};

/* By width: 1, 2 and 4 bytes; of twos and of fours.  Lines of two parts, of four, and pairs sorted from two lines
 * of the source or from four halves, once and twice, lines as they are, and those of a column or of halves of two; or NULL. */
struct movers {
    liner lines[8];
    mover runs, strided[3], gather[3], transpose[3], weave[2][3], unweave[2][3];
};

#define FN(name) name##_baseline
#define TARGET
#include "_convert.h"
#include "_move.h"
#if defined(X86)
#include "_stream.h"
#endif
#undef FN
#undef TARGET

#if defined(X86)
#define BFP_WRITERS
#define WITH_AVX2
#define FN(name) name##_avx2
#define TARGET __attribute__((target("avx2")))
#include "_bfp.h"
#include "_convert.h"
#include "_move.h"
#include "_stream.h"
#undef FN
#undef TARGET

#define WITH_AVX512
#define FN(name) name##_avx512
#if defined(__clang__)
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2")))
#else
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,prefer-vector-width=512")))
#endif
#include "_bfp.h"
#include "_convert.h"
#include "_lines.h"
#include "_move.h"
#include "_stream.h"
#undef FN
#undef TARGET
#define PICK(name) (level_of == AVX512 ? name##_avx512 : level_of == AVX2 ? name##_avx2 : name##_baseline)
#else
#define PICK(name) name##_baseline
#endif

enum { BASELINE, AVX2, AVX512 };
static int level_of, looks_up_bytes;
static const char *const LEVELS[] = {"baseline", "avx2", "avx512"};

static int detect(void)
{
#if defined(X86)
    __builtin_cpu_init();
    looks_up_bytes = __builtin_cpu_supports("avx512vbmi");
    if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx2"))
        return AVX512;
    if (__builtin_cpu_supports("avx2"))
        return AVX2;
#endif
    return BASELINE;
}

static const struct converters *converters(void) { return PICK(&converters); }
static const struct movers *movers(void) { return PICK(&movers); }

/* -- any codec into any other -------------------------------------------------------------------------------------- */

struct conversion {
    int from, to;
    float from_factor, to_factor;
    pair direct, first, second; /* first and second: by way of bf16 */
    looker look;                /* what each code becomes, */
    uint8_t bytes[2][256];
    divider divide;             /* or each mantissa */
    struct divisor by;
};

/* Whether a conversion by way of bf16 rounds once: bf16 holds what is read exactly, and of blocks under a scale, which may hold
 * less than its denormals, all that `to` tells apart. */
static int through_bf16(int from, int to)
{
    return from >= E4M3 && from != to && !(from >= MXE4M3 && (to >= MXE4M3 || to == FP32)) && !(from == INT8 && to == FP32);
}

/* `n` contiguous elements, whole groups of either side. */
static void convert(const struct conversion *c, const uint8_t *from, const uint8_t *from_shared, int64_t n, uint8_t *to,
                    uint8_t *to_shared)
{
    if (c->direct) {
        c->direct(from, from_shared, n, to, to_shared);
        return;
    }
    if (c->look) {
        c->look(from, n, to, c->bytes);
        return;
    }
    if (c->divide) {
        c->divide(&c->by, from, n, to);
        return;
    }
    const struct converters *use = converters();
    uint32_t x[CHUNK];
    for (int64_t i = 0; i < n; i += CHUNK) {
        int64_t some = n - i < CHUNK ? n - i : CHUNK;
        if (c->first) {
            uint8_t *mid = (uint8_t *)(void *)x;
            c->first(from + i * BITS[c->from] / 8, from_shared + i / group_of(c->from), some, mid, NULL);
            c->second(mid, NULL, some, to + i * BITS[c->to] / 8, to_shared + i / group_of(c->to));
            continue;
        }
        use->read[c->from](from + i * BITS[c->from] / 8, from_shared + i / group_of(c->from), some, x);
        if (c->from_factor != 1)
            use->multiply(x, some, c->from_factor);
        if (c->to_factor != 1)
            use->divide(x, some, c->to_factor);
        use->write[c->to](x, some, to + i * BITS[c->to] / 8, to_shared + i / group_of(c->to));
    }
}

#if defined(X86)
/* What each of 256 codes becomes, found as `convert` finds it. */
static void plan_look(struct conversion *c)
{
    uint8_t code[256];
    uint16_t words[256] = {0};
    const int width = BITS[c->to] / 8;
    for (int k = 0; k < 256; k++)
        code[k] = (uint8_t)k;
    convert(c, code, NULL, 256, (uint8_t *)words, NULL);
    for (int k = 0; k < 256; k++)
        for (int half = 0; half < width; half++)
            c->bytes[half][k] = ((const uint8_t *)words)[width * k + half];
    c->look = width == 1 ? look_up_bytes : look_up_words;
}

/* The same of 128 mantissas, of which exponents then are added: those of quotients in the middle of the range. */
static void plan_divide(struct conversion *c)
{
    struct divisor *by = &c->by;
    by->carried = 128;
    for (uint32_t m = 0; m < 128; m++) {
        uint32_t q = bits_of(float_of(127u << 23 | m << 16) / c->to_factor), rest = q & 0xffff;
        if (m == 0)
            by->shift = 133 + 127 - (int)(q >> 23);
        else if (by->carried == 128 && 133 + 127 - (int)(q >> 23) != by->shift)
            by->carried = (int)m;
        by->words[m] = (uint16_t)(c->to == INT8 ? ((q >> 16 & 0x7f) | 0x80) << 8 | (rest != 0) << 7
                                                : (q >> 16 | (rest != 0)) - (127u << 7));
    }
    c->divide = converters()->divided[c->to - E4M3];
}
#endif

static struct conversion conversion(int from, int to, float from_factor, float to_factor)
{
    struct conversion c = {.from = from, .to = to, .from_factor = from_factor, .to_factor = to_factor};
    const struct converters *use = converters();
    const int small = to >= E4M3 && to <= INT8;
    if (from_factor == 1 && to_factor == 1) {
        c.direct = use->direct[from][to];
        if (through_bf16(from, to) && use->direct[BF16][to]) {
            c.first = use->direct[from][BF16];
            c.second = use->direct[BF16][to];
        }
    }
#if defined(X86)
    if (!c.direct && level_of == AVX512 && looks_up_bytes && from >= E4M3 && from <= INT8 && (small || to == BF16 || to == FP16))
        plan_look(&c);
    if (from == BF16 && small && to_factor != 1 && to_factor > 0x1p-60f && to_factor < 0x1p60f && use->divided[to - E4M3])
        plan_divide(&c);
#else
    (void)small;
#endif
    return c;
}
