/*
c (batch, M, N) = a (batch, M, K) @ b (batch, K, N) [+ c] [+ bias (N)], any strides for a and b.

Order of the sum, the same for every shape, layout, thread count and instruction set, and for matmul_naive:

    s = +0;  s = fma(a[i, p], b[p, j], s)  for the KC = 384 terms p of a block, ascending
    c[i, j] = +0, or what it was when `accumulate`;  c[i, j] += s  for every block, ascending;  c[i, j] += bias[j]

Two ways through the data (the tile and packing are in gemm.h):
    block_product   blocks of C, for matrices: BLIS's loops, named below
    row_product     M = 1 and contiguous rows of b: streams them once, a strip of outputs stays in the L1 cache
*/
#include "gemm.h"

#define MC 72                      /* rows of a packed block of A: MC * KC floats are 108 KB of L2 */
#define NC (NV == 1 ? 192 : 672)   /* columns of a packed block of B: 288 KB of a 512 KB L2, 1 MB of a 2 MB L2 (AVX-512) */
#define ROW_STRIP 2048             /* columns of a strip when M = 1: 8 KB of L1 */

typedef struct { ptrdiff_t m_tiles, n_blocks, width; } plan;

/* C is cut into blocks of `width` columns, those into row tiles; threads take runs of tiles. */
static plan plan_blocks(ptrdiff_t batch, ptrdiff_t M, ptrdiff_t N, int threads) {
    plan p;
    p.m_tiles = (M + MR - 1) / MR;
    p.n_blocks = (N + NC - 1) / NC;
    ptrdiff_t wanted = (threads + batch * p.m_tiles - 1) / (batch * p.m_tiles); /* at least a tile for every thread */
    if (p.n_blocks < wanted) p.n_blocks = smaller(wanted, (N + NR - 1) / NR);
    p.width = round_up((N + p.n_blocks - 1) / p.n_blocks, NR);
    p.n_blocks = (N + p.width - 1) / p.width;
    return p;
}

/* Floats of scratch for one thread: a block of B, a block of A. */
static ptrdiff_t scratch_b(ptrdiff_t N, ptrdiff_t K) { return smaller(K, KC) * round_up(smaller(N, NC), NR); }
static ptrdiff_t scratch_a(ptrdiff_t M, ptrdiff_t K) { return round_up(smaller(K, KC) * smaller(M, MC), 16); }

void KERNEL_NAME(matmul_scratch)(ptrdiff_t *floats, ptrdiff_t M, ptrdiff_t N, ptrdiff_t K, int threads) {
    *floats = threads * (scratch_b(N, K) + scratch_a(M, K));
}

/* c (m, n), n <= NC, as one thread does it. */
static void block_product(float *c, ptrdiff_t c_row, view a, view b, const float *bias, ptrdiff_t m, ptrdiff_t n, ptrdiff_t K,
                          int accumulate, float *packed_b, float *packed_a) {
    const int by_column = a.col != 1, a_in_place = a.col == 1 || (a.row == 1 && (a.col % 1024 || K < 64));
    const int b_in_place = b.col == 1 && (m <= 2 * MR || n <= 64);
    const ptrdiff_t n_last = n % NR;
    for (ptrdiff_t k0 = 0; k0 < K; k0 += KC) { /* BLIS loop 4: blocks of the sum */
        strip s = {.c_row = c_row, .n = n, .k = smaller(KC, K - k0), .from_c = accumulate || k0 > 0};
        view b_block = {b.data + k0 * b.row, b.row, b.col};
        if (b_in_place) {
            s.b = b_block.data, s.b_panel = NR, s.b_row = b.row;
            s.b_last = b_block.data + (n - n_last), s.b_last_row = b.row;
            if (n % 16) { /* a vector would reach past the row */
                pack_b(packed_b, (view){s.b_last, b.row, 1}, s.k, n_last);
                s.b_last = packed_b, s.b_last_row = NR;
            }
        } else {
            pack_b(packed_b, b_block, s.k, n);
            s.b = packed_b, s.b_panel = NR * s.k, s.b_row = NR;
            s.b_last = packed_b + (n - n_last) * s.k, s.b_last_row = NR;
        }
        s.bias = k0 + KC >= K ? bias : NULL;
        for (ptrdiff_t i0 = 0; i0 < m; i0 += MC) { /* loop 3: blocks of rows */
            ptrdiff_t rows = smaller(MC, m - i0);
            view a_block = {a.data + i0 * a.row + k0 * a.col, a.row, a.col};
            if (!a_in_place) pack_a(packed_a, a_block, rows, s.k);
            for (ptrdiff_t i = 0, r; i < rows; i += r) { /* loop 2: row tiles; loop 1, over panels, is strip_run */
                r = tile_rows(rows - i);
                s.c = c + (i0 + i) * c_row;
                s.a = a_in_place ? a_block.data + i * a.row : packed_a + i * s.k;
                s.a_step = !a_in_place ? r : by_column ? a.col : a.row;
                strip_run(&s, r, by_column);
            }
        }
    }
}

/* c (1, n) += a (1, K) @ b (K, n) with b.col = 1, as one thread does it. */
static void row_product(float *c, view a, view b, const float *bias, ptrdiff_t n, ptrdiff_t K, int accumulate) {
    float sum[ROW_STRIP];
    for (ptrdiff_t j0 = 0; j0 < n; j0 += ROW_STRIP) {
        ptrdiff_t columns = smaller(ROW_STRIP, n - j0), whole = columns / 16 * 16;
        int left = (int)(columns - whole);
        for (ptrdiff_t k0 = 0; k0 < K; k0 += KC) {
            ptrdiff_t k = smaller(KC, K - k0);
            memset(sum, 0, sizeof(float) * (size_t)columns);
            for (ptrdiff_t p = 0, rows; p < k; p += rows) { /* four rows of b for one pass over the sums */
                const float *from = b.data + (k0 + p) * b.row + j0, *x = a.data + (k0 + p) * a.col;
                rows = k - p >= 4 ? 4 : 1;
                if (rows == 4) {
                    v16 x0 = v_set1(x[0]), x1 = v_set1(x[a.col]), x2 = v_set1(x[2 * a.col]), x3 = v_set1(x[3 * a.col]);
                    const float *b1 = from + b.row, *b2 = b1 + b.row, *b3 = b2 + b.row;
                    for (ptrdiff_t j = 0; j < whole; j += 16) {
                        v16 s = v_fma(x1, v_load(b1 + j), v_fma(x0, v_load(from + j), v_load(sum + j)));
                        v_store(sum + j, v_fma(x3, v_load(b3 + j), v_fma(x2, v_load(b2 + j), s)));
                    }
                } else {
                    v16 x0 = v_set1(x[0]);
                    for (ptrdiff_t j = 0; j < whole; j += 16)
                        v_store(sum + j, v_fma(x0, v_load(from + j), v_load(sum + j)));
                }
                for (ptrdiff_t q = 0; left && q < rows; q++)
                    v_store_n(sum + whole, v_fma(v_set1(x[q * a.col]), v_load_n(from + q * b.row + whole, left),
                                                 v_load_n(sum + whole, left)), left);
            }
            for (ptrdiff_t j = 0; j < columns; j++) c[j0 + j] = (accumulate || k0 ? c[j0 + j] : 0.0f) + sum[j];
        }
        for (ptrdiff_t j = 0; bias && j < columns; j++) c[j0 + j] += bias[j0 + j];
    }
}

/* K = 0: no block is added. */
static void no_product(float *c, const float *bias, ptrdiff_t n, int accumulate) {
    for (ptrdiff_t j = 0; j < n; j++) {
        float start = accumulate ? c[j] : 0.0f;
        c[j] = bias ? start + bias[j] : start;
    }
}

void KERNEL_NAME(matmul)(const cmha_matrix *c, const cmha_matrix *a, const cmha_matrix *b, const float *bias, ptrdiff_t batch,
                         ptrdiff_t M, ptrdiff_t N, ptrdiff_t K, int accumulate, float *scratch, int threads) {
    if (batch == 0 || M == 0 || N == 0) return;
    const plan p = plan_blocks(batch, M, N, threads);
    const ptrdiff_t size_b = scratch_b(N, K), size = size_b + scratch_a(M, K);
    CMHA_PARALLEL(threads) {
        ptrdiff_t begin, end;
        thread_share(batch * p.n_blocks * p.m_tiles, 1, &begin, &end);
        float *mine = scratch + thread_number() * size;
        for (ptrdiff_t t = begin, run; t < end; t += run) { /* BLIS loop 5, and the batch: a run of row tiles in one block */
            ptrdiff_t tile = t % p.m_tiles, block = t / p.m_tiles % p.n_blocks, item = t / p.m_tiles / p.n_blocks;
            run = smaller(end - t, p.m_tiles - tile);
            ptrdiff_t i = tile * MR, m = smaller(run * MR, M - i), j = block * p.width, n = smaller(p.width, N - j);
            float *to = c->data + c->offsets[item] + i * c->row + j;
            view from_a = {a->data + a->offsets[item] + i * a->row, a->row, a->col};
            view from_b = {b->data + b->offsets[item] + j * b->col, b->row, b->col};
            const float *add = bias ? bias + j : NULL;
            if (K == 0)
                for (ptrdiff_t r = 0; r < m; r++) no_product(to + r * c->row, add, n, accumulate);
            else if (M == 1 && b->col == 1)
                row_product(to, from_a, from_b, add, n, K, accumulate);
            else
                block_product(to, c->row, from_a, from_b, add, m, n, K, accumulate, mine, mine + size_b);
        }
    }
}

/* The definition, in three loops. */
void KERNEL_NAME(matmul_naive)(const cmha_matrix *c, const cmha_matrix *a, const cmha_matrix *b, const float *bias,
                               ptrdiff_t batch, ptrdiff_t M, ptrdiff_t N, ptrdiff_t K, int accumulate) {
    for (ptrdiff_t item = 0; item < batch; item++)
        for (ptrdiff_t i = 0; i < M; i++)
            for (ptrdiff_t j = 0; j < N; j++) {
                float *y = c->data + c->offsets[item] + i * c->row + j;
                const float *row = a->data + a->offsets[item] + i * a->row;
                const float *column = b->data + b->offsets[item] + j * b->col;
                if (!accumulate) *y = 0.0f;
                for (ptrdiff_t k0 = 0; k0 < K; k0 += KC) {
                    float sum = 0.0f;
                    for (ptrdiff_t p = k0; p < smaller(K, k0 + KC); p++) sum = f_fma(row[p * a->col], column[p * b->row], sum);
                    *y += sum;
                }
                if (bias) *y += bias[j];
            }
}
