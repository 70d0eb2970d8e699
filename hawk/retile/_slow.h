/* One element, or one group, after the other: what is cut by the edge of a token range or of dim, and the rare piece whose
 * groups begin elsewhere than the source's. */
#include "_levels.h"

static uint32_t load_one(const struct work *w, int64_t s)
{
    uint32_t x;
    switch (w->src_codec) {
    case BF16: return (uint32_t)get16(w->src + s * 2) << 16;
    case FP16: return from_fp16(get16(w->src + s * 2));
    case FP32: return get32(w->src + s * 4);
    case E4M3:
    case E5M2:
    case INT8:
        x = from_small(w->src_codec, w->src[s]);
        return w->src_factor == 1 ? x : bits_of(float_of(x) * w->src_factor);
    case MXE4M3:
    case MXE5M2:
    case MXE2M1: return mx_one(w, s);
    case BFP8: return decode_one(8, w->src[s / GROUP], w->src[w->src_header + s]);
    default: return decode_one(4, w->src[s / GROUP], w->src[w->src_header + s / 2] >> (s & 1) * 4 & 15);
    }
}

/* The elements of a box that are there, in the target's order at `to`: bits that are to be copied (`width` bytes), or those
 * of fp32 numbers (0).  Others stay as they are, which is 0. */
struct filling {
    const struct work *w;
    const struct loop *loop;
    int loops, width;
    const int64_t *limit; /* lo, hi, cols */
};

static int valid(const int64_t *limit, int64_t row, int64_t col)
{
    return row >= limit[0] && row < limit[1] && col < limit[2];
}

static uint8_t *fill(const struct filling *f, int level, int64_t s, int64_t row, int64_t col, uint8_t *to)
{
    int each = f->width ? f->width : 4;
    if (level == f->loops) {
        if (!valid(f->limit, row, col))
            return to + each;
        if (f->width)
            memcpy(to, f->w->src + s * each, (size_t)each);
        else
            put32(to, load_one(f->w, s));
        return to + each;
    }
    const struct loop *l = &f->loop[level];
    int64_t last = l->ext - 1;
    if (level == f->loops - 1 && l->src == 1 && f->width && valid(f->limit, row, col) &&
        valid(f->limit, row + last * l->row, col + last * l->col)) {
        memcpy(to, f->w->src + s * each, (size_t)(l->ext * each));
        return to + l->ext * each;
    }
    for (int64_t i = 0; i < l->ext; i++)
        to = fill(f, level + 1, s + i * l->src, row + i * l->row, col + i * l->col, to);
    return to;
}

/* Whole groups that both sides form alike keep their bytes: another packer may have rounded otherwise.  `at` are the source
 * offsets of a group's elements, `index` counts the groups of the box. */
static int64_t keep(const struct filling *f, int level, int64_t s, int64_t row, int64_t col, int64_t index, uint8_t *codes,
                    uint8_t *shared)
{
    const int64_t size = group_of(f->w->dst_codec), bytes = size * BITS[f->w->dst_codec] / 8;
    int64_t inside = 1;
    for (int i = level; i < f->loops; i++)
        inside *= f->loop[i].ext;
    if (inside == size) {
        int64_t run = 1, cols = 0;
        for (int i = f->loops - 1; i >= level; i--) {
            cols += (f->loop[i].ext - 1) * f->loop[i].col;
            if (f->loop[i].src != run && f->loop[i].ext > 1)
                return index + 1;
            run *= f->loop[i].ext;
        }
        if (s % size == 0 && valid(f->limit, row, col) && valid(f->limit, row, col + cols)) {
            memcpy(codes + index * bytes, f->w->src + f->w->src_header + s * BITS[f->w->src_codec] / 8, (size_t)bytes);
            shared[index] = f->w->src[s / size];
        }
        return index + 1;
    }
    const struct loop *l = &f->loop[level];
    for (int64_t i = 0; i < l->ext; i++)
        index = keep(f, level + 1, s + i * l->src, row + i * l->row, col + i * l->col, index, codes, shared);
    return index;
}

/* The rows from `lo` on out of an image of the box, and nothing of the others. */
static const uint8_t *drain(const struct filling *f, int level, int64_t d, int64_t row, const uint8_t *codes,
                            const uint8_t *image, const uint8_t *shared, int64_t unit, int from)
{
    const struct work *w = f->w;
    const int64_t bits = BITS[w->dst_codec], size = group_of(w->dst_codec);
    if (level == from) {
        if (row >= f->limit[0]) {
            memcpy(w->dst + w->dst_header + d * bits / 8, codes, (size_t)(unit * bits / 8));
            if (size > 1)
                memcpy(w->dst + d / size, shared + (codes - image) * 8 / bits / size, (size_t)(unit / size));
        }
        return codes + unit * bits / 8;
    }
    const struct loop *l = &f->loop[level];
    for (int64_t i = 0; i < l->ext; i++)
        codes = drain(f, level + 1, d + i * l->dst, row + i * l->row, codes, image, shared, unit, from);
    return codes;
}
