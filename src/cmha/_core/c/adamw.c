/*
AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101), one step of many parameters, in PyTorch's order.

    g = g * grad_scale
    p = p - lr * weight_decay * p                        decay first, and apart from the gradient
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g^2
    p = p - lr * (m / correction1) / (sqrt(v / correction2) + eps),    correction = 1 - beta^step

The factors of the formula are computed in double and rounded once (1 - beta2 from a float beta2 would be off by 5e-5).
Both things that are taken from p are added before, so that p is rounded once: with p * float(1 - lr * weight_decay) it
would be three times. lr = 0 leaves p's bits alone, weight_decay = 0 does not multiply.
*/
#include "variant.h"
#include "sums.h"

typedef struct { float shrink, beta1, rest1, beta2, rest2, step, root, eps, grad_scale; } adamw_factors;

/* Constant flags make three loops without a test inside. */
INLINE void adamw_part(float *restrict p, float *restrict m, float *restrict v, const float *restrict g, ptrdiff_t n,
                       const adamw_factors *f, int decays, int moves) {
    const adamw_factors k = *f;
    for (ptrdiff_t i = 0; i < n; i++) {
        const float gradient = g[i] * k.grad_scale;
        const float mean = k.beta1 * m[i] + k.rest1 * gradient;
        const float square = k.beta2 * v[i] + k.rest2 * gradient * gradient;
        m[i] = mean;
        v[i] = square;
        if (moves) {
            const float update = k.step * mean / (sqrtf(square) * k.root + k.eps);
            p[i] -= decays ? k.shrink * p[i] + update : update;
        }
    }
}

/* Threads share the elements of all parameters, in pieces of 16: a model has many small ones. */
void KERNEL_NAME(adamw)(const cmha_adamw_part *parts, ptrdiff_t count, double lr, double beta1, double beta2, double eps,
                        double weight_decay, double correction1, double correction2, double grad_scale, int threads) {
    const adamw_factors factors = {
        .shrink = (float)(lr * weight_decay), .step = (float)(lr / correction1),
        .root = (float)(1.0 / sqrt(correction2)), .beta1 = (float)beta1, .rest1 = (float)(1.0 - beta1),
        .beta2 = (float)beta2, .rest2 = (float)(1.0 - beta2), .eps = (float)eps, .grad_scale = (float)grad_scale};
    ptrdiff_t total = 0;
    for (ptrdiff_t i = 0; i < count; i++) total += (parts[i].n + 15) / 16 * 16;
    CMHA_PARALLEL(threads, {
        ptrdiff_t begin, end, first = 0;
        thread_share(total, 16, &begin, &end);
        for (ptrdiff_t i = 0; i < count && first < end; i++) {
            const cmha_adamw_part *x = &parts[i];
            const ptrdiff_t from = begin > first ? begin - first : 0, to = smaller(end - first, x->n), n = to - from;
            first += (x->n + 15) / 16 * 16;
            if (n <= 0) continue;
            float *p = x->p + from, *m = x->m + from, *v = x->v + from;
            const float *g = x->g + from;
            if (lr == 0) adamw_part(p, m, v, g, n, &factors, 0, 0);
            else if (weight_decay == 0) adamw_part(p, m, v, g, n, &factors, 0, 1);
            else adamw_part(p, m, v, g, n, &factors, 1, 1);
        }
    })
}
