/*
Sums along an axis in the one order they have everywhere (docs/order-of-sums.md): term i goes to lane i mod 16 of a
block of 512; a block's 16 lanes are added by a fixed tree; block totals are added in double, in order, from 0.

    rows      the terms of one sum follow each other: 16 lanes are one vector          LANE_SUM, double_sum
    columns   each column of a strip is a sum of its own, terms one row apart: the lanes are 16 rows of scratch, and a
              vector runs over columns; the same additions for each column as a row would get          strip_*
*/
#ifndef CMHA_SUMS_H
#define CMHA_SUMS_H

#include "sizes.h"

#define SUM_BLOCK 512
#define SUM_STRIP 64 /* columns: 16 lanes of them are 4 kB, which stay in the nearest cache */

/* The first `width` lanes, of p and of a; the others 0. With a constant 16 the test is gone. */
INLINE v16 part_load(const float *p, int width) { return width < 16 ? v_load_n(p, width) : v_load(p); }
INLINE v16 part_keep(v16 a, int width) { return width < 16 ? v_select(m_first(width), a, v_zero()) : a; }
INLINE void part_store(float *p, v16 a, int width) {
    if (width < 16) v_store_n(p, a, width);
    else v_store(p, a);
}

/* total += the sum of TERM, an expression in i (of the first lane) and width (how many lanes exist; the others must be
   0: a lane never holds -0, so adding 0 changes nothing). */
#define LANE_SUM(total, N, TERM)                                              \
    for (ptrdiff_t block = 0; block < (N); block += SUM_BLOCK) {              \
        const ptrdiff_t stop = smaller(block + SUM_BLOCK, N);                 \
        ptrdiff_t i = block;                                                  \
        v16 lanes = v_zero();                                                 \
        for (; i + 16 <= stop; i += 16) {                                     \
            enum { width = 16 };                                              \
            lanes = v_add(lanes, TERM);                                       \
        }                                                                     \
        if (i < stop) {                                                       \
            const int width = (int)(stop - i);                                \
            lanes = v_add(lanes, TERM);                                       \
        }                                                                     \
        total += (double)v_sum(lanes);                                        \
    }

/* Terms of x, or of x^2 (exact in double), for 16 lanes. */
INLINE d16 double_terms(v16 x, int squares) {
    const d16 terms = d_from(x);
    return squares ? d_mul(terms, terms) : terms;
}

/* One block of n <= 512 terms, lanes in double. */
INLINE double double_block(const float *x, ptrdiff_t n, int squares) {
    d16 lanes = d_zero();
    ptrdiff_t i = 0;
    for (; i + 16 <= n; i += 16) lanes = d_add(lanes, double_terms(v_load(x + i), squares));
    if (i < n) lanes = d_add(lanes, double_terms(v_load_n(x + i, (int)(n - i)), squares));
    return d_sum(lanes);
}

INLINE double double_sum(const float *x, ptrdiff_t n) {
    double total = 0;
    for (ptrdiff_t i = 0; i < n; i += SUM_BLOCK) total += double_block(x + i, smaller(SUM_BLOCK, n - i), 0);
    return total;
}

/* A mean in double as two floats, so that x - mean keeps its digits when the mean is large: (x - high) - low. */
INLINE void split_mean(double mean, float *high, float *low) {
    *high = (float)mean;
    *low = (float)(mean - (double)*high);
}

/* Columns. lanes is [16][SUM_STRIP], zeroed by strip_begin at the start of a block; strip_add adds the terms of row i
   for columns c .. c + 15; strip_end adds the block to totals. */
INLINE void strip_begin(float *lanes) { memset(lanes, 0, 16 * SUM_STRIP * sizeof(float)); }
INLINE void strip_add(float *lanes, ptrdiff_t i, ptrdiff_t c, v16 term) {
    float *lane = lanes + (i & 15) * SUM_STRIP + c;
    v_store(lane, v_add(v_load(lane), term));
}
static inline void strip_end(double *totals, float *lanes, ptrdiff_t width) {
    for (int half = 8; half >= 1; half /= 2)
        for (int k = 0; k < half; k++)
            for (ptrdiff_t c = 0; c < SUM_STRIP; c++) lanes[k * SUM_STRIP + c] += lanes[(k + half) * SUM_STRIP + c];
    for (ptrdiff_t c = 0; c < width; c++) totals[c] += (double)lanes[c];
}
#endif
