/*
exp2, exp, log, tanh, sigmoid and GELU on v16: the project's own polynomials, the same bits on every path.

The coefficients are minimax fits of the relative error (Lawson's iteration), rounded to float one after the other with
the rest refitted. The largest error against float64 stands beside each function, measured over every float, for sigmoid
and GELU over every 64th.
*/
#ifndef CMHA_VMATH_H
#define CMHA_VMATH_H

#include "simd.h"
#include <float.h>

#define LOG2_E 1.44269504088896341f
#define LOG2_E_LOW 1.92596299112661747e-8f /* log2(e) - LOG2_E */

INLINE v16 v_negative_abs(v16 x) { return v_or_bits(x, 0x80000000u); }

/* 2^f for |f| <= 1/2; the polynomial alone is within 3.0e-9. */
INLINE v16 v_exp2_fraction(v16 f) {
    v16 p = v_set1(1.5326496e-4f);
    p = v_fma(p, f, v_set1(1.3390812e-3f));
    p = v_fma(p, f, v_set1(9.618506e-3f));
    p = v_fma(p, f, v_set1(5.550360e-2f));
    p = v_fma(p, f, v_set1(2.4022648e-1f));
    p = v_fma(p, f, v_set1(6.9314718e-1f));
    return v_fma(p, f, v_set1(1.0f));
}

/* p * 2^n for p around 1 and integral n in [-152, 129], rounded once: two factors, because one would itself
   leave the range; the first product is exact. */
INLINE v16 v_scale(v16 p, v16 n) {
    v16 high = v_max(v_set1(-124.0f), n);
    v16 first = v_power_of_two(v_sub(high, v_set1(1.0f)));
    v16 second = v_power_of_two(v_add(v_sub(n, high), v_set1(1.0f)));
    return v_mul(v_mul(p, first), second);
}

/* The same for n <= 0, cheaper: with rounded = n + V_MAGIC + 192 the first factor is 2^(n + 65), the second a constant.
   (192 is even, so ties of the rounding fall as in v_round.) */
#define V_MAGIC_DOWN (V_MAGIC + 192.0f)
#define TWO_TO_MINUS_65 2.71050543e-20f /* exactly; not every compiler reads 0x1p-65f */
INLINE v16 v_scale_down(v16 p, v16 rounded) {
    return v_mul(v_mul(p, v_to_exponent(rounded)), v_set1(TWO_TO_MINUS_65));
}

/* 2^x: x = n + f with |f| <= 1/2; a polynomial for 2^f; times 2^n. Subnormal results are right, below
   -150 the result is 0, from 128 on infinity; NaN stays NaN. 0.88 ulp. */
INLINE v16 v_exp2(v16 x) {
    x = v_min(v_set1(129.0f), v_max(v_set1(-152.0f), x));
    v16 n = v_round(x);
    return v_scale(v_exp2_fraction(v_sub(x, n)), n);
}

/* v_exp2(x), the same bits, for x <= 0 or NaN: two thirds of the work. */
INLINE v16 v_exp2_negative(v16 x) {
    x = v_max(v_set1(-152.0f), x);
    v16 rounded = v_add(x, v_set1(V_MAGIC_DOWN)), n = v_sub(rounded, v_set1(V_MAGIC_DOWN));
    return v_scale_down(v_exp2_fraction(v_sub(x, n)), rounded);
}

/* e^x = 2^(x log2 e): the fraction x log2 e - n is taken with log2 e in two floats (Cody & Waite 1980), so it
   loses nothing however large x is. 0 below -104, infinity above 88.73; NaN stays NaN. 1.02 ulp. */
INLINE v16 v_exp_fraction(v16 x, v16 n) {
    return v_exp2_fraction(v_fma(x, v_set1(LOG2_E_LOW), v_fma(x, v_set1(LOG2_E), v_sub(v_zero(), n))));
}
INLINE v16 v_exp(v16 x) {
    x = v_min(v_set1(89.0f), v_max(v_set1(-105.0f), x));
    v16 n = v_sub(v_fma(x, v_set1(LOG2_E), v_set1(V_MAGIC)), v_set1(V_MAGIC));
    return v_scale(v_exp_fraction(x, n), n);
}

/* v_exp(x), the same bits, for x <= 0 or NaN. */
INLINE v16 v_exp_negative(v16 x) {
    x = v_max(v_set1(-105.0f), x);
    v16 rounded = v_fma(x, v_set1(LOG2_E), v_set1(V_MAGIC_DOWN));
    return v_scale_down(v_exp_fraction(x, v_sub(rounded, v_set1(V_MAGIC_DOWN))), rounded);
}

/* ln x: x = m * 2^e with m in [sqrt 1/2, sqrt 2), f = m - 1, log(1 + f) = f - f^2/2 + f^3 P(f), plus e ln 2 in two
   floats. ln 0 = -inf, of a negative number NaN, of inf inf; subnormals are right. 0.81 ulp. */
INLINE v16 v_log(v16 x) {
    m16 tiny = v_lt(x, v_set1(FLT_MIN));
    v16 scaled = v_select(tiny, v_mul(x, v_set1(16777216.0f)), x);
    v16 e = v_sub(v_exponent(v_abs(scaled)), v_select(tiny, v_set1(24.0f), v_zero()));
    v16 m = v_or_bits(v_and_bits(scaled, 0x007fffffu), 0x3f800000u); /* in [1, 2) */
    m16 upper = v_lt(v_set1(1.41421356f), m);
    m = v_select(upper, v_mul(m, v_set1(0.5f)), m);
    e = v_select(upper, v_add(e, v_set1(1.0f)), e);
    v16 f = v_sub(m, v_set1(1.0f)), square = v_mul(f, f), p = v_set1(6.749269e-2f);
    p = v_fma(p, f, v_set1(-1.1670098e-1f));
    p = v_fma(p, f, v_set1(1.1883549e-1f));
    p = v_fma(p, f, v_set1(-1.2406234e-1f));
    p = v_fma(p, f, v_set1(1.4220358e-1f));
    p = v_fma(p, f, v_set1(-1.6667989e-1f));
    p = v_fma(p, f, v_set1(2.0002072e-1f));
    p = v_fma(p, f, v_set1(-2.500001e-1f));
    p = v_fma(p, f, v_set1(3.3333313e-1f));
    v16 rest = v_fma(v_mul(f, square), p, v_mul(e, v_set1(-1.90465429995776788e-9f))); /* ln 2 - float(ln 2) */
    rest = v_fma(square, v_set1(-0.5f), rest);
    v16 y = v_fma(e, v_set1(0.693147180559945309f), v_add(f, rest));
    y = v_select(v_lt(x, v_set1(INFINITY)), y, x); /* inf and NaN */
    y = v_select(v_lt(x, v_zero()), v_set1(NAN), y);
    return v_select(v_eq(x, v_zero()), v_set1(-INFINITY), y);
}

/* tanh x: x + x^3 Q(x^2) up to 0.625 (Cephes' split), beyond it 1 - 2e / (1 + e) with e = exp(-2|x|). Odd, -0 included.
   1.46 ulp. */
INLINE v16 v_tanh(v16 x) {
    v16 size = v_abs(x), square = v_mul(x, x), q = v_set1(-5.6922967e-3f);
    q = v_fma(q, square, v_set1(2.0628167e-2f));
    q = v_fma(q, square, v_set1(-5.3736515e-2f));
    q = v_fma(q, square, v_set1(1.3331406e-1f));
    q = v_fma(q, square, v_set1(-3.3333281e-1f));
    v16 near = v_fma(v_mul(size, square), q, size);
    v16 e = v_exp_negative(v_mul(size, v_set1(-2.0f)));
    v16 far = v_sub(v_set1(1.0f), v_div(v_add(e, e), v_add(v_set1(1.0f), e)));
    return v_copy_sign(v_select(v_lt(size, v_set1(0.625f)), near, far), x);
}

/* 1 / (1 + e^-x), from e^-|x| so that nothing overflows and the small side keeps its digits. 2.4 ulp. */
INLINE v16 v_sigmoid(v16 x) {
    v16 one = v_set1(1.0f), e = v_exp_negative(v_negative_abs(x));
    return v_div(v_select(v_lt(x, v_zero()), e, one), v_add(one, e));
}

/* GELU as GPT-2 has it: x/2 (1 + tanh u) = x / (1 + e^-2u), u = sqrt(2/pi) (x + 0.044715 x^3).
   In powers of two: 2u log2 e = x (GELU_1 + GELU_3 x^2); with e = 2^-|.| it is x / (1 + e) or x e / (1 + e).
   Where x^2 or x^3 overflow, e is 0 all the same; -inf is held at -1e30, where it gives -0. Error 0.99 eps |x|. */
#define GELU_1 2.30220819814432489f /* 2 sqrt(2/pi) log2 e */
#define GELU_3 0.102943239580023487f /* GELU_1 * 0.044715 */
INLINE v16 v_gelu_exponent(v16 x) { return v_mul(x, v_fma(v_mul(x, x), v_set1(GELU_3), v_set1(GELU_1))); }
INLINE v16 v_gelu(v16 x) {
    x = v_max(v_set1(-1e30f), x);
    v16 e = v_exp2_negative(v_negative_abs(v_gelu_exponent(x)));
    return v_div(v_select(v_lt(x, v_zero()), v_mul(x, e), x), v_add(v_set1(1.0f), e));
}

/* Its derivative s + x s (1 - s) 2u', with s = 1 / (1 + e^-2u) and s (1 - s) = e / (1 + e)^2. Beyond 12 it is exactly
   0 or 1, so x stops there. Error 1.9 eps. */
#define GELU_SLOPE_1 1.59576912160573071f /* 2 sqrt(2/pi) */
#define GELU_SLOPE_3 0.214064448817800746f /* 3 * 0.044715 * GELU_SLOPE_1 */
INLINE v16 v_gelu_slope(v16 x) {
    x = v_min(v_set1(12.0f), v_max(v_set1(-12.0f), x));
    v16 one = v_set1(1.0f), e = v_exp2_negative(v_negative_abs(v_gelu_exponent(x)));
    v16 larger = v_div(one, v_add(one, e)), smaller = v_mul(e, larger); /* s and 1 - s, or the other way round */
    v16 inner = v_mul(x, v_fma(v_mul(x, x), v_set1(GELU_SLOPE_3), v_set1(GELU_SLOPE_1)));
    return v_fma(inner, v_mul(larger, smaller), v_select(v_lt(x, v_zero()), smaller, larger));
}

/* ln x of one double for the rows of a loss: x zero, normal, infinite or NaN. m in [sqrt 1/2, sqrt 2),
   s = (m - 1) / (m + 1), ln m = 2 (s + s^3/3 + s^5/5 + ...); plain double arithmetic, so the same bits
   everywhere. Relative error 4.4e-16. */
INLINE double log_of(double x) {
    if (!(x > 0) || x - x != 0) /* zero, negative, infinite, NaN */
        return x == 0 ? -(double)INFINITY : x > 0 ? x : (double)NAN;
    uint64_t bits;
    memcpy(&bits, &x, 8);
    int e = (int)(bits >> 52) - 1023;
    bits = (bits & 0x000fffffffffffffu) | 0x3ff0000000000000u;
    double m;
    memcpy(&m, &bits, 8);
    if (m > 1.4142135623730951) { m *= 0.5; e += 1; }
    double s = (m - 1) / (m + 1), z = s * s, p = 1.0 / 21;
    for (int k = 19; k >= 1; k -= 2) p = p * z + 1.0 / k;
    return e * 0.69314718055994531 + 2 * s * p;
}
#endif
