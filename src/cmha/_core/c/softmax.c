/*
Softmax and log-softmax over the last axis.

    forward    y_j  = exp(x_j - m) / S,   m = max_k x_k,   S = sum_k exp(x_k - m)     (kept as e_j times float(1 / S))
    backward   dx_j = y_j (dy_j - sum_k dy_k y_k)
    log        y_j  = (x_j - m) - log S;   dx_j = dy_j - exp(y_j) sum_k dy_k

x, y, dx, dy   (M, N), contiguous

All three sums are in the order of sums.h, rounded to float once; 1 / S and log S are taken from S in double. Threads
take whole rows.

A row of -inf only (every key masked) gives zeros, and -inf from log-softmax, with gradient 0; a NaN or +inf makes its
own row NaN.
*/
#include "variant.h"
#include "rows.h"

/* A row without a finite maximum, where x - m would be NaN: `nothing` unless there is a NaN. */
static void empty_row(float *y, const float *x, float nothing, ptrdiff_t N) {
    row_fill(y, row_has_nan(x, N) ? NAN : nothing, N);
}

static void softmax_row(float *restrict y, const float *restrict x, ptrdiff_t N) {
    float m = row_highest(x, N);
    if (m == -INFINITY) {
        empty_row(y, x, 0.0f, N);
        return;
    }
    double sum = row_exp_sum(y, x, m, N);
    row_scale(y, (float)(1.0 / sum), N);
}

void KERNEL_NAME(softmax_forward)(float *y, const float *x, ptrdiff_t M, ptrdiff_t N, int threads) {
    CMHA_PARALLEL(threads, {
        ptrdiff_t begin, end;
        thread_share(M, 1, &begin, &end);
        for (ptrdiff_t i = begin; i < end; i++) softmax_row(y + i * N, x + i * N, N);
    })
}

static void softmax_backward_row(float *restrict dx, const float *restrict dy, const float *restrict y, ptrdiff_t N) {
    double total = 0;
    LANE_SUM(total, N, v_mul(part_load(dy + i, width), part_load(y + i, width)))
    v16 mean = v_set1((float)total);
    for (ptrdiff_t j = 0; j < N; j += 16) {
        v16 centred = v_sub(v_load_up_to(dy + j, N - j), mean);
        v_store_up_to(dx + j, v_mul(v_load_up_to(y + j, N - j), centred), N - j);
    }
}

void KERNEL_NAME(softmax_backward)(float *dx, const float *dy, const float *y, ptrdiff_t M, ptrdiff_t N, int threads) {
    CMHA_PARALLEL(threads, {
        ptrdiff_t begin, end;
        thread_share(M, 1, &begin, &end);
        for (ptrdiff_t i = begin; i < end; i++) softmax_backward_row(dx + i * N, dy + i * N, y + i * N, N);
    })
}

static void log_softmax_row(float *restrict y, const float *restrict x, ptrdiff_t N) {
    float m = row_highest(x, N);
    if (m == -INFINITY) {
        empty_row(y, x, -INFINITY, N);
        return;
    }
    v16 top = v_set1(m), log_sum = v_set1((float)log_of(row_exp_sum(NULL, x, m, N)));
    for (ptrdiff_t j = 0; j < N; j += 16)
        v_store_up_to(y + j, v_sub(v_sub(v_load_up_to(x + j, N - j), top), log_sum), N - j);
}

void KERNEL_NAME(log_softmax_forward)(float *y, const float *x, ptrdiff_t M, ptrdiff_t N, int threads) {
    CMHA_PARALLEL(threads, {
        ptrdiff_t begin, end;
        thread_share(M, 1, &begin, &end);
        for (ptrdiff_t i = begin; i < end; i++) log_softmax_row(y + i * N, x + i * N, N);
    })
}

static void log_softmax_backward_row(float *restrict dx, const float *restrict dy, const float *restrict y,
                                     ptrdiff_t N) {
    if (row_highest(y, N) == -INFINITY && !row_has_nan(y, N)) {
        row_fill(dx, 0.0f, N);
        return;
    }
    double total = 0;
    LANE_SUM(total, N, part_load(dy + i, width))
    v16 minus_sum = v_set1(-(float)total);
    for (ptrdiff_t j = 0; j < N; j += 16) {
        v16 weight = v_exp_negative(v_load_up_to(y + j, N - j));
        v_store_up_to(dx + j, v_fma(weight, minus_sum, v_load_up_to(dy + j, N - j)), N - j);
    }
}

void KERNEL_NAME(log_softmax_backward)(float *dx, const float *dy, const float *y, ptrdiff_t M, ptrdiff_t N,
                                       int threads) {
    CMHA_PARALLEL(threads, {
        ptrdiff_t begin, end;
        thread_share(M, 1, &begin, &end);
        for (ptrdiff_t i = begin; i < end; i++) log_softmax_backward_row(dx + i * N, dy + i * N, y + i * N, N);
    })
}
