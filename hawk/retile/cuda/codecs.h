/* Elements and their codecs: the definitions of `layouts/codecs.py` and `layouts/small.py` for generated kernels.
 *
 * Values are the bits of binary32 numbers.  Arithmetic of floats stands only where it is exact, or is what the definition
 * asks for, so that a GPU and a CPU give the same bits.
 */

/* -- bytes at any address -- */

FN u32 byte_at(u64 at)
{
    u32 t;
    load1(&t, at);
    return t;
}

/* Element number `position` of those that begin at `at`. */
FN u32 code_at(u64 at, u64 position, u32 bits)
{
    u32 found = 0;
    at += position * bits / 8;
    for (u32 k = 0; k < bits; k += 8) found |= byte_at(at + k / 8) << k;
    return bits == 4 ? found >> (position & 1) * 4 & 15 : found;
}

/* -- 16 and 32 bits -- */

FN u32 value_fp32(u32 x) { return x; }
FN u32 value_bf16(u32 x) { return x << 16; }
FN u32 code_fp32(u32 x) { return x; }

FN u32 code_bf16(u32 x)
{
    u32 rounded = (x + 0x7fff + (x >> 16 & 1)) >> 16;
    return (x & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded;
}

/* m * 2^-down for a whole m < 2^24, where that is normal. */
FN u32 scaled_down(u32 m, u32 down) { return m ? TO_BITS((float)(i32)m) - (down << 23) : 0; }

FN u32 value_fp16(u32 x)
{
    u32 sign = (x & 0x8000) << 16, size = x & 0x7fff;
    u32 normal = (size << 13) + (112u << 23) + (size >= 0x7c00 ? 112u << 23 : 0);
    return sign | (size < 0x400 ? scaled_down(size & 0x3ff, 24) : normal);
}

/* sig, 24 bits, without its lower `drop` bits, 1 to 25: to nearest, ties to even. */
FN u32 rounded_off(u32 sig, u32 drop) { return (sig + ((1u << (drop - 1)) - 1) + (sig >> drop & 1)) >> drop; }

FN u32 code_fp16(u32 x)
{
    u32 sign = x >> 16 & 0x8000, size = x & 0x7fffffff, e = size >> 23;
    u32 sig = (size & 0x7fffff) | 0x800000, low = e < 113 ? 113 - e : 0;
    u32 kept = rounded_off(sig, 13 + (low < 12 ? low : 12));
    /* A normal significand brings its hidden 1 along, which adds one to the exponent's field. */
    u32 found = (e >= 113 ? (e - 113) << 10 : 0) + kept;
    found = e >= 143 ? 0x7c00 : found;
    return size > 0x7f800000 ? 0x7e00 : sign | found;
}

/* -- eight bits and fewer -- */

/* A finite magnitude as sig * 2^(e - 23) with sig in [2^23, 2^24), or 0. */
FN u32 parts(u32 size, i32 *e)
{
    u32 whole = TO_BITS((float)(i32)(size & 0x7fffff)); /* a denormal is that number of 2^-149 */
    u32 from = size < 0x800000 ? whole : size;
    *e = (i32)(from >> 23) - (size < 0x800000 ? 276 : 127);
    return size ? (from & 0x7fffff) | 0x800000 : 0;
}

/* The code of x * 2^lift. */
FN u32 code_float(u32 x, i32 lift, i32 exponent_bits, i32 mantissa_bits, u32 largest, u32 infinity, u32 nan)
{
    u32 sign = x >> 31 << (exponent_bits + mantissa_bits), size = x & 0x7fffffff;
    i32 e, least = 2 - (1 << (exponent_bits - 1)), most = 1 << exponent_bits;
    u32 sig = parts(size, &e);
    e += lift;
    /* So many of the 24 bits fall away; from 25 on nothing but 0 is left. */
    i32 drop = 23 - mantissa_bits + (e < least ? least - e : 0), above = e > least ? e - least : 0;
    u32 kept = rounded_off(sig, (u32)(drop < 25 ? drop : 25));
    u32 code = ((u32)(above < most ? above : most) << mantissa_bits) + kept;
    code = kept ? code : 0;
    code = code < largest ? code : largest;
    code = size == 0x7f800000 ? infinity : code;
    return size > 0x7f800000 ? nan : sign | code;
}

/* The same for formats whose least half step is far above the denormals of binary32, which count as 0; `least` is the
 * biased exponent of the least normal value. */
FN u32 code_small(u32 x, u32 least, u32 bits, u32 mantissa_bits, u32 largest, u32 infinity, u32 nan)
{
    u32 sign = x >> 31 << (bits - 1), size = x & 0x7fffffff, e = size >> 23;
    u32 low = e < least ? least - e : 0, high = e > least ? e - least : 0, drop = 23 - mantissa_bits + low;
    u32 code = rounded_off((size & 0x7fffff) | 0x800000, drop < 25 ? drop : 25) + (high << mantissa_bits);
    code = code < largest ? code : largest;
    code = (size == 0x7f800000 ? infinity : code) | sign;
    return size > 0x7f800000 ? nan : code;
}

FN u32 code_fp8_e4m3fn(u32 x) { return code_small(x, 121, 8, 3, 0x7e, 0x7e, 0x7f); }
FN u32 code_fp8_e5m2(u32 x) { return code_small(x, 113, 8, 2, 0x7b, 0x7c, 0x7e); }

FN u32 code_int8(u32 x)
{
    u32 size = x & 0x7fffffff, e = size >> 23, drop = e < 150 ? 150 - e : 0;
    drop = drop < 25 ? drop : 25;
    drop = drop > 17 ? drop : 17; /* 2^7 and more saturate anyway */
    u32 kept = rounded_off((size & 0x7fffff) | 0x800000, drop);
    kept = kept < 127 && e <= 133 ? kept : 127;
    kept = size > 0x7f800000 ? 0 : kept;
    return (x >> 31 ? 0 - kept : kept) & 0xff;
}

FN u32 value_fp8_e4m3fn(u32 code)
{
    u32 sign = code >> 7 << 31, m = code & 0x7f;
    u32 found = m < 8 ? scaled_down(m, 9) : (m << 20) + (120u << 23);
    return m == 0x7f ? 0x7fc00000 : sign | found;
}

/* Its upper byte is all that fp16 has of it. */
FN u32 value_fp8_e5m2(u32 code) { return (code & 0x7f) > 0x7c ? 0x7fc00000 : value_fp16(code << 8); }

FN u32 value_int8(u32 code) { return TO_BITS((float)(i32)(signed char)code); }

FN u32 value_e2m1(u32 code)
{
    u32 m = code & 7;
    return (code & 8) << 28 | (m < 2 ? scaled_down(m, 1) : (m << 22) + (126u << 23));
}

/* -- values of codes that are finite numbers, `up` bits below the highest of a word -- */

FN u32 any_nan_e4m3(const u32 *w, u32 n)
{
    u32 found = 0;
    UNROLL for (u32 k = 0; k < n; k++) found |= (w[k] & 0x7f7f7f7f) + 0x01010101;
    return found & 0x80808080;
}
FN u32 any_special_e5m2(const u32 *w, u32 n)
{
    u32 found = 0;
    UNROLL for (u32 k = 0; k < n; k++) found |= (w[k] & 0x7f7f7f7f) + 0x04040404;
    return found & 0x80808080;
}
/* The code's exponent and mantissa stand where those of binary32 do: what is left is a power of two, 2^120 and 2^112. */
FN u32 quick_fp8_e4m3fn(u32 w, u32 up)
{
    return TO_BITS(TIMES(TO_FLOAT((u32)((i32)(w << up) >> 4) & 0x87f00000), TO_FLOAT(0x7b800000)));
}
FN u32 quick_fp8_e5m2(u32 w, u32 up)
{
    return TO_BITS(TIMES(TO_FLOAT((u32)((i32)(w << up) >> 3) & 0x8fe00000), TO_FLOAT(0x77800000)));
}
FN u32 quick_e2m1(u32 code) { return TO_BITS(TIMES(TO_FLOAT((code & 7) << 22 | (code & 8) << 28), TO_FLOAT(0x7e800000))); }

/* By a factor, given as its bits.  A GPU's product of a NaN is not a CPU's, which is the NaN itself. */
FN u32 multiplied(u32 x, u32 by)
{
    return (x & 0x7fffffff) > 0x7f800000 ? x : TO_BITS(TIMES(TO_FLOAT(x), TO_FLOAT(by)));
}
FN u32 divided(u32 x, u32 by) { return TO_BITS(OVER(TO_FLOAT(x), TO_FLOAT(by))); }

/* -- groups: codes packed into `out`, the lower element in the lower bits; what they share is returned -- */

FN u32 code_bfp(u32 x, u32 most, u32 bits)
{
    const u32 keep = bits - 1, drop = 24 - keep, top = (1u << keep) - 1;
    u32 e = x >> 23 & 0xff, sig = e ? (x & 0x7fffff) | 0x800000 : 0;
    u32 v = sig >> (most - e < 31 ? most - e : 31);
    u32 m = (v + ((1u << (drop - 1)) - 1) + (v >> drop & 1)) >> drop;
    m = m < top ? m : top;
    return m | (m ? x >> 31 << keep : 0);
}

/* Magnitudes m, each the lowest byte of a number, and signs in the highest bits of x: four codes.  2^keep saturates, and 0
 * has no sign. */
FN u32 four_bfp(const u32 *m, const u32 *x, u32 bits)
{
    u32 four = PERMUTE(PERMUTE(m[0], m[1], 0x0040), PERMUTE(m[2], m[3], 0x0040), 0x5410);
    four -= four >> (bits - 1) & 0x01010101;
    u32 sign = PERMUTE(PERMUTE(x[0], x[1], 0x0073), PERMUTE(x[2], x[3], 0x0073), 0x5410);
    return four | (sign & (four + 0x7f7f7f7f) & 0x80808080) >> (8 - bits);
}

/* What is shifted out of 24 bits counts for nothing; what is left times a power of two is rounded off by adding 2^23.  So
 * where no value comes near the ends of binary32. */
FN u32 group_bfp(const u32 *x, u32 *out, u32 bits)
{
    const u32 per = 32 / bits, keep = bits - 1;
    u32 most = 0;
    UNROLL for (u32 k = 0; k < 16; k++) most = (x[k] & 0x7f800000) > most ? x[k] & 0x7f800000 : most;
    most >>= 23;
    if (most < 16 || most == 255) {
        UNROLL for (u32 j = 0; j < 16 / per; j++) out[j] = 0;
        UNROLL for (u32 k = 0; k < 16; k++) out[k / per] |= code_bfp(x[k], most, bits) << k % per * bits;
        return most;
    }
    const float by = TO_FLOAT((253 + keep - most) << 23);
    u32 four[4];
    UNROLL for (u32 j = 0; j < 4; j++)
    {
        u32 m[4];
        UNROLL for (u32 k = 0; k < 4; k++)
        {
            u32 v = x[4 * j + k];
            v &= SHIFTED_UP(0x7fffffff, most - (v >> 23 & 0xff));
            m[k] = TO_BITS(TIMES_PLUS(TO_FLOAT(v & 0x7fffffff), by, 8388608.0f));
        }
        four[j] = four_bfp(m, x + 4 * j, bits);
    }
    if (bits == 8) {
        UNROLL for (u32 j = 0; j < 4; j++) out[j] = four[j];
    } else {
        UNROLL for (u32 j = 0; j < 4; j++) four[j] |= four[j] >> 4;
        out[0] = PERMUTE(four[0], four[1], 0x6420), out[1] = PERMUTE(four[2], four[3], 0x6420);
    }
    return most;
}
FN u32 group_bfp8_b(const u32 *x, u32 *out) { return group_bfp(x, out, 8); }
FN u32 group_bfp4_b(const u32 *x, u32 *out) { return group_bfp(x, out, 4); }

/* Where no scale is small a denormal is less than any half step, and counts as 0. */
FN u32 group_mx(const u32 *x, u32 *out, u32 bits, i32 top, i32 ebits, i32 mbits, u32 largest, u32 infinity, u32 nan)
{
    const u32 per = 32 / bits;
    u32 most = 0, all = 0;
    UNROLL for (u32 k = 0; k < 32; k++)
    {
        u32 size = x[k] & 0x7fffffff, finite = size < 0x7f800000 ? size : 0;
        most = finite > most ? finite : most;
        all = size > all ? size : all;
    }
    i32 e, scale = parts(most, &e) && e - top + 127 > 0 ? e - top + 127 : 0;
    const i32 lift = most ? 127 - scale : 0;
    const u32 least = (u32)(129 - (1 << (ebits - 1)) - lift), usual = !most || scale > 25;
    UNROLL for (u32 j = 0; j < 32 / per; j++)
    {
        out[j] = 0;
        UNROLL for (u32 k = 0; k < per; k++)
        {
            /* Four bits have no NaN: their sign stays, and the scale says it for all. */
            u32 v = x[j * per + k], no = bits == 4 ? nan | v >> 31 << 3 : nan;
            u32 code = usual ? code_small(v, least, bits, (u32)mbits, largest, infinity, no)
                             : code_float(v, lift, ebits, mbits, largest, infinity, no);
            out[j] |= code << k * bits;
        }
    }
    return bits == 4 && all > 0x7f800000 ? 255 : (u32)scale;
}
FN u32 group_mxfp8_e4m3(const u32 *x, u32 *out) { return group_mx(x, out, 8, 8, 4, 3, 0x7e, 0x7e, 0x7f); }
FN u32 group_mxfp8_e5m2(const u32 *x, u32 *out) { return group_mx(x, out, 8, 15, 5, 2, 0x7b, 0x7c, 0x7e); }
FN u32 group_mxfp4_e2m1(const u32 *x, u32 *out) { return group_mx(x, out, 4, 2, 2, 1, 7, 7, 7); }

/* The value of a code under what its group shares: +-m * 2^(E - 126 - keep), denormals of binary32 included. */
FN u32 value_bfp(u32 code, u32 exponent, u32 keep)
{
    u32 m = code & ((1u << keep) - 1), f = TO_BITS((float)(i32)m), sign = code >> keep << 31;
    i32 e = (i32)(f >> 23) - 126 + (i32)exponent - (i32)keep;
    u32 up = exponent + 23 - keep, v = f + ((exponent - 126 - keep) << 23);
    v = e <= 0 ? m << (up < 31 ? up : 31) : v;
    v = e >= 255 ? 0x7f800000 : v;
    return sign | (m ? v : 0);
}
FN u32 shared_bfp8_b(u32 code, u32 exponent) { return value_bfp(code, exponent, 7); }
FN u32 shared_bfp4_b(u32 code, u32 exponent) { return value_bfp(code, exponent, 3); }

/* x * 2^(scale - 127): exact, or beyond the largest; a scale of 255 is NaN. */
FN u32 under_scale(u32 x, u32 scale)
{
    u32 sign = x & 0x80000000, size = x & 0x7fffffff, sig = (x & 0x7fffff) | 0x800000;
    i32 e = (i32)(size >> 23) + (i32)scale - 127, low = 1 - e;
    u32 tiny = sig >> (low < 0 ? 0 : low < 31 ? low : 31);
    u32 found = e > 0 ? (u32)e << 23 | (sig & 0x7fffff) : tiny;
    found = e >= 255 ? 0x7f800000 : found;
    found = size >= 0x7f800000 || !size ? size : found;
    return scale == 255 ? 0x7fc00000 : sign | found;
}
FN u32 shared_mxfp8_e4m3(u32 code, u32 scale) { return under_scale(value_fp8_e4m3fn(code), scale); }
FN u32 shared_mxfp8_e5m2(u32 code, u32 scale) { return under_scale(value_fp8_e5m2(code), scale); }
FN u32 shared_mxfp4_e2m1(u32 code, u32 scale) { return under_scale(value_e2m1(code), scale); }

/* -- bf16 to block floats and back, two elements to a word: the pairs that have to run at the speed of memory -- */

/* A significand of 8 bits loses nothing that counts when it is shifted: so the code is the product with a power of two, to
 * nearest even, which adding 2^23 rounds off.  Where the largest exponent is not small, denormals are less than half a
 * unit; infinities and NaNs go the long way. */
FN u32 pairs_bfp(const u32 *w, u32 *out, u32 bits)
{
    u32 most = 0;
    UNROLL for (u32 j = 0; j < 8; j++) most = LARGER_HALVES(most, w[j] & 0x7f807f80);
    most = (most >> 16 > (most & 0xffff) ? most >> 16 : most & 0xffff) >> 7;
    if (most < 16 || most == 255) {
        UNROLL for (u32 j = 0; j < bits / 2; j++) out[j] = 0;
        UNROLL for (u32 j = 0; j < 8; j++)
        {
            u32 two = code_bfp(w[j] << 16, most, bits) | code_bfp(w[j] & 0xffff0000, most, bits) << bits;
            out[j * bits / 16] |= two << j * 2 * bits % 32;
        }
        return most;
    }
    const u32 keep = bits - 1;
    float by = TO_FLOAT((253 + keep - most) << 23);
    u32 four[4];
    UNROLL for (u32 j = 0; j < 4; j++)
    {
        u32 a = w[2 * j], b = w[2 * j + 1];
        u32 m0 = TO_BITS(TIMES_PLUS(TO_FLOAT(a << 16 & 0x7fff0000), by, 8388608.0f));
        u32 m1 = TO_BITS(TIMES_PLUS(TO_FLOAT(a & 0x7fff0000), by, 8388608.0f));
        u32 m2 = TO_BITS(TIMES_PLUS(TO_FLOAT(b << 16 & 0x7fff0000), by, 8388608.0f));
        u32 m3 = TO_BITS(TIMES_PLUS(TO_FLOAT(b & 0x7fff0000), by, 8388608.0f));
        u32 m = PERMUTE(PERMUTE(m0, m1, 0x0040), PERMUTE(m2, m3, 0x0040), 0x5410);
        m -= m >> keep & 0x01010101; /* 2^keep saturates */
        u32 sign = PERMUTE(a, b, 0x7531) & (m + 0x7f7f7f7f) & 0x80808080;
        four[j] = m | sign >> (8 - bits);
    }
    if (bits == 8) {
        UNROLL for (u32 j = 0; j < 4; j++) out[j] = four[j];
    } else {
        UNROLL for (u32 j = 0; j < 4; j++) four[j] |= four[j] >> 4;
        out[0] = PERMUTE(four[0], four[1], 0x6420), out[1] = PERMUTE(four[2], four[3], 0x6420);
    }
    return most;
}
FN u32 pairs_bfp8_b(const u32 *w, u32 *out) { return pairs_bfp(w, out, 8); }
FN u32 pairs_bfp4_b(const u32 *w, u32 *out) { return pairs_bfp(w, out, 4); }

/* The bf16, in the upper half, of a code; `by` is 2^(E - 126 - keep).  Exact where that is normal. */
FN u32 quick_bfp(u32 code, u32 keep, float by)
{
    u32 m = code & ((1u << keep) - 1);
    return TO_BITS(TIMES(TO_FLOAT(0x4b000000 | m) - 8388608.0f, by)) | code >> keep << 31;
}
