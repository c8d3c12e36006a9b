/*
Layer normalisation (Ba, Kiros & Hinton 2016, arXiv:1607.06450) of the rows of x (M, N); gamma, beta (N).

    forward    x_hat = (x - mean) / sigma,   sigma^2 = (sum_j (x_j - mean)^2) / N + eps
               y     = x_hat * gamma + beta
    backward   g      = dy * gamma
               dx     = (g - mean_j(g) - x_hat * mean_j(g * x_hat)) / sigma
               dgamma = sum over rows of dy * x_hat,   dbeta = sum over rows of dy

The mean is summed in double and kept as two floats, so that x - mean is right even where mean >> sigma; the variance is
a second pass (the one-pass E[x^2] - E[x]^2 cancels to nothing there). stats (M, 3) = mean high, mean low, 1 / sigma is
what backward needs besides x. Sums are in the order of sums.h. Threads take rows, for dgamma and dbeta columns.
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

INLINE void input_gradient(float *dx, const float *dy, const float *x, const float *gamma, const row_stats *s,
                           v16 g_mean, v16 gx_mean, int width) {
    v16 g = v_mul(part_load(dy, width), part_load(gamma, width)), x_hat = normalised(part_load(x, width), s);
    part_store(dx, v_mul(s->inverse, v_sub(v_sub(g, g_mean), v_mul(x_hat, gx_mean))), width);
}

static void backward_row(float *restrict dx, const float *restrict dy, const float *restrict x,
                         const float *restrict stats, const float *restrict gamma, ptrdiff_t N) {
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
    ptrdiff_t j = 0;
    for (; j + 16 <= N; j += 16) input_gradient(dx + j, dy + j, x + j, gamma + j, &s, g_mean, gx_mean, 16);
    if (j < N) input_gradient(dx + j, dy + j, x + j, gamma + j, &s, g_mean, gx_mean, (int)(N - j));
}

/* dgamma and dbeta of `width` <= SUM_STRIP columns: sums over rows, term number = row number. */
static void backward_strip(float *dgamma, float *dbeta, const float *dy, const float *x, const float *stats,
                           ptrdiff_t M, ptrdiff_t N, ptrdiff_t width) {
    float gamma_lanes[16 * SUM_STRIP], beta_lanes[16 * SUM_STRIP];
    double gamma_totals[SUM_STRIP] = {0}, beta_totals[SUM_STRIP] = {0};
    for (ptrdiff_t block = 0; block < M; block += SUM_BLOCK) {
        strip_begin(gamma_lanes);
        strip_begin(beta_lanes);
        for (ptrdiff_t i = block; i < smaller(block + SUM_BLOCK, M); i++) {
            const row_stats s = stats_of(stats + 3 * i);
            for (ptrdiff_t c = 0; c < width; c += 16) {
                const int part = (int)smaller(16, width - c);
                v16 d = part_load(dy + i * N + c, part);
                strip_add(beta_lanes, i, c, d);
                strip_add(gamma_lanes, i, c, v_mul(d, normalised(part_load(x + i * N + c, part), &s)));
            }
        }
        strip_end(gamma_totals, gamma_lanes, width);
        strip_end(beta_totals, beta_lanes, width);
    }
    for (ptrdiff_t c = 0; c < width; c++) {
        if (dgamma) dgamma[c] = (float)gamma_totals[c];
        if (dbeta) dbeta[c] = (float)beta_totals[c];
    }
}

void KERNEL_NAME(layer_norm_backward)(float *dx, float *dgamma, float *dbeta, const float *dy, const float *x,
                                      const float *stats, const float *gamma, ptrdiff_t M, ptrdiff_t N, int threads) {
    CMHA_PARALLEL(threads, {
        ptrdiff_t begin, end;
        if (dgamma || dbeta) {
            thread_share(N, 16, &begin, &end);
            for (ptrdiff_t j = begin; j < end; j += SUM_STRIP)
                backward_strip(dgamma ? dgamma + j : NULL, dbeta ? dbeta + j : NULL, dy + j, x + j, stats, M, N,
                               smaller(SUM_STRIP, end - j));
        }
        if (dx) {
            thread_share(M, 1, &begin, &end);
            for (ptrdiff_t i = begin; i < end; i++)
                backward_row(dx + i * N, dy + i * N, x + i * N, stats + 3 * i, gamma, N);
        }
    })
}
