/*
Reductions over the middle axis: x (outer, n, inner) -> y (outer, inner).

    sum       y = (sum_i x_i) / divisor                one rounding, at the end
    var       y = (sum_i (x_i - mean)^2) / n           the mean in double, then a second pass
    extreme   y = max_i x_i or min_i x_i, and its first position; NaN counts as the largest and as the smallest

Sums are in the order of sums.h, the same for a row (inner = 1) and for a column. Threads take whole outputs.
*/
#include "variant.h"
#include "sums.h"

/* The outputs in groups of at most 16 neighbours: groups of one outer index follow each other. */
static ptrdiff_t groups_of(ptrdiff_t inner) { return (inner + 15) / 16; }

/* The next strip of columns of one outer index, at most `widest` (a multiple of 16), for groups *group .. end - 1. */
static ptrdiff_t take_strip(ptrdiff_t *group, ptrdiff_t end, ptrdiff_t inner, ptrdiff_t widest, ptrdiff_t *outer_index,
                            ptrdiff_t *column) {
    const ptrdiff_t groups = groups_of(inner);
    *outer_index = *group / groups;
    *column = *group % groups * 16;
    const ptrdiff_t width = smaller(smaller(inner - *column, widest), (end - *group) * 16);
    *group += groups_of(width);
    return width;
}

static double row_sum(const float *x, ptrdiff_t n) {
    double total = 0;
    LANE_SUM(total, n, part_load(x + i, width))
    return total;
}

static void strip_sum(double *totals, const float *x, ptrdiff_t n, ptrdiff_t inner, ptrdiff_t width) {
    float lanes[16 * SUM_STRIP];
    memset(totals, 0, SUM_STRIP * sizeof(double));
    for (ptrdiff_t block = 0; block < n; block += SUM_BLOCK) {
        strip_begin(lanes);
        for (ptrdiff_t i = block; i < smaller(block + SUM_BLOCK, n); i++)
            for (ptrdiff_t c = 0; c < width; c += 16)
                strip_add(lanes, i, c, part_load(x + i * inner + c, (int)smaller(16, width - c)));
        strip_end(totals, lanes, width);
    }
}

void KERNEL_NAME(sum)(float *y, const float *x, ptrdiff_t outer, ptrdiff_t n, ptrdiff_t inner, double divisor,
                      int threads) {
    CMHA_PARALLEL(threads, {
        ptrdiff_t group, end, o, column;
        double totals[SUM_STRIP];
        thread_share(outer * groups_of(inner), 1, &group, &end);
        while (group < end) {
            if (inner == 1) {
                y[group] = (float)(row_sum(x + group * n, n) / divisor);
                group++;
                continue;
            }
            ptrdiff_t width = take_strip(&group, end, inner, SUM_STRIP, &o, &column);
            strip_sum(totals, x + o * n * inner + column, n, inner, width);
            for (ptrdiff_t c = 0; c < width; c++) y[o * inner + column + c] = (float)(totals[c] / divisor);
        }
    })
}

static float row_var(const float *x, ptrdiff_t n) {
    double total = 0;
    float high, low;
    split_mean(double_sum(x, n) / (double)n, &high, &low);
    const v16 h = v_set1(high), l = v_set1(low);
#define C v_sub(v_sub(part_load(x + i, width), h), l)
    LANE_SUM(total, n, part_keep(v_mul(C, C), width))
#undef C
    return (float)(total / (double)n);
}

/* At most 16 columns, both passes as row_var. */
static void strip_var(float *y, const float *x, ptrdiff_t n, ptrdiff_t inner, int width) {
    double totals[SUM_STRIP] = {0};
    for (ptrdiff_t block = 0; block < n; block += SUM_BLOCK) {
        double lanes[16][16] = {{0}}; /* lane, column */
        for (ptrdiff_t i = block; i < smaller(block + SUM_BLOCK, n); i++)
            for (int c = 0; c < width; c++) lanes[i & 15][c] += (double)x[i * inner + c];
        for (int half = 8; half >= 1; half /= 2)
            for (int k = 0; k < half; k++)
                for (int c = 0; c < 16; c++) lanes[k][c] += lanes[k + half][c];
        for (int c = 0; c < width; c++) totals[c] += lanes[0][c];
    }
    float high[16] = {0}, low[16] = {0}, lanes[16 * SUM_STRIP];
    for (int c = 0; c < width; c++) split_mean(totals[c] / (double)n, &high[c], &low[c]);
    const v16 h = v_load(high), l = v_load(low);
    memset(totals, 0, sizeof totals);
    for (ptrdiff_t block = 0; block < n; block += SUM_BLOCK) {
        strip_begin(lanes);
        for (ptrdiff_t i = block; i < smaller(block + SUM_BLOCK, n); i++) {
            v16 centred = v_sub(v_sub(part_load(x + i * inner, width), h), l);
            strip_add(lanes, i, 0, v_mul(centred, centred));
        }
        strip_end(totals, lanes, width);
    }
    for (int c = 0; c < width; c++) y[c] = (float)(totals[c] / (double)n);
}

void KERNEL_NAME(var)(float *y, const float *x, ptrdiff_t outer, ptrdiff_t n, ptrdiff_t inner, int threads) {
    CMHA_PARALLEL(threads, {
        ptrdiff_t group, end, o, column;
        thread_share(outer * groups_of(inner), 1, &group, &end);
        while (group < end) {
            if (inner == 1) {
                y[group] = row_var(x + group * n, n);
                group++;
                continue;
            }
            ptrdiff_t width = take_strip(&group, end, inner, 16, &o, &column);
            strip_var(y + o * inner + column, x + o * n * inner + column, n, inner, (int)width);
        }
    })
}

/* Two passes: the extreme value (and is there a NaN?), then the first place that has it. */
static ptrdiff_t row_extreme(const float *x, ptrdiff_t n, int sign) {
    const v16 s = v_set1((float)sign);
    v16 best = v_set1(-INFINITY);
    unsigned numbers = 0xffff;
    for (ptrdiff_t i = 0; i < n; i += 16) {
        const int width = (int)smaller(16, n - i);
        v16 v = part_load(x + i, width);
        numbers &= m_bits(v_eq(v, v));
        v = v_mul(v, s);
        best = v_max(width < 16 ? v_select(m_first(width), v, v_set1(-INFINITY)) : v, best);
    }
    const v16 wanted = v_set1(v_highest(best) * (float)sign);
    for (ptrdiff_t i = 0; i < n; i += 16) {
        const int width = (int)smaller(16, n - i);
        v16 v = part_load(x + i, width);
        unsigned found = numbers == 0xffff ? m_bits(v_eq(v, wanted)) : ~m_bits(v_eq(v, v));
        found &= m_bits(m_first(width));
        for (int k = 0; found; k++, found >>= 1)
            if (found & 1) return i + k;
    }
    return 0;
}

void KERNEL_NAME(extreme)(float *y, int64_t *index, const float *x, int sign, ptrdiff_t outer, ptrdiff_t n,
                          ptrdiff_t inner, int threads) {
    CMHA_PARALLEL(threads, {
        ptrdiff_t group, end, o, column;
        thread_share(outer * groups_of(inner), 1, &group, &end);
        while (group < end) {
            if (inner == 1) {
                index[group] = row_extreme(x + group * n, n, sign);
                y[group] = x[group * n + index[group]];
                group++;
                continue;
            }
            ptrdiff_t width = take_strip(&group, end, inner, SUM_STRIP, &o, &column);
            const float *x_o = x + o * n * inner + column;
            float *y_o = y + o * inner + column;
            int64_t *index_o = index + o * inner + column;
            for (ptrdiff_t c = 0; c < width; c++) y_o[c] = x_o[c], index_o[c] = 0;
            for (ptrdiff_t i = 1; i < n; i++)
                for (ptrdiff_t c = 0; c < width; c++) {
                    const float v = x_o[i * inner + c], best = y_o[c];
                    const int further = sign > 0 ? v > best : v < best;
                    if (further | ((v != v) & (best == best))) y_o[c] = v, index_o[c] = i;
                }
        }
    })
}

/* Threads take rows of dx, of any outer index: each clears its own and sets what falls into them. */
void KERNEL_NAME(extreme_backward)(float *dx, const float *dy, const int64_t *index, ptrdiff_t outer, ptrdiff_t n,
                                   ptrdiff_t inner, int threads) {
    CMHA_PARALLEL(threads, {
        ptrdiff_t begin, end;
        thread_share(outer * n, 1, &begin, &end);
        if (begin < end && inner > 0) {
            memset(dx + begin * inner, 0, (size_t)((end - begin) * inner) * sizeof(float));
            for (ptrdiff_t o = begin / n; o * n < end; o++)
                for (ptrdiff_t c = 0; c < inner; c++) {
                    const ptrdiff_t row = o * n + index[o * inner + c];
                    if (row >= begin && row < end) dx[row * inner + c] = dy[o * inner + c];
                }
        }
    })
}

void KERNEL_NAME(sum_of_squares)(double *y, const float *x, ptrdiff_t n, double *totals, int threads) {
    const ptrdiff_t blocks = (n + SUM_BLOCK - 1) / SUM_BLOCK;
    CMHA_PARALLEL(threads, {
        ptrdiff_t begin, end;
        thread_share(blocks, 1, &begin, &end);
        for (ptrdiff_t b = begin; b < end; b++)
            totals[b] = double_block(x + b * SUM_BLOCK, smaller(SUM_BLOCK, n - b * SUM_BLOCK), 1);
    })
    *y = 0;
    for (ptrdiff_t b = 0; b < blocks; b++) *y += totals[b];
}
