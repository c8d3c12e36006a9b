/*
Layer normalisation (Ba, Kiros & Hinton 2016, arXiv:1607.06450) of the rows of x (M, N); gamma, beta (N).

    forward    x_hat = (x - mean) / sigma,   sigma^2 = (sum_j (x_j - mean)^2) / N + eps
               y     = x_hat * gamma + beta
    backward   g      = dy * gamma
               dx     = (g - mean_j(g) - x_hat * mean_j(g * x_hat)) / sigma
               dgamma = sum over rows of dy * x_hat,   dbeta = sum over rows of dy

The mean is summed in double and kept as two floats, so that x - mean is right even where mean >> sigma; the variance is
a second pass (the one-pass E[x^2] - E[x]^2 cancels to nothing there). stats (M, 3) = mean high, mean low, 1 / sigma is
what backward needs besides x. Sums are in the order of sums.h. Threads take rows; in backward all rows of one lane of
dgamma's and dbeta's sums (every sixteenth of a block of 512), and then columns, to add the lanes.
*/
#include "variant.h"
#include "sums.h"

/* What all lanes of a row share. */
typedef struct { v16 high, low, inverse; } row_stats;

INLINE row_stats stats_of(const float *stats) {
    return (row_stats){v_set1(stats[0]), v_set1(stats[1]), v_set1(stats[2])};
}
INLINE v16 centred(v16 x, const row_stats *s) { return v_sub(v_sub(x, s->high), s->low); }
INLINE v16 normalised(v16 x, const row_stats *s) { return v_mul(centred(x, s), s->inverse); }

INLINE void scale_and_shift(float *y, v16 x_hat, const float *gamma, const float *beta, int width) {
    v16 g = part_load(gamma, width);
    part_store(y, beta ? v_fma(x_hat, g, part_load(beta, width)) : v_mul(x_hat, g), width);
}

static void forward_row(float *restrict y, float *restrict stats, const float *restrict x, const float *restrict gamma,
                        const float *restrict beta, ptrdiff_t N, float eps) {
    double squares = 0;
    split_mean(double_sum(x, N) / (double)N, &stats[0], &stats[1]);
    row_stats s = {v_set1(stats[0]), v_set1(stats[1]), v_zero()};
#define C centred(part_load(x + i, width), &s)
    LANE_SUM(squares, N, part_keep(v_mul(C, C), width))
#undef C
    stats[2] = (float)(1.0 / sqrt(squares / (double)N + (double)eps));
    s.inverse = v_set1(stats[2]);
    ptrdiff_t j = 0;
    for (; j + 16 <= N; j += 16)
        scale_and_shift(y + j, normalised(v_load(x + j), &s), gamma + j, beta ? beta + j : NULL, 16);
    if (j < N) {
        const int width = (int)(N - j);
        scale_and_shift(y + j, normalised(part_load(x + j, width), &s), gamma + j, beta ? beta + j : NULL, width);
    }
}

void KERNEL_NAME(layer_norm_forward)(float *y, float *stats, const float *x, const float *gamma, const float *beta,
                                     ptrdiff_t M, ptrdiff_t N, float eps, int threads) {
    CMHA_PARALLEL(threads, {
        ptrdiff_t begin, end;
        thread_share(M, 1, &begin, &end);
        for (ptrdiff_t i = begin; i < end; i++) forward_row(y + i * N, stats + 3 * i, x + i * N, gamma, beta, N, eps);
    })
}

/* The two row sums of dx in one pass, g and g * x_hat; absent lanes are 0 whatever x_hat has become there. */
INLINE void add_products(v16 *g_lanes, v16 *gx_lanes, const float *dy, const float *x, const float *gamma,
                         const row_stats *s, int width) {
    v16 g = v_mul(part_load(dy, width), part_load(gamma, width));
    *g_lanes = v_add(*g_lanes, g);
    *gx_lanes = v_add(*gx_lanes, part_keep(v_mul(g, normalised(part_load(x, width), s)), width));
}

/* dx, and the row's terms of dbeta and dgamma added to their lane. */
INLINE void input_gradient(float *dx, float *beta_lane, float *gamma_lane, const float *dy, const float *x,
                           const float *gamma, const row_stats *s, v16 g_mean, v16 gx_mean, int width) {
    v16 d = part_load(dy, width), g = v_mul(d, part_load(gamma, width)), x_hat = normalised(part_load(x, width), s);
    part_store(dx, v_mul(s->inverse, v_sub(v_sub(g, g_mean), v_mul(x_hat, gx_mean))), width);
    part_store(beta_lane, v_add(part_load(beta_lane, width), d), width);
    part_store(gamma_lane, v_add(part_load(gamma_lane, width), v_mul(d, x_hat)), width);
}

static void backward_row(float *restrict dx, float *restrict beta_lane, float *restrict gamma_lane,
                         const float *restrict dy, const float *restrict x, const float *restrict stats,
                         const float *restrict gamma, ptrdiff_t N) {
    const row_stats s = stats_of(stats);
    double g_total = 0, gx_total = 0;
    for (ptrdiff_t block = 0; block < N; block += SUM_BLOCK) {
        const ptrdiff_t stop = smaller(block + SUM_BLOCK, N);
        v16 g_lanes = v_zero(), gx_lanes = v_zero();
        ptrdiff_t j = block;
        for (; j + 16 <= stop; j += 16) add_products(&g_lanes, &gx_lanes, dy + j, x + j, gamma + j, &s, 16);
        if (j < stop) add_products(&g_lanes, &gx_lanes, dy + j, x + j, gamma + j, &s, (int)(stop - j));
        g_total += (double)v_sum(g_lanes);
        gx_total += (double)v_sum(gx_lanes);
    }
    const v16 g_mean = v_set1((float)(g_total / (double)N)), gx_mean = v_set1((float)(gx_total / (double)N));
#define ROW(width) \
    input_gradient(dx + j, beta_lane + j, gamma_lane + j, dy + j, x + j, gamma + j, &s, g_mean, gx_mean, width)
    ptrdiff_t j = 0;
    for (; j + 16 <= N; j += 16) ROW(16);
    if (j < N) ROW((int)(N - j));
#undef ROW
}

/* `width` <= 16 columns of y = the sums whose lanes are rows of `lanes`, 16 to a block, `row` floats apart. */
static void add_lanes(float *y, const float *lanes, ptrdiff_t row, ptrdiff_t blocks, int width) {
    d16 total = d_zero();
    for (ptrdiff_t b = 0; b < blocks; b++, lanes += 16 * row) {
        v16 r[16];
        for (int k = 0; k < 16; k++) r[k] = part_load(lanes + k * row, width);
        for (int half = 8; half >= 1; half /= 2)
            for (int k = 0; k < half; k++) r[k] = v_add(r[k], r[k + half]);
        total = d_add(total, d_from(r[0]));
    }
    float sums[16];
    d_store_floats(sums, total);
    memcpy(y, sums, sizeof(float) * (size_t)width);
}

void KERNEL_NAME(layer_norm_backward)(float *dx, float *dgamma, float *dbeta, const float *dy, const float *x,
                                      const float *stats, const float *gamma, ptrdiff_t M, ptrdiff_t N, float *lanes,
                                      int threads) {
    const ptrdiff_t blocks = (M + SUM_BLOCK - 1) / SUM_BLOCK;
    CMHA_PARALLEL(threads, {
        ptrdiff_t begin, end;
        thread_share(16 * blocks, 1, &begin, &end);
        for (ptrdiff_t u = begin; u < end; u++) { /* lane u % 16 of block u / 16 */
            float *beta_lane = lanes + u * 2 * N, *gamma_lane = beta_lane + N;
            const ptrdiff_t stop = smaller((u / 16 + 1) * SUM_BLOCK, M);
            memset(beta_lane, 0, sizeof(float) * (size_t)(2 * N));
            for (ptrdiff_t i = u / 16 * SUM_BLOCK + u % 16; i < stop; i += 16)
                backward_row(dx + i * N, beta_lane, gamma_lane, dy + i * N, x + i * N, stats + 3 * i, gamma, N);
        }
    })
    CMHA_PARALLEL(threads, {
        ptrdiff_t begin, end;
        thread_share(N, 16, &begin, &end);
        for (ptrdiff_t j = begin; j < end; j += 16) {
            const int width = (int)smaller(16, end - j);
            add_lanes(dbeta + j, lanes + j, 2 * N, blocks, width);
            add_lanes(dgamma + j, lanes + N + j, 2 * N, blocks, width);
        }
    })
}
