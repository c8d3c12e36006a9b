/*
exp2 and friends on v16: the project's own polynomials, the same bits on every path. (Errors measured by tests.)
*/
#ifndef CMHA_VMATH_H
#define CMHA_VMATH_H

#include "simd.h"

#define LOG2_E 1.44269504088896341f

/* 2^x: x = n + f with |f| <= 1/2; a polynomial for 2^f; times 2^n in two steps, so that subnormal results are right.
   Below -150 the result is 0, from 128 on infinity; NaN stays NaN. */
INLINE v16 v_exp2(v16 x) {
    x = v_min(v_set1(129.0f), v_max(v_set1(-152.0f), x));
    v16 n = v_round(x), f = v_sub(x, n), p = v_set1(1.535336188319500e-4f);
    p = v_fma(p, f, v_set1(1.339887440266574e-3f));
    p = v_fma(p, f, v_set1(9.618437357674640e-3f));
    p = v_fma(p, f, v_set1(5.550332471162809e-2f));
    p = v_fma(p, f, v_set1(2.402264791363012e-1f));
    p = v_fma(p, f, v_set1(6.931472028550421e-1f));
    p = v_fma(p, f, v_set1(1.0f));
    v16 half = v_round(v_mul(n, v_set1(0.5f)));
    return v_mul(v_mul(p, v_power_of_two(half)), v_power_of_two(v_sub(n, half)));
}
#endif
