/*
Mean cross-entropy of logits against ids, and its gradient in the same pass.

    loss       = 1/count sum_i loss_i,   loss_i = log S_i - (x_it - m_i)
                 m_i = max_j x_ij,   S_i = sum_j exp(x_ij - m_i)
    dlogits_ij = (exp(x_ij - m_i) / S_i - [j = t]) / count

logits, dlogits   (M, V), contiguous
targets           (M): t = targets[i] in 0 .. V-1, or ignore_index: then row i counts nowhere, its gradient is exactly
                  0, and its logits are not looked at. No row that counts: loss 0, gradient 0.

Orders of sums: S_i as in sums.h. loss_i is a double; row i goes to lane i mod 16 of a block of 512 rows, sixteen double
lanes and the same tree, blocks added in order from 0.0 (an ignored row adds 0.0); one division, one rounding. The
gradient off the target is e_ij times float(1 / (S_i count)); on the target it is taken in double.

A row of -inf only has loss +inf and gradient 0; a NaN or +inf makes the row's loss and gradient NaN. Threads take rows.
*/
#include "variant.h"
#include "rows.h"

/* The exponentials are kept in the gradient's own row, so the logits are read twice, not three times. */
static double cross_entropy_row(float *dlogits, const float *x, int64_t target, double count, ptrdiff_t V) {
    float m = row_highest(x, V);
    if (m == -INFINITY) {
        int is_nan = row_has_nan(x, V);
        if (dlogits) row_fill(dlogits, is_nan ? NAN : 0.0f, V);
        return (double)(is_nan ? NAN : INFINITY);
    }
    double sum;
    if (dlogits) {
        sum = row_exp_sum(dlogits, x, m, V);
        float hit = dlogits[target];
        row_scale(dlogits, (float)(1.0 / (sum * count)), V);
        dlogits[target] = (float)(((double)hit / sum - 1.0) / count);
    } else {
        sum = row_exp_sum(NULL, x, m, V);
    }
    return log_of(sum) - ((double)x[target] - (double)m);
}

static double sum_rows(const double *rows, ptrdiff_t M) {
    double total = 0;
    for (ptrdiff_t block = 0; block < M; block += SUM_BLOCK) {
        ptrdiff_t stop = smaller(block + SUM_BLOCK, M);
        double lanes[16] = {0};
        for (ptrdiff_t i = block; i < stop; i++) lanes[(i - block) % 16] += rows[i];
        total += d_sum(d_load(lanes));
    }
    return total;
}

void KERNEL_NAME(cross_entropy)(float *loss, int64_t *count, float *dlogits, const float *logits,
                                const int64_t *targets, ptrdiff_t M, ptrdiff_t V, int64_t ignore_index, double *rows,
                                int threads) {
    int64_t counted = 0;
    for (ptrdiff_t i = 0; i < M; i++) counted += targets[i] != ignore_index;
    CMHA_PARALLEL(threads, {
        ptrdiff_t begin, end;
        thread_share(M, 1, &begin, &end);
        for (ptrdiff_t i = begin; i < end; i++) {
            float *gradient = dlogits ? dlogits + i * V : NULL;
            if (targets[i] != ignore_index) {
                rows[i] = cross_entropy_row(gradient, logits + i * V, targets[i], (double)counted, V);
            } else {
                rows[i] = 0.0;
                if (gradient) row_fill(gradient, 0.0f, V);
            }
        }
    })
    *count = counted;
    *loss = counted > 0 ? (float)(sum_rows(rows, M) / (double)counted) : 0.0f;
}
