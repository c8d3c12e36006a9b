/*
Counter-based random numbers: Philox 4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").

A draw is a function of (seed, stream, index) and nothing else, so dropout needs no stored mask and is the same for any
number of threads: block `index / 4` of the stream gives four 32-bit numbers, element `index` takes number index mod 4.
*/
#ifndef CMHA_PHILOX_H
#define CMHA_PHILOX_H

#include "simd.h"

INLINE void philox(uint32_t out[4], uint64_t seed, uint64_t stream, uint64_t block) {
    uint32_t c0 = (uint32_t)block, c1 = (uint32_t)(block >> 32), c2 = (uint32_t)stream, c3 = (uint32_t)(stream >> 32);
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    for (int round = 0; round < 10; round++) {
        uint64_t p0 = (uint64_t)0xD2511F53u * c0, p1 = (uint64_t)0xCD9E8D57u * c2;
        uint32_t n0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0, n2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c1 = (uint32_t)p1, c3 = (uint32_t)p0, c0 = n0, c2 = n2;
        k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    out[0] = c0, out[1] = c1, out[2] = c2, out[3] = c3;
}

/* Philox blocks side by side, 128 draws: loops of 16 are unrolled before they can become vectors. */
#define PHILOX_GROUP 32

/* The draws of blocks block .. block + PHILOX_GROUP - 1, the same numbers as philox() one by one. */
static inline void philox_group(uint32_t draws[4 * PHILOX_GROUP], uint64_t seed, uint64_t stream, uint64_t block) {
    uint32_t c0[PHILOX_GROUP], c1[PHILOX_GROUP], c2[PHILOX_GROUP], c3[PHILOX_GROUP];
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    for (int j = 0; j < PHILOX_GROUP; j++) {
        c0[j] = (uint32_t)(block + (uint64_t)j), c1[j] = (uint32_t)((block + (uint64_t)j) >> 32);
        c2[j] = (uint32_t)stream, c3[j] = (uint32_t)(stream >> 32);
    }
    for (int round = 0; round < 10; round++) {
        for (int j = 0; j < PHILOX_GROUP; j++) {
            const uint64_t p0 = (uint64_t)0xD2511F53u * c0[j], p1 = (uint64_t)0xCD9E8D57u * c2[j];
            c0[j] = (uint32_t)(p1 >> 32) ^ c1[j] ^ k0, c2[j] = (uint32_t)(p0 >> 32) ^ c3[j] ^ k1;
            c1[j] = (uint32_t)p1, c3[j] = (uint32_t)p0;
        }
        k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    for (int j = 0; j < PHILOX_GROUP; j++)
        draws[4 * j] = c0[j], draws[4 * j + 1] = c1[j], draws[4 * j + 2] = c2[j], draws[4 * j + 3] = c3[j];
}

/* A draw below this drops the element: P(draw < p * 2^32) = p. */
INLINE uint64_t dropout_threshold(float p) { return (uint64_t)((double)p * 4294967296.0); }
INLINE float dropout_scale(float p) { return p < 1 ? (float)(1.0 / (1.0 - (double)p)) : 0.0f; }

/* Factors (0 or 1 / (1 - p)) of elements first .. first + n - 1, n <= 16, into factor[0 .. n - 1]. */
INLINE void dropout_factors(float *factor, uint64_t seed, uint64_t stream, uint64_t first, int n, float p) {
    const uint64_t threshold = dropout_threshold(p);
    const float scale = dropout_scale(p);
    uint32_t draw[4];
    uint64_t block = ~(uint64_t)0;
    for (int i = 0; i < n; i++) {
        uint64_t index = first + (uint64_t)i;
        if (i == 0 || index >> 2 != block) philox(draw, seed, stream, block = index >> 2);
        factor[i] = draw[index & 3] < threshold ? 0.0f : scale;
    }
}

/* The same for n <= 4 * PHILOX_GROUP elements, a group at a time where the numbers of four elements begin with them;
   factor has room for whole vectors, the rest of the last one becomes 0. */
static inline void dropout_row(float *factor, uint64_t seed, uint64_t stream, uint64_t first, int n, float p) {
    const uint64_t threshold = dropout_threshold(p);
    const uint32_t lowest = (uint32_t)threshold, scale = threshold > UINT32_MAX ? 0 : f_bits(dropout_scale(p));
    const int skip = (int)(first & 3); /* numbers of the first block that belong to elements before */
    uint32_t draws[4 * PHILOX_GROUP];
    philox_group(draws, seed, stream, first >> 2);
    const int ready = n < 4 * PHILOX_GROUP - skip ? n : 4 * PHILOX_GROUP - skip;
    for (int i = 0; i < ready; i++) factor[i] = f_from_bits(scale & -(uint32_t)(draws[skip + i] >= lowest));
    if (ready < n) dropout_factors(factor + ready, seed, stream, first + (uint64_t)ready, n - ready, p);
    for (int i = n; i & 15; i++) factor[i] = 0.0f;
}
#endif
