/*
Dropout (Srivastava et al. 2014), scaled while training so that nothing changes afterwards.

    y_i = x_i / (1 - p)   where the draw of element first + i is not below p
        = 0               elsewhere, whatever x_i is

The backward pass is the same function of dy: the draws (philox.h) depend on seed, stream and index alone.
*/
#include "variant.h"
#include "philox.h"

#define GROUP 32 /* Philox blocks side by side, 128 draws: loops of 16 are unrolled before they can become vectors */

/* The draws of blocks block .. block + GROUP - 1, the same numbers as philox() one by one. */
static void philox_group(uint32_t draws[4 * GROUP], uint64_t seed, uint64_t stream, uint64_t block) {
    uint32_t c0[GROUP], c1[GROUP], c2[GROUP], c3[GROUP], k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    for (int j = 0; j < GROUP; j++) {
        c0[j] = (uint32_t)(block + (uint64_t)j), c1[j] = (uint32_t)((block + (uint64_t)j) >> 32);
        c2[j] = (uint32_t)stream, c3[j] = (uint32_t)(stream >> 32);
    }
    for (int round = 0; round < 10; round++) {
        for (int j = 0; j < GROUP; j++) {
            const uint64_t p0 = (uint64_t)0xD2511F53u * c0[j], p1 = (uint64_t)0xCD9E8D57u * c2[j];
            c0[j] = (uint32_t)(p1 >> 32) ^ c1[j] ^ k0, c2[j] = (uint32_t)(p0 >> 32) ^ c3[j] ^ k1;
            c1[j] = (uint32_t)p1, c3[j] = (uint32_t)p0;
        }
        k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    for (int j = 0; j < GROUP; j++)
        draws[4 * j] = c0[j], draws[4 * j + 1] = c1[j], draws[4 * j + 2] = c2[j], draws[4 * j + 3] = c3[j];
}

/* Up to 16 elements, from any index on. */
static void dropout_few(float *y, const float *x, uint64_t seed, uint64_t stream, uint64_t first, int n, float p) {
    float factor[16];
    dropout_factors(factor, seed, stream, first, n, p);
    for (int i = 0; i < n; i++) y[i] = factor[i] != 0.0f ? x[i] * factor[i] : 0.0f;
}

/* All of a group; dropped elements by their bits, so that NaN becomes 0 too. */
static void dropout_group(float *restrict y, const float *restrict x, const uint32_t *restrict draws, uint32_t lowest,
                          float scale) {
    for (int i = 0; i < 4 * GROUP; i++) y[i] = f_from_bits(f_bits(x[i] * scale) & -(uint32_t)(draws[i] >= lowest));
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
        uint32_t draws[4 * GROUP];
        thread_share(n, 4 * GROUP, &i, &end);
        const int head = (int)(-(first + (uint64_t)i) & 3); /* up to the next whole block */
        if (head && i < end) {
            const int few = end - i < head ? (int)(end - i) : head;
            dropout_few(y + i, x + i, seed, stream, first + (uint64_t)i, few, p);
            i += few;
        }
        for (; i + 4 * GROUP <= end; i += 4 * GROUP) {
            philox_group(draws, seed, stream, (first + (uint64_t)i) >> 2);
            dropout_group(y + i, x + i, draws, lowest, scale);
        }
        for (; i < end; i += 16) {
            const int few = end - i < 16 ? (int)(end - i) : 16;
            dropout_few(y + i, x + i, seed, stream, first + (uint64_t)i, few, p);
        }
    })
}
