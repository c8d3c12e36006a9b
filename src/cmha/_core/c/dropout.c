/*
Dropout (Srivastava et al. 2014), scaled while training so that nothing changes afterwards.

    y_i = x_i / (1 - p)   where the draw of element first + i is not below p
        = 0               elsewhere, whatever x_i is

The backward pass is the same function of dy: the draws (philox.h) depend on seed, stream and index alone.
*/
#include "variant.h"
#include "philox.h"

/* Up to 16 elements, from any index on. */
static void dropout_few(float *y, const float *x, uint64_t seed, uint64_t stream, uint64_t first, int n, float p) {
    float factor[16];
    dropout_factors(factor, seed, stream, first, n, p);
    for (int i = 0; i < n; i++) y[i] = factor[i] != 0.0f ? x[i] * factor[i] : 0.0f;
}

/* All of a group; dropped elements by their bits, so that NaN becomes 0 too. */
static void dropout_group(float *restrict y, const float *restrict x, const uint32_t *restrict draws, uint32_t lowest,
                          float scale) {
    for (int i = 0; i < 4 * PHILOX_GROUP; i++) y[i] = f_from_bits(f_bits(x[i] * scale) & (0u - (uint32_t)(draws[i] >= lowest)));
}

void KERNEL_NAME(dropout)(float *y, const float *x, ptrdiff_t n, float p, uint64_t seed, uint64_t stream,
                          uint64_t first, int threads) {
    const uint64_t threshold = dropout_threshold(p);
    const float scale = dropout_scale(p);
    if (threshold > UINT32_MAX) { /* p = 1: the threshold does not fit into the 32 bits compared below */
        memset(y, 0, (size_t)n * sizeof(float));
        return;
    }
    CMHA_PARALLEL(threads, {
        const uint32_t lowest = (uint32_t)threshold;
        ptrdiff_t i, end;
        uint32_t draws[4 * PHILOX_GROUP];
        thread_share(n, 4 * PHILOX_GROUP, &i, &end);
        const int head = (int)(-(first + (uint64_t)i) & 3); /* up to the next whole block */
        if (head && i < end) {
            const int few = end - i < head ? (int)(end - i) : head;
            dropout_few(y + i, x + i, seed, stream, first + (uint64_t)i, few, p);
            i += few;
        }
        for (; i + 4 * PHILOX_GROUP <= end; i += 4 * PHILOX_GROUP) {
            philox_group(draws, seed, stream, (first + (uint64_t)i) >> 2);
            dropout_group(y + i, x + i, draws, lowest, scale);
        }
        for (; i < end; i += 16) {
            const int few = end - i < 16 ? (int)(end - i) : 16;
            dropout_few(y + i, x + i, seed, stream, first + (uint64_t)i, few, p);
        }
    })
}
