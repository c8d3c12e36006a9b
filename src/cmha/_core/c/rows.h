/*
What softmax, log-softmax and cross-entropy do to a row x (N): its maximum, and the sum of exp(x_j - m).

Order of the sum: term j goes to lane j mod 16 of a block of 512 (sixteen float32 lanes, from +0, ascending), the lanes are
added by lanes_sum, the blocks in double from 0.0.
*/
#ifndef CMHA_ROWS_H
#define CMHA_ROWS_H

#include "vmath.h"

#define SUM_BLOCK 512

INLINE ptrdiff_t block_end(ptrdiff_t begin, ptrdiff_t n) { return n - begin < SUM_BLOCK ? n : begin + SUM_BLOCK; }

/* The largest element, NaN not counted; -inf if there is nothing else. Four running maxima, because one would wait for itself. */
INLINE float row_highest(const float *x, ptrdiff_t N) {
    v16 low = v_set1(-INFINITY), m[4] = {low, low, low, low};
    ptrdiff_t j = 0;
    for (; j + 64 <= N; j += 64)
        for (int k = 0; k < 4; k++) m[k] = v_max(v_load(x + j + 16 * k), m[k]);
    for (; j + 16 <= N; j += 16) m[0] = v_max(v_load(x + j), m[0]);
    if (j < N) m[1] = v_max(v_select(m_first((int)(N - j)), v_load_n(x + j, (int)(N - j)), low), m[1]);
    return v_highest(v_max(v_max(m[0], m[1]), v_max(m[2], m[3])));
}

/* Sum of e_j = exp(x_j - m) for m >= all x_j; e is kept unless it is NULL. NaN if a NaN is among them, or m is infinite. */
INLINE double row_exp_sum(float *e, const float *x, float m, ptrdiff_t N) {
    v16 top = v_set1(m);
    double total = 0;
    for (ptrdiff_t begin = 0; begin < N; begin += SUM_BLOCK) {
        ptrdiff_t j = begin, end = block_end(begin, N);
        v16 lanes = v_zero();
        for (; j + 16 <= end; j += 16) {
            v16 value = v_exp_negative(v_sub(v_load(x + j), top));
            if (e) v_store(e + j, value);
            lanes = v_add(lanes, value);
        }
        if (j < end) {
            int count = (int)(end - j);
            v16 value = v_exp_negative(v_sub(v_load_n(x + j, count), top));
            if (e) v_store_n(e + j, value, count);
            lanes = v_add(lanes, v_select(m_first(count), value, v_zero()));
        }
        total += (double)v_sum(lanes);
    }
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
    for (ptrdiff_t j = 0; j < N; j += 16) v_store_up_to(y + j, v_mul(v_load_up_to(y + j, N - j), v_set1(factor)), N - j);
}
#endif
