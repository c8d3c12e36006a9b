/*
Copies: y[i0, i1, ...] = x[i0, i1, ...] for any strides of both (0 and negative ones of x too), and the two conversions.

The axes are taken in the order of y's strides, so that writes are as sequential as they can be. When the innermost one
moves whole elements in both, a row is a memcpy: (B, T, H, hd) -> (B, H, T, hd) is a memcpy of hd. When x is contiguous
along another axis (a transpose), those two axes are walked in blocks that stay in the cache.
*/
#include "variant.h"
#include "axes.h"

#define COPY_BLOCK 16 /* 16 x 16 floats: 16 cache lines of each side */

typedef uint8_t item1;
typedef uint32_t MAY_ALIAS item4; /* floats and ids are moved as bits */
typedef uint64_t MAY_ALIAS item8;

static ptrdiff_t distance(ptrdiff_t step) { return step < 0 ? -step : step; }

/* y[r, c] = x[r, c]; steps in elements. */
#define DEFINE_COPY_ROWS(item)                                                                                         \
    static void copy_rows_##item(item *y, const item *x, ptrdiff_t rows, ptrdiff_t n, ptrdiff_t y_row,                 \
                                 ptrdiff_t y_col, ptrdiff_t x_row, ptrdiff_t x_col) {                                  \
        if (x_col == 0 && y_col == 1) {                                                                                \
            for (ptrdiff_t r = 0; r < rows; r++)                                                                       \
                for (ptrdiff_t c = 0; c < n; c++) y[r * y_row + c] = x[r * x_row];                                     \
        } else if (distance(x_row) < distance(x_col)) {                                                                \
            for (ptrdiff_t r0 = 0; r0 < rows; r0 += COPY_BLOCK)                                                        \
                for (ptrdiff_t c0 = 0; c0 < n; c0 += COPY_BLOCK) {                                                     \
                    ptrdiff_t r1 = r0 + COPY_BLOCK < rows ? r0 + COPY_BLOCK : rows;                                    \
                    ptrdiff_t c1 = c0 + COPY_BLOCK < n ? c0 + COPY_BLOCK : n;                                          \
                    for (ptrdiff_t r = r0; r < r1; r++)                                                                \
                        for (ptrdiff_t c = c0; c < c1; c++) y[r * y_row + c * y_col] = x[r * x_row + c * x_col];       \
                }                                                                                                      \
        } else {                                                                                                       \
            for (ptrdiff_t r = 0; r < rows; r++)                                                                       \
                for (ptrdiff_t c = 0; c < n; c++) y[r * y_row + c * y_col] = x[r * x_row + c * x_col];                 \
        }                                                                                                              \
    }
DEFINE_COPY_ROWS(item1)
DEFINE_COPY_ROWS(item4)
DEFINE_COPY_ROWS(item8)

/* The last two axes. */
static void copy_rows(char *y, const char *x, ptrdiff_t itemsize, const axes_t *axes) {
    int r = axes->ndim - 2, c = axes->ndim - 1;
    ptrdiff_t rows = axes->shape[r], n = axes->shape[c];
    ptrdiff_t y_row = axes->step[0][r], y_col = axes->step[0][c], x_row = axes->step[1][r], x_col = axes->step[1][c];
    if (y_col == itemsize && x_col == itemsize) {
        for (ptrdiff_t i = 0; i < rows; i++) memcpy(y + i * y_row, x + i * x_row, (size_t)(n * itemsize));
        return;
    }
    y_row /= itemsize, y_col /= itemsize, x_row /= itemsize, x_col /= itemsize;
    if (itemsize == 4) copy_rows_item4((item4 *)y, (const item4 *)x, rows, n, y_row, y_col, x_row, x_col);
    else if (itemsize == 8) copy_rows_item8((item8 *)y, (const item8 *)x, rows, n, y_row, y_col, x_row, x_col);
    else copy_rows_item1((item1 *)y, (const item1 *)x, rows, n, y_row, y_col, x_row, x_col);
}

/* The axis along which x is densest becomes the row of the last two, beside y's own innermost axis. */
static void pair_axes(axes_t *axes) {
    int row = axes->ndim - 2;
    for (int d = row - 1; d >= 0; d--)
        if (axes->step[1][d] && distance(axes->step[1][d]) < distance(axes->step[1][row])) row = d;
    for (int d = row; d < axes->ndim - 2; d++) { /* one place inward; the others close up */
        ptrdiff_t length = axes->shape[d];
        axes->shape[d] = axes->shape[d + 1], axes->shape[d + 1] = length;
        for (int k = 0; k < 2; k++) {
            ptrdiff_t step = axes->step[k][d];
            axes->step[k][d] = axes->step[k][d + 1], axes->step[k][d + 1] = step;
        }
    }
}

void KERNEL_NAME(copy)(void *y, const void *x, ptrdiff_t itemsize, int ndim, const ptrdiff_t *shape,
                       const ptrdiff_t *y_strides, const ptrdiff_t *x_strides, int threads) {
    int order[CMHA_MAX_NDIM];
    for (int d = 0; d < ndim; d++) { /* insertion sort: y's strides descending, equal ones as they came */
        int place = d;
        for (; place > 0 && distance(y_strides[order[place - 1]]) < distance(y_strides[d]); place--)
            order[place] = order[place - 1];
        order[place] = d;
    }
    axes_t axes = axes_of(2);
    for (int d = 0; d < ndim; d++)
        axes_add(&axes, shape[order[d]],
                 (const ptrdiff_t[]){y_strides[order[d]] * itemsize, x_strides[order[d]] * itemsize});
    if (!axes_finish(&axes)) return;
    if (axes.step[1][axes.ndim - 1] != itemsize) pair_axes(&axes);
    CMHA_PARALLEL(threads, {
        axes_t part = axes;
        char *p[2] = {y, (char *)x};
        ptrdiff_t index[CMHA_MAX_NDIM] = {0};
        if (axes_part(&part, p))
            do copy_rows(p[0], p[1], itemsize, &part);
            while (axes_next(&part, index, p));
    })
}

void KERNEL_NAME(int64_to_float)(float *y, const int64_t *x, ptrdiff_t n, int threads) {
    CMHA_PARALLEL(threads, {
        ptrdiff_t begin, end;
        thread_share(n, 16, &begin, &end);
        for (ptrdiff_t i = begin; i < end; i++) y[i] = (float)x[i];
    })
}

void KERNEL_NAME(bool_to_float)(float *y, const uint8_t *x, ptrdiff_t n, int threads) {
    CMHA_PARALLEL(threads, {
        ptrdiff_t begin, end;
        thread_share(n, 16, &begin, &end);
        for (ptrdiff_t i = begin; i < end; i++) y[i] = x[i] ? 1.0f : 0.0f;
    })
}
