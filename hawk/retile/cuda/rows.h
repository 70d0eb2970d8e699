/* What happens to rows between the programs that read them and those that write them, as `hawk/retile/rows.py` has it:
 * values are multiplied by the source's scales, the target's are made of them or spread, values are divided by these.
 *
 * A block of threads has one *box*: the elements under one scale of the target, or, where it has none, some in a row.
 * The table holds numbers of 64 bits: facts that hold for all steps, some for each tensor that is read, then addresses of
 * each step.  Their order is that of `HEAD`, `READ` and `STEP` in `hawk/retile/cuda/through.py`.
 */

struct args { u64 table; u32 steps, more; };

#define FACT(i) LOOK(fact + (i))

struct spot { u32 block, head, slot, dim; };

FN struct spot spot_of(const i64 *fact, u32 box, u32 element)
{
    struct spot p;
    if (FACT(RULE) == NONE) {
        u32 at = box * (u32)FACT(EACH) + element;
        p.dim = at % (u32)FACT(DIM), at /= (u32)FACT(DIM);
        p.slot = at % (u32)FACT(SLOTS), at /= (u32)FACT(SLOTS);
        p.head = at % (u32)FACT(HEADS), p.block = at / (u32)FACT(HEADS);
        return p;
    }
    const u32 d = (u32)FACT(BOX_DIM), s = (u32)FACT(BOX_SLOTS), h = (u32)FACT(BOX_HEADS);
    p.dim = element % d, element /= d;
    p.slot = element % s, element /= s;
    p.head = element % h, p.block = element / h;
    const u32 across = (u32)FACT(DIM) / d, down = (u32)FACT(SLOTS) / s, deep = (u32)FACT(HEADS) / h;
    p.dim += box % across * d, box /= across;
    p.slot += box % down * s, box /= down;
    p.head += box % deep * h, p.block += box / deep * (u32)FACT(BOX_BLOCKS);
    return p;
}

struct seen { u32 bits, scale, times; u64 most; };

/* An element as it was read, what its source's codec and scales multiply it by, whether that is still to be done, and the
 * largest number of its codec. */
FN struct seen seen_at(const i64 *fact, const i64 *step, struct spot p)
{
    struct seen found;
    const i64 *read = fact + HEAD, *places = step + STEP;
    u32 dim = p.dim + (u32)FACT(FIRST);
    while (dim >= (u32)(LOOK(read + READ_FIRST) + LOOK(read + READ_DIM))) read += READ, places += 2;
    dim -= (u32)LOOK(read + READ_FIRST);
    const u64 row = ((u64)p.block * (u64)FACT(HEADS) + p.head) * (u64)FACT(SLOTS) + p.slot;
    const u32 wide = (u32)LOOK(read + READ_DIM), width = (u32)FACT(WIDTH);
    const u64 at = (u64)LOOK(places) + (row * wide + dim) * width;
    if (width == 4) load4(&found.bits, at);
    else if (width == 2) load2(&found.bits, at);
    else load1(&found.bits, at);
    found.scale = (u32)LOOK(read + READ_FACTOR), found.most = (u64)LOOK(read + READ_MOST);
    found.times = LOOK(read + READ_SCALED) != 0;
    if (!found.times) return found;
    const u32 heads = (u32)LOOK(read + READ_SCALE_HEADS), groups = (u32)LOOK(read + READ_SCALE_DIM);
    u64 of = row;
    if (LOOK(read + READ_SCALED) == BY_ROW) {
        i64 token = (i64)p.block * FACT(SLOTS) + p.slot + LOOK(read + READ_BEGIN);
        i64 last = LOOK(read + READ_SCALE_ROWS) - 1;
        token = token < 0 ? 0 : token / LOOK(read + READ_SIZE);
        of = (u64)(token < last ? token : last) * heads + (heads > 1 ? p.head : 0);
        of *= (u64)LOOK(read + READ_SCALE_SLOTS);
    } else if (heads == 1) {
        of = (u64)p.block * (u64)FACT(SLOTS) + p.slot;
    }
    load4(&found.scale, (u64)LOOK(places + 1) + (of * groups + dim / (wide / groups)) * 4);
    return found;
}

FN u32 value_of(struct seen one) { return one.times ? product(one.bits, one.scale) : one.bits; }

/* The scale as its type holds it, of the largest magnitude under it. */
FN u32 scale_made(const i64 *fact, double most)
{
    u32 bits = TO_BITS(most > 0.0 ? NARROWED(most / TO_DOUBLE((u64)FACT(MOST))) : 1.0f);
    if (FACT(KIND) == KIND_BF16) bits = value_bf16(code_bf16(bits));
    if (FACT(KIND) == KIND_FP16) bits = value_fp16(code_fp16(bits));
    bits = bits > (u32)FACT(LEAST) ? bits : (u32)FACT(LEAST);
    return bits < (u32)FACT(GREATEST) ? bits : (u32)FACT(GREATEST);
}

FN double larger(double a, double b) { return b != b || b > a ? b : a; }

FN void look(const i64 *fact, const i64 *step, u32 box, u32 thread, u8 *room)
{
    if (FACT(RULE) != MADE && FACT(RULE) != RANGED) return;
    double most = 0.0;
    u32 size = 0;
    for (u32 e = thread; e < (u32)FACT(EACH); e += THREADS) {
        struct seen one = seen_at(fact, step, spot_of(fact, box, e));
        if (FACT(RULE) == MADE) {
            u32 bits = value_of(one) & 0x7fffffff;
            size = bits < 0x7f800000 && bits > size ? bits : size;
        } else {
            most = larger(most, WIDENED(TO_FLOAT(one.scale)) * TO_DOUBLE(one.most));
            if (most != most) break;
        }
    }
    if (FACT(RULE) == MADE) most = WIDENED(TO_FLOAT(size));
    PUT_ADDRESS(room + 8 * thread, DOUBLE_BITS(most));
}

FN void decide(const i64 *fact, const i64 *step, u32 box, u32 thread, u8 *room)
{
    if (FACT(RULE) == NONE || thread) return;
    u32 scale;
    if (FACT(RULE) == SPREAD) {
        scale = seen_at(fact, step, spot_of(fact, box, 0)).scale;
    } else {
        double most = 0.0;
        for (u32 k = 0; k < THREADS && most == most; k++) most = larger(most, TO_DOUBLE(GET_ADDRESS(room + 8 * k)));
        scale = scale_made(fact, most);
    }
    put4(room + 8 * THREADS, &scale);
    store4((u64)LOOK(step + 1) + (u64)box * 4, &scale);
}

FN void write(const i64 *fact, const i64 *step, u32 box, u32 thread, const u8 *room)
{
    const u32 width = (u32)FACT(WIDTH);
    u32 scale = 0;
    if (FACT(RULE) != NONE) get4(&scale, room + 8 * THREADS);
    for (u32 e = thread; e < (u32)FACT(EACH); e += THREADS) {
        struct spot p = spot_of(fact, box, e);
        if (p.block >= (u32)FACT(COUNT)) continue; /* behind the last one, where the boxes are no boxes */
        struct seen one = seen_at(fact, step, p);
        u32 out = FACT(RULE) == SPREAD ? one.bits : value_of(one);
        if (FACT(RULE) == MADE || FACT(RULE) == RANGED) out = quotient(out, scale);
        const u64 row = ((u64)p.block * (u64)FACT(HEADS) + p.head) * (u64)FACT(SLOTS) + p.slot;
        const u64 to = (u64)LOOK(step) + (row * (u64)FACT(DIM) + p.dim) * width;
        if (width == 4) store4(to, &out);
        else if (width == 2) store2(to, &out);
        else store1(to, &out);
    }
}

#define PLACE                                                                                                            \
    const i64 *fact = TABLE(i64, a.table);                                                                               \
    const i64 *step = fact + HEAD + READ * (u32)FACT(READS) + block / (u32)FACT(BOXES) * (STEP + 2 * (u32)FACT(READS)); \
    const u32 box = block % (u32)FACT(BOXES);

KERNEL(retile, const struct args a)
PHASES(room)
{
    PLACE
    look(fact, step, box, thread, room);
}
BARRIER
{
    PLACE
    decide(fact, step, box, thread, room);
}
BARRIER
{
    PLACE
    write(fact, step, box, thread, room);
}
END
