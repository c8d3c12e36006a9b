/*
The inside of matmul: packing and the register tile, in the scheme of Goto & van de Geijn (2008, "Anatomy of
High-Performance Matrix Multiplication") as BLIS arranges it (Van Zee & van de Geijn 2015).

    c (m, n) = start + a (m, k) @ b (k, n), k <= KC     one block of the sum, one fma chain per output from +0

A tile of MR x NR outputs lives in registers while k runs. B is read in panels of NR columns, each row of a panel one or
more whole vectors: packed, or where it lies when its rows are contiguous. A is read one number at a time, so it needs
no packing when one of its strides is 1 (BLIS always packs it; here a row tile of A is small enough to stay in L1).
Vectors run over columns, never over k: an output's sum does not know the shape of the tile it was in.
*/
#ifndef CMHA_GEMM_H
#define CMHA_GEMM_H

#include "variant.h"
#include "tiles.h"

#define KC 384 /* terms in a block of the sum: a promise (docs/order-of-sums.md), not a tuning constant */
#define MR V_TILE_ROWS
#define NV V_TILE_VECTORS
#define NR (16 * NV)
#define PANEL(k) (NR * (k) + 16) /* floats from panel to panel; a cache line more, lest they share L1's sets */

/* Element (r, c) is at data + r * row + c * col. */
typedef struct { const float *data; ptrdiff_t row, col; } view;

/* ------------------------------------------------------------------------------------------------- packing */

/* b (k, n) -> panels (k, NR), PANEL(k) floats apart, the last one filled with zeros up to whole vectors. */
static void pack_b(float *to, view b, ptrdiff_t k, ptrdiff_t n) {
    if (b.col == 1) { /* rows are contiguous: copy vectors, row by row */
        for (ptrdiff_t p = 0; p < k; p++) {
            const float *from = b.data + p * b.row;
            for (ptrdiff_t j = 0; j < n; j += 16) {
                float *place = to + j / NR * PANEL(k) + p * NR + j % NR;
                v_store(place, j + 16 <= n ? v_load(from + j) : v_load_n(from + j, (int)(n - j)));
            }
        }
        return;
    }
    for (ptrdiff_t j = 0; j < n; j += 16) {
        float *panel = to + j / NR * PANEL(k) + j % NR;
        int columns = (int)smaller(16, n - j);
        const float *from = b.data + j * b.col;
        ptrdiff_t p = 0;
        if (b.row == 1 && columns == 16) /* columns are contiguous: transpose squares */
            for (; p + 16 <= k; p += 16) v_transpose(panel + p * NR, NR, from + p, b.col);
        for (; p < k; p++)
            for (int x = 0; x < 16; x++) panel[p * NR + x] = x < columns ? from[p * b.row + x * b.col] : 0.0f;
    }
}

/* a (m, k) -> tiles of r = tile_rows rows: (tile, k, r); the tile of row i starts at to + i * k. Eight columns at a
   time: columns are contiguous in most matrices that come here, and with large strides L1's sets hold no more. */
static void pack_a(float *to, view a, ptrdiff_t m, ptrdiff_t k) {
    for (ptrdiff_t p0 = 0; p0 < k; p0 += 8) {
        const ptrdiff_t columns = smaller(8, k - p0);
        for (ptrdiff_t i = 0, r; i < m; i += r) {
            r = tile_rows(m - i);
            float *place = to + i * k + p0 * r;
            const float *from = a.data + i * a.row + p0 * a.col;
            if (a.row == 1 && r == MR)
                for (ptrdiff_t p = 0; p < columns; p++) memcpy(place + p * MR, from + p * a.col, MR * sizeof(float));
            else
                for (ptrdiff_t p = 0; p < columns; p++)
                    for (ptrdiff_t x = 0; x < r; x++) place[p * r + x] = from[p * a.col + x * a.row];
        }
    }
}

/* ---------------------------------------------------------------------------------------------------- tiles */

/* A strip: up to MR rows of C, all columns of the block. */
typedef struct {
    float *c;
    ptrdiff_t c_row, k, n;
    const float *a;
    ptrdiff_t a_step;                 /* from row to row, or from k to k when a is `by_column`; the other stride is 1 */
    const float *b;
    ptrdiff_t b_panel, b_row;         /* from panel to panel, from k to k */
    const float *b_last;              /* the last panel, which may lie elsewhere */
    ptrdiff_t b_last_row;
    const float *bias;                /* (n), added after this block, or NULL */
    int from_c;                       /* start from what is in c; else from +0 */
} strip;

/* r rows and v vectors of columns; `columns` of the last vector exist. r, v and by_column are constants where this is
   inlined, so `sum` is registers. */
INLINE void tile(const int r, const int v, const int by_column, const strip *s, const float *b, ptrdiff_t b_row,
                 ptrdiff_t j, int columns) {
    v16 sum[MR][NV];
    const float *a = s->a;
    const ptrdiff_t a_step = s->a_step, k = s->k;
    UNROLL(8)
    for (int i = 0; i < r; i++)
        UNROLL(4)
        for (int x = 0; x < v; x++) sum[i][x] = v_zero();
    UNROLL(8)
    for (int i = 0; i < r; i++) PREFETCH(s->c + i * s->c_row + j);
    UNROLL(4)
    for (ptrdiff_t p = 0; p < k; p++) {
        v16 row[NV];
        UNROLL(4)
        for (int x = 0; x < v; x++) row[x] = v_load(b + p * b_row + 16 * x);
        UNROLL(8)
        for (int i = 0; i < r; i++) {
            v16 number = v_set1(by_column ? a[p * a_step + i] : a[i * a_step + p]);
            UNROLL(4)
            for (int x = 0; x < v; x++) sum[i][x] = v_fma(number, row[x], sum[i][x]);
        }
    }
    UNROLL(8)
    for (int i = 0; i < r; i++)
        UNROLL(4)
        for (int x = 0; x < v; x++) {
            float *c = s->c + i * s->c_row + j + 16 * x;
            const float *bias = s->bias ? s->bias + j + 16 * x : NULL;
            if (x < v - 1 || columns == 16) {
                v16 y = v_add(s->from_c ? v_load(c) : v_zero(), sum[i][x]);
                v_store(c, bias ? v_add(y, v_load(bias)) : y);
            } else {
                v16 y = v_add(s->from_c ? v_load_n(c, columns) : v_zero(), sum[i][x]);
                v_store_n(c, bias ? v_add(y, v_load_n(bias, columns)) : y, columns);
            }
        }
}

INLINE void strip_tiles(const int r, const int by_column, const strip *s) {
    ptrdiff_t j = 0;
    const float *b = s->b;
    for (; j + NR <= s->n; j += NR, b += s->b_panel) tile(r, NV, by_column, s, b, s->b_row, j, 16);
    if (j == s->n) return;
    int vectors = (int)((s->n - j + 15) / 16), columns = (int)(s->n - j) - 16 * (vectors - 1);
    switch (vectors) {
    case 1: tile(r, 1, by_column, s, s->b_last, s->b_last_row, j, columns); break;
#if NV > 1
    case 2: tile(r, 2, by_column, s, s->b_last, s->b_last_row, j, columns); break;
    case 3: tile(r, 3, by_column, s, s->b_last, s->b_last_row, j, columns); break;
#endif
    }
}

#define STRIP(r) \
    NOINLINE void strip_rows_##r(const strip *s) { strip_tiles(r, 0, s); } \
    NOINLINE void strip_columns_##r(const strip *s) { strip_tiles(r, 1, s); }
TILE_HEIGHTS(STRIP)
#undef STRIP

static void strip_run(const strip *s, ptrdiff_t r, int by_column) {
    static void (*const table[2][MR])(const strip *) = {TILE_TABLE(strip_rows_), TILE_TABLE(strip_columns_)};
    table[by_column][r - 1](s);
}
#endif
