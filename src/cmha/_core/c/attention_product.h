/*
The five products of attention, one register tile. Every output is one fma chain over the terms p, ascending:

    out (m, n) = start + a (m, p) @ b (p, n)        terms p of begin .. end - 1; start = +0, or what is in out

    BY_ROWS      a[i * a_step + p]     scores: a = keys,      b = q^T         dv, dk: a = weights^T, b = dy, q
    BY_COLUMNS   a[p * a_step + i]     y^T:    a = values^T,  b = weights^T   dq^T:   a = keys^T,    b = ds^T
    MASKED       BY_COLUMNS, and column c takes term p only where bit c of sees[p] is set
    PICKED       BY_ROWS, and row i takes term p only where bit i of sees[p] is set

Rows of b and out are whole vectors (their owners pad them), a is read one number at a time. Nothing is packed for a
tile, nothing but the order of terms decides an output's bits. Tiles as in matmul (gemm.h).
*/
#ifndef CMHA_ATTENTION_PRODUCT_H
#define CMHA_ATTENTION_PRODUCT_H

#include "tiles.h"

#define PRODUCT_ROWS V_TILE_ROWS /* ROWS x VECTORS accumulators fill the registers */
#define PRODUCT_VECTORS (V_TILE_VECTORS > 1 ? 2 : 1)

enum { BY_ROWS, BY_COLUMNS, MASKED, PICKED };

typedef struct {
    float *out;
    ptrdiff_t out_row;
    const float *a;
    ptrdiff_t a_step;
    const float *b;
    ptrdiff_t b_row;
    ptrdiff_t begin, end;
    int onto;               /* start from what is in out; else from +0 */
    const uint32_t *sees;   /* MASKED, PICKED: of each term */
} product;

/* Rows row .. row + r - 1 and v vectors of columns from `column` on. r, v and how are constants where this is inlined,
   so `sum` is registers. */
INLINE void product_tile(const int r, const int v, const int how, const product *w, ptrdiff_t row, ptrdiff_t column) {
    v16 sum[PRODUCT_ROWS][4];
    float *out = w->out + row * w->out_row + column;
    const ptrdiff_t out_row = w->out_row, a_step = w->a_step, b_row = w->b_row, end = w->end;
    const int by_rows = how == BY_ROWS || how == PICKED;
    const float *a = w->a + (by_rows ? row * a_step : row), *b = w->b + column;
    UNROLL(8)
    for (int i = 0; i < r; i++)
        UNROLL(4)
        for (int x = 0; x < v; x++) sum[i][x] = w->onto ? v_load(out + i * out_row + 16 * x) : v_zero();
    UNROLL(4)
    for (ptrdiff_t p = w->begin; p < end; p++) {
        v16 term[4];
        UNROLL(4)
        for (int x = 0; x < v; x++) term[x] = v_load(b + p * b_row + 16 * x);
        UNROLL(8)
        for (int i = 0; i < r; i++) {
            const v16 number = v_set1(by_rows ? a[i * a_step + p] : a[p * a_step + i]);
            UNROLL(4)
            for (int x = 0; x < v; x++) {
                const v16 next = v_fma(number, term[x], sum[i][x]);
                if (how == MASKED || how == PICKED) {
                    const unsigned bits = how == MASKED ? w->sees[p] >> (column + 16 * x) : 0u - (w->sees[p] >> i & 1);
                    sum[i][x] = v_select(m_from_bits(bits & 0xffffu), next, sum[i][x]);
                } else {
                    sum[i][x] = next;
                }
            }
        }
    }
    UNROLL(8)
    for (int i = 0; i < r; i++)
        UNROLL(4)
        for (int x = 0; x < v; x++) v_store(out + i * out_row + 16 * x, sum[i][x]);
}

/* r rows, `vectors` vectors of columns; few rows take more vectors at a time, so that there are chains enough to fill
   the time an fma takes. */
INLINE void product_across(const int r, const int how, const product *w, ptrdiff_t row, ptrdiff_t vectors) {
    const int wide = how == MASKED || how == PICKED ? 1 : r == 1 ? 4 : r <= 3 ? 2 : PRODUCT_VECTORS;
    ptrdiff_t x = 0;
    for (; x + wide <= vectors; x += wide) product_tile(r, wide, how, w, row, 16 * x);
    if (wide > 1)
        for (; x < vectors; x++) product_tile(r, 1, how, w, row, 16 * x);
}

#define HEIGHT(r) \
    NOINLINE void product_by_rows_##r(const product *w, ptrdiff_t row, ptrdiff_t vectors) { \
        product_across(r, BY_ROWS, w, row, vectors); \
    } \
    NOINLINE void product_by_columns_##r(const product *w, ptrdiff_t row, ptrdiff_t vectors) { \
        product_across(r, BY_COLUMNS, w, row, vectors); \
    } \
    NOINLINE void product_masked_##r(const product *w, ptrdiff_t row, ptrdiff_t vectors) { \
        product_across(r, MASKED, w, row, vectors); \
    } \
    NOINLINE void product_picked_##r(const product *w, ptrdiff_t row, ptrdiff_t vectors) { \
        product_across(r, PICKED, w, row, vectors); \
    }
TILE_HEIGHTS(HEIGHT)
#undef HEIGHT

/* r rows from `row` on; `how` is a constant, so that a file compiles only what it uses. */
INLINE void product_rows(const int how, int r, const product *w, ptrdiff_t row, ptrdiff_t vectors) {
    typedef void (*of_height)(const product *, ptrdiff_t, ptrdiff_t);
    static const of_height by_rows[] = TILE_TABLE(product_by_rows_), by_columns[] = TILE_TABLE(product_by_columns_),
                           masked[] = TILE_TABLE(product_masked_), picked[] = TILE_TABLE(product_picked_);
    if (how == BY_ROWS) by_rows[r - 1](w, row, vectors);
    else if (how == BY_COLUMNS) by_columns[r - 1](w, row, vectors);
    else if (how == MASKED) masked[r - 1](w, row, vectors);
    else picked[r - 1](w, row, vectors);
}

INLINE void product_all(const int how, const product *w, ptrdiff_t m, ptrdiff_t vectors) {
    for (ptrdiff_t i = 0, r; i < m; i += r) product_rows(how, (int)(r = tile_rows(m - i)), w, i, vectors);
}
#endif
