/*
Embedding: rows of a table, weight (V, D), looked up by ids (n).

    forward    y_i        = weight[ids_i]
    backward   dweight[v] = sum over all i with ids_i = v of dy_i, in ascending i
    add_rows   weight[ids_i] += rows_i, ids different from each other

Threads take tokens forward, columns backward: never tokens there, so that the order of the additions stays.
*/
#include "variant.h"

void KERNEL_NAME(embedding_forward)(float *y, const float *weight, const int64_t *ids, ptrdiff_t n, ptrdiff_t D,
                                    int threads) {
    CMHA_PARALLEL(threads, {
        ptrdiff_t begin, end;
        thread_share(n, 1, &begin, &end);
        for (ptrdiff_t i = begin; i < end; i++) memcpy(y + i * D, weight + ids[i] * D, (size_t)D * sizeof(float));
    })
}

void KERNEL_NAME(embedding_backward)(float *dweight, const float *dy, const int64_t *ids, ptrdiff_t n, ptrdiff_t V,
                                     ptrdiff_t D, int threads) {
    CMHA_PARALLEL(threads, {
        ptrdiff_t begin, end;
        thread_share(D, 16, &begin, &end);
        if (begin < end)
            for (ptrdiff_t v = 0; v < V; v++) memset(dweight + v * D + begin, 0, (size_t)(end - begin) * sizeof(float));
        for (ptrdiff_t i = 0; i < n; i++) {
            float *restrict to = dweight + ids[i] * D;
            const float *restrict from = dy + i * D;
            for (ptrdiff_t j = begin; j < end; j++) to[j] += from[j];
        }
    })
}

void KERNEL_NAME(embedding_add_rows)(float *weight, const float *rows, const int64_t *ids, ptrdiff_t n, ptrdiff_t D,
                                     int threads) {
    CMHA_PARALLEL(threads, {
        ptrdiff_t begin, end;
        thread_share(n, 1, &begin, &end);
        for (ptrdiff_t i = begin; i < end; i++)
            for (ptrdiff_t j = 0; j < D; j++) weight[ids[i] * D + j] += rows[i * D + j];
    })
}
