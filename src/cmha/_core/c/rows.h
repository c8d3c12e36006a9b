/*
What softmax, log-softmax and cross-entropy do to a row x (N): its maximum, and the sum of exp(x_j - m).

The sum is in the order of sums.h.
*/
#ifndef CMHA_ROWS_H
#define CMHA_ROWS_H

#include "sums.h"
#include "vmath.h"

/* The largest element, NaN not counted; -inf if there is nothing else. Four running maxima: none waits for itself. */
INLINE float row_highest(const float *x, ptrdiff_t N) {
    v16 low = v_set1(-INFINITY), m[4] = {low, low, low, low};
    ptrdiff_t j = 0;
    for (; j + 64 <= N; j += 64)
        for (int k = 0; k < 4; k++) m[k] = v_max(v_load(x + j + 16 * k), m[k]);
    for (; j + 16 <= N; j += 16) m[0] = v_max(v_load(x + j), m[0]);
    if (j < N) m[1] = v_max(v_select(m_first((int)(N - j)), v_load_n(x + j, (int)(N - j)), low), m[1]);
    return v_highest(v_max(v_max(m[0], m[1]), v_max(m[2], m[3])));
}

/* e_i .. = exp(x_i - top) for `width` lanes, the others 0; kept unless e is NULL. */
INLINE v16 exp_term(float *e, const float *x, v16 top, int width) {
    v16 value = v_exp_negative(v_sub(part_load(x, width), top));
    if (e) part_store(e, value, width);
    return part_keep(value, width);
}

/* Sum of e_j = exp(x_j - m) for m >= all x_j. NaN if a NaN is among them, or if m is infinite. */
INLINE double row_exp_sum(float *e, const float *x, float m, ptrdiff_t N) {
    v16 top = v_set1(m);
    double total = 0;
    LANE_SUM(total, N, exp_term(e ? e + i : NULL, x + i, top, width))
    return total;
}

INLINE int row_has_nan(const float *x, ptrdiff_t N) {
    int found = 0;
    for (ptrdiff_t j = 0; j < N; j++) found |= x[j] != x[j];
    return found;
}

INLINE void row_fill(float *y, float value, ptrdiff_t N) {
    for (ptrdiff_t j = 0; j < N; j++) y[j] = value;
}

INLINE void row_scale(float *y, float factor, ptrdiff_t N) {
    v16 f = v_set1(factor);
    for (ptrdiff_t j = 0; j < N; j += 16) v_store_up_to(y + j, v_mul(v_load_up_to(y + j, N - j), f), N - j);
}
#endif
