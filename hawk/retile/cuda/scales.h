/* Values under scales: what multiplies and divides them, and the largest of those that a scale is made of. */

/* On processors of the usual kind a NaN comes out as it went in, made quiet, the first of two; others make their own. */
FN u32 quiet(u32 x, u32 y, u32 found)
{
    const u32 nan = 0x7f800000;
    if ((x & 0x7fffffff) > nan) return x | 0x400000;
    if ((y & 0x7fffffff) > nan) return y | 0x400000;
    return (found & 0x7fffffff) > nan ? 0xffc00000 : found;
}
SLOW u32 product(u32 x, u32 y) { return quiet(x, y, TO_BITS(TIMES(TO_FLOAT(x), TO_FLOAT(y)))); }
SLOW u32 quotient(u32 x, u32 y) { return quiet(x, y, TO_BITS(OVER(TO_FLOAT(x), TO_FLOAT(y)))); }

FN u32 is_finite(u32 x) { return (x & 0x7f800000) != 0x7f800000; }

/* -- the largest magnitude of codes, four or two to a word -- */

FN u32 larger_half(u32 x) { return x >> 16 > (x & 0xffff) ? x >> 16 : x & 0xffff; }

FN u32 largest_fp32(const u32 *w, u32 n)
{
    u32 most = 0;
    UNROLL for (u32 k = 0; k < n; k++) most = (w[k] & 0x7fffffff) > most ? w[k] & 0x7fffffff : most;
    return most;
}
FN u32 largest_bf16(const u32 *w, u32 n)
{
    u32 most = 0;
    UNROLL for (u32 k = 0; k < n; k++) most = LARGER_HALVES(most, w[k] & 0x7fff7fff);
    return larger_half(most);
}
FN u32 largest_fp16(const u32 *w, u32 n) { return largest_bf16(w, n); }
FN u32 largest_fp8_e4m3fn(const u32 *w, u32 n)
{
    u32 most = 0;
    UNROLL for (u32 k = 0; k < n; k++)
        most = LARGER_HALVES(LARGER_HALVES(most, w[k] & 0x007f007f), w[k] >> 8 & 0x007f007f);
    return larger_half(most);
}
FN u32 largest_fp8_e5m2(const u32 *w, u32 n) { return largest_fp8_e4m3fn(w, n); }
/* Counted from the least and from the greatest number, both ways upwards. */
FN u32 largest_int8(const u32 *w, u32 n)
{
    u32 up = 0, down = 0;
    UNROLL for (u32 k = 0; k < n; k++)
    {
        up = LARGER_HALVES(LARGER_HALVES(up, (w[k] ^ 0x80808080) & 0x00ff00ff), (w[k] ^ 0x80808080) >> 8 & 0x00ff00ff);
        down = LARGER_HALVES(LARGER_HALVES(down, (w[k] ^ 0x7f7f7f7f) & 0x00ff00ff), (w[k] ^ 0x7f7f7f7f) >> 8 & 0x00ff00ff);
    }
    up = larger_half(up), down = larger_half(down);
    return up > down ? (up > 128 ? up - 128 : 0) : down - 127;
}

/* The larger of two magnitudes; the highest bit says that there was something that is not finite. */
FN u32 either(u32 a, u32 b)
{
    u32 x = a & 0x7fffffff, y = b & 0x7fffffff;
    return (x > y ? x : y) | ((a | b) & 0x80000000);
}

/* The larger of what was found and of another value, where that is finite. */
FN u32 counted(u32 found, u32 x) { return either(found, is_finite(x) ? x & 0x7fffffff : 0x80000000); }

/* -- scales made -- */

/* The scale as its type holds it, of the largest magnitude under it; `most` is the largest number of the codec.  The
 * quotient by way of binary64, as it is defined, is the same: 53 bits are more than twice 24 and two. */
FN u32 scale_of(u32 size, float most, u32 kind, u32 least, u32 greatest)
{
    u32 bits = TO_BITS(size ? OVER(TO_FLOAT(size), most) : 1.0f);
    if (kind == 1) bits = value_bf16(code_bf16(bits));
    if (kind == 2) bits = value_fp16(code_fp16(bits));
    bits = bits > least ? bits : least;
    return bits < greatest ? bits : greatest;
}

/* 1 / scale where `quick_quotient` does for all values under it, else 0: all are finite, nothing comes near the ends of
 * binary32, and no quotient is larger than `reach`. */
FN u32 quick_by(u32 found, u32 scale, float reach)
{
    const u32 low = 67u << 23, high = 187u << 23; /* 2^-60, 2^60 */
    if (found > high || scale < low || scale > high) return 0;
    if (OVER(TO_FLOAT(found), TO_FLOAT(scale)) > reach) return 0;
    return TO_BITS(OVER(1.0f, TO_FLOAT(scale)));
}

/* x / y as binary32, to nearest even, where `by` is 1 / y to nearest: two steps of correction, the second of which is exact
 * (Markstein).  Where the quotient is below 2^-18 its last bits may be others, and 0 may have lost its sign. */
FN u32 quick_quotient(u32 x, u32 y, u32 by)
{
    const float a = TO_FLOAT(x), b = -TO_FLOAT(y), r = TO_FLOAT(by);
    float q = TIMES(a, r);
    q = FUSED(FUSED(b, q, a), r, q);
    return TO_BITS(FUSED(FUSED(b, q, a), r, q));
}

FN u32 signed_quotient(u32 x, u32 y, u32 by) { return quick_quotient(x, y, by) | (x & 0x80000000); }

/* The nearest whole number to x, ties to even, in the lowest bits: for magnitudes below 2^22. */
FN u32 whole(u32 x) { return TO_BITS(TO_FLOAT(x) + 12582912.0f); }

FN u32 two_bf16(u32 low, u32 high)
{
    if ((low & 0x7fffffff) > 0x7f800000) low = 0x7fc00000;
    if ((high & 0x7fffffff) > 0x7f800000) high = 0x7fc00000;
    low += 0x7fff + (low >> 16 & 1), high += 0x7fff + (high >> 16 & 1);
    return PERMUTE(low, high, 0x7632);
}
