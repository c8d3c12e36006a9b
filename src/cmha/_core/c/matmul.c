/*
c (batch, M, N) = a (batch, M, K) @ b (batch, K, N) [+ c] [+ bias (N)] [+ residual (batch, M, N)], any strides for a
and b; and, where asked for, activated = gelu(c), while c's rows are still in the cache.

Order of the sum, the same for every shape, layout, thread count and instruction set, and for matmul_naive:

    s = +0;  s = fma(a[i, p], b[p, j], s)  for the KC = 384 terms p of a block, ascending
    c[i, j] = +0, or what it was when `accumulate`;  c[i, j] += s  for every block, ascending;  c[i, j] += bias[j]
    c[i, j] += residual[i, j]

Ways through the data (the tile and packing are in gemm.h); with M = 1 memory is what takes time, so b is read once, in
the order it lies:
    block_product    blocks of C, for matrices: BLIS's loops, named below
    row_product      M = 1 and contiguous rows of b: streams them, a strip of outputs stays in the L1 cache
    split_rows       the same where several threads share it: each takes whole blocks of the sum, so whole rows of b
    column_product   M = 1 and contiguous columns of b: 16 of them at a time, through register transposes
*/
#include "gemm.h"
#include "vmath.h"

#define MC 72                      /* rows of a packed block of A: MC * KC floats are 108 KB of L2 */
#define NC (NV == 1 ? 192 : 672)   /* columns of a packed block of B: 288 KB of a 512 KB L2, 1 MB of 2 MB (AVX-512) */
#define IN_PLACE 256               /* longest row that is read across where it lies: longer ones cost a page a row */
#define ROW_STRIP 4096             /* M = 1: columns of a strip, 16 KB of L1 */
#define FAR 4                      /* M = 1: blocks of the sum that are read at once, */
#define FAR_COLUMNS 1536           /* up to so many columns: 24 KB of L1 for their sums */

/* Floats of scratch for one thread: a block of B, a block of A. */
static ptrdiff_t scratch_b(ptrdiff_t N, ptrdiff_t K) {
    return rounded_up(smaller(N, NC), NR) / NR * PANEL(smaller(K, KC));
}
static ptrdiff_t scratch_a(ptrdiff_t M, ptrdiff_t K) { return rounded_up(smaller(K, KC) * smaller(M, MC), 16); }

static inline ptrdiff_t sum_blocks(ptrdiff_t K) { return (K + KC - 1) / KC; }

void KERNEL_NAME(matmul_scratch)(ptrdiff_t *floats, ptrdiff_t M, ptrdiff_t N, ptrdiff_t K, int threads) {
    ptrdiff_t turned = N == 1 ? scratch_b(M, K) + scratch_a(1, K) : 0, straight = scratch_b(N, K) + scratch_a(M, K);
    ptrdiff_t packed = threads * (turned > straight ? turned : straight);
    ptrdiff_t sums = M == 1 || N == 1 ? sum_blocks(K) * M * N : 0; /* split_rows */
    *floats = packed > sums ? packed : sums;
}

/* c (m, n), all sums and the bias done: the rest of `after`, whose matrices are moved to where c is. */
static void finish_rows(float *c, ptrdiff_t c_row, const cmha_epilogue *after, ptrdiff_t m, ptrdiff_t n) {
    if (!after->residual && !after->activated) return;
    for (ptrdiff_t i = 0; i < m; i++)
        for (ptrdiff_t j = 0; j < n; j += 16) {
            const ptrdiff_t at = i * c_row + j, left = n - j;
            v16 x = v_load_up_to(c + at, left);
            if (after->residual) v_store_up_to(c + at, x = v_add(x, v_load_up_to(after->residual + at, left)), left);
            if (after->activated) v_store_up_to(after->activated + at, v_gelu(x), left);
        }
}

/* The same epilogue for a part of c that starts `by` elements further on, at column j. */
static cmha_epilogue moved(const cmha_epilogue *after, ptrdiff_t by, ptrdiff_t j) {
    return (cmha_epilogue){after->bias ? after->bias + j : NULL, after->residual ? after->residual + by : NULL,
                           after->activated ? after->activated + by : NULL};
}

/* c (m, n), n <= NC, as one thread does it. */
static void block_product(float *c, ptrdiff_t c_row, view a, view b, const cmha_epilogue *after, ptrdiff_t m,
                          ptrdiff_t n, ptrdiff_t K, int accumulate, float *packed_b, float *packed_a) {
    const int by_column = a.col != 1, a_in_place = a.col == 1 || (a.row == 1 && (a.col <= IN_PLACE || n <= 2 * NR));
    const int b_in_place = b.col == 1 && (m <= MR || (b.row <= IN_PLACE && (m <= 2 * MR || n <= 64)));
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
            s.b = packed_b, s.b_panel = PANEL(s.k), s.b_row = NR;
            s.b_last = packed_b + n / NR * PANEL(s.k), s.b_last_row = NR;
        }
        const int last = k0 + KC >= K;
        s.bias = last ? after->bias : NULL;
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
                if (last) {
                    const cmha_epilogue here = moved(after, (i0 + i) * c_row, 0);
                    finish_rows(s.c, c_row, &here, r, n);
                }
            }
        }
    }
}

/* sum (n) = x (k) @ b (k, n), one block of the sum; rows of b are contiguous. */
static void row_block(float *sum, const float *x, ptrdiff_t x_step, const float *b, ptrdiff_t b_row, ptrdiff_t k,
                      ptrdiff_t n) {
    const ptrdiff_t whole = n / 16 * 16;
    ptrdiff_t p = 0;
    memset(sum, 0, sizeof(float) * (size_t)whole);
    for (; p + 4 <= k; p += 4) { /* four rows of b for one pass over the sums */
        const float *b0 = b + p * b_row, *b1 = b0 + b_row, *b2 = b1 + b_row, *b3 = b2 + b_row;
        const v16 x0 = v_set1(x[p * x_step]), x1 = v_set1(x[(p + 1) * x_step]);
        const v16 x2 = v_set1(x[(p + 2) * x_step]), x3 = v_set1(x[(p + 3) * x_step]);
        for (ptrdiff_t j = 0; j < whole; j += 16) {
            v16 s = v_fma(x1, v_load(b1 + j), v_fma(x0, v_load(b0 + j), v_load(sum + j)));
            v_store(sum + j, v_fma(x3, v_load(b3 + j), v_fma(x2, v_load(b2 + j), s)));
        }
    }
    for (; p < k; p++)
        for (ptrdiff_t j = 0; j < whole; j += 16)
            v_store(sum + j, v_fma(v_set1(x[p * x_step]), v_load(b + p * b_row + j), v_load(sum + j)));
    if (whole < n) {
        const int left = (int)(n - whole);
        v16 s = v_zero();
        for (p = 0; p < k; p++) s = v_fma(v_set1(x[p * x_step]), v_load_n(b + p * b_row + whole, left), s);
        v_store_n(sum + whole, s, left);
    }
}

/* The same for `count` whole blocks at once, sums `sum_row` apart: streams that are far apart in memory keep more reads
   under way than neighbouring rows do. */
INLINE void far_blocks(const int count, float *sum, ptrdiff_t sum_row, const float *x, ptrdiff_t x_step, const float *b,
                       ptrdiff_t b_row, ptrdiff_t n) {
    const ptrdiff_t whole = n / 16 * 16;
    for (int t = 0; t < count; t++) memset(sum + t * sum_row, 0, sizeof(float) * (size_t)n);
    for (ptrdiff_t p = 0; p < KC; p++) {
        v16 number[FAR];
        const float *row = b + p * b_row;
        for (int t = 0; t < count; t++) number[t] = v_set1(x[(p + t * KC) * x_step]);
        for (ptrdiff_t j = 0; j < whole; j += 16)
            UNROLL(4)
            for (int t = 0; t < count; t++) {
                float *s = sum + t * sum_row + j;
                v_store(s, v_fma(number[t], v_load(row + t * KC * b_row + j), v_load(s)));
            }
        for (int t = 0; t < count && whole < n; t++) {
            float *s = sum + t * sum_row + whole;
            const int left = (int)(n - whole);
            v_store_n(s, v_fma(number[t], v_load_n(row + t * KC * b_row + whole, left), v_load_n(s, left)), left);
        }
    }
}

/* sum (count, n), sum_row apart: `count` blocks of x (K) @ b (K, n) from k0 on. */
static void row_blocks(float *sum, ptrdiff_t sum_row, const float *x, ptrdiff_t x_step, const float *b, ptrdiff_t b_row,
                       ptrdiff_t k0, ptrdiff_t count, ptrdiff_t K, ptrdiff_t n) {
    for (ptrdiff_t done = 0, step; done < count; done += step, k0 += step * KC, sum += step * sum_row) {
        const float *x0 = x + k0 * x_step, *b0 = b + k0 * b_row;
        step = n <= FAR_COLUMNS ? smaller(smaller(FAR, count - done), (K - k0) / KC) : 1;
        switch (step) {
        case 4: far_blocks(4, sum, sum_row, x0, x_step, b0, b_row, n); break;
        case 3: far_blocks(3, sum, sum_row, x0, x_step, b0, b_row, n); break;
        case 2: far_blocks(2, sum, sum_row, x0, x_step, b0, b_row, n); break;
        default: row_block(sum, x0, x_step, b0, b_row, smaller(KC, K - k0), n), step = 1;
        }
    }
}

/* c (1, n) = a (1, K) @ b (K, n) with b.col = 1, as one thread does it. */
static void row_product(float *c, view a, view b, const cmha_epilogue *after, ptrdiff_t n, ptrdiff_t K,
                        int accumulate) {
    float sum[FAR * FAR_COLUMNS];
    const ptrdiff_t strip = n <= FAR_COLUMNS ? FAR_COLUMNS : ROW_STRIP, blocks = sum_blocks(K);
    const ptrdiff_t together = n <= FAR_COLUMNS ? FAR : 1;
    for (ptrdiff_t j0 = 0; j0 < n; j0 += strip) {
        const ptrdiff_t columns = smaller(strip, n - j0);
        for (ptrdiff_t done = 0; done < blocks; done += together) {
            const ptrdiff_t count = smaller(together, blocks - done);
            row_blocks(sum, columns, a.data, a.col, b.data + j0, b.row, done * KC, count, K, columns);
            for (ptrdiff_t t = 0; t < count; t++)
                for (ptrdiff_t j = 0; j < columns; j++)
                    c[j0 + j] = (accumulate || done + t ? c[j0 + j] : 0.0f) + sum[t * columns + j];
        }
        const cmha_epilogue here = moved(after, j0, j0);
        for (ptrdiff_t j = 0; here.bias && j < columns; j++) c[j0 + j] += here.bias[j];
        finish_rows(c + j0, 0, &here, 1, columns);
    }
}

/* c (1, n) = a (1, K) @ b (K, n) with b.row = 1, n = 16 * apart, as one thread does it. Lane l has column l * apart + j:
   16 streams far apart, each through its part of b in the order it lies. */
static void column_product(float *c, view a, view b, const cmha_epilogue *after, ptrdiff_t apart, ptrdiff_t K,
                           int accumulate) {
    float square[16 * 16];
    for (ptrdiff_t j = 0; j < apart; j++) {
        const float *columns = b.data + j * b.col;
        for (ptrdiff_t k0 = 0; k0 < K; k0 += KC) {
            const ptrdiff_t end = smaller(K, k0 + KC);
            ptrdiff_t p = k0;
            v16 sum = v_zero();
            for (; p + 16 <= end; p += 16) {
                v_transpose(square, 16, columns + p, apart * b.col);
                UNROLL(16)
                for (int i = 0; i < 16; i++) sum = v_fma(v_set1(a.data[(p + i) * a.col]), v_load(square + 16 * i), sum);
            }
            for (; p < end; p++) {
                for (int l = 0; l < 16; l++) square[l] = columns[l * apart * b.col + p];
                sum = v_fma(v_set1(a.data[p * a.col]), v_load(square), sum);
            }
            v_store(square, sum);
            for (int l = 0; l < 16; l++) {
                float *y = c + l * apart + j;
                *y = (accumulate || k0 ? *y : 0.0f) + square[l];
            }
        }
    }
    for (ptrdiff_t j = 0; after->bias && j < 16 * apart; j++) c[j] += after->bias[j];
    finish_rows(c, 0, after, 1, 16 * apart);
}

/* K = 0: no block is added. */
static void no_product(float *c, const cmha_epilogue *after, ptrdiff_t n, int accumulate) {
    for (ptrdiff_t j = 0; j < n; j++) {
        float start = accumulate ? c[j] : 0.0f;
        c[j] = after->bias ? start + after->bias[j] : start;
    }
    finish_rows(c, 0, after, 1, n);
}

/* One call and how it is cut: C into blocks of `width` columns, those into row tiles; a thread takes a run of tiles. */
typedef struct {
    const cmha_matrix *c, *a, *b;
    const cmha_epilogue *after;
    ptrdiff_t batch, M, N, K, m_tiles, n_blocks, width;
    int accumulate;
    float *scratch;
} job;

static void plan(job *w, int threads) {
    /* few rows and b transposed: a panel is packed and used up while it is in L1 */
    const ptrdiff_t widest = w->M == 1 && w->b->col == 1 ? ROW_STRIP : w->M == 1 && w->b->row == 1 ? w->N
                             : w->M <= MR && w->b->col != 1 ? NR : NC;
    w->m_tiles = (w->M + MR - 1) / MR;
    w->n_blocks = (w->N + widest - 1) / widest;
    if (threads > 1) { /* at least a tile for every thread */
        ptrdiff_t tiles = w->batch * w->m_tiles, wanted = (threads + tiles - 1) / tiles;
        if (w->n_blocks < wanted) w->n_blocks = smaller(wanted, (w->N + NR - 1) / NR);
    }
    w->width = rounded_up((w->N + w->n_blocks - 1) / w->n_blocks, NR);
    w->n_blocks = (w->N + w->width - 1) / w->width;
}

static void run_share(const job *w) {
    const ptrdiff_t size_b = scratch_b(w->N, w->K), size_a = scratch_a(w->M, w->K);
    float *packed_b = w->scratch + scratch_number() * (size_b + size_a);
    ptrdiff_t begin, end;
    thread_share(w->batch * w->n_blocks * w->m_tiles, 1, &begin, &end);
    for (ptrdiff_t t = begin, run; t < end; t += run) { /* BLIS loop 5 and the batch: a run of row tiles in one block */
        ptrdiff_t tile = t % w->m_tiles, block = t / w->m_tiles % w->n_blocks, item = t / w->m_tiles / w->n_blocks;
        run = smaller(end - t, w->m_tiles - tile);
        ptrdiff_t i = tile * MR, m = smaller(run * MR, w->M - i), j = block * w->width, n = smaller(w->width, w->N - j);
        float *c = w->c->data + w->c->offsets[item] + i * w->c->row + j;
        view a = {w->a->data + w->a->offsets[item] + i * w->a->row, w->a->row, w->a->col};
        view b = {w->b->data + w->b->offsets[item] + j * w->b->col, w->b->row, w->b->col};
        const cmha_epilogue after = moved(w->after, c - w->c->data, j);
        if (w->K == 0)
            for (ptrdiff_t r = 0; r < m; r++) {
                const cmha_epilogue row = moved(&after, r * w->c->row, 0);
                no_product(c + r * w->c->row, &row, n, w->accumulate);
            }
        else if (w->M == 1 && b.col == 1 && n >= 16)
            row_product(c, a, b, &after, n, w->K, w->accumulate);
        else if (w->M == 1 && b.row == 1) {
            const ptrdiff_t whole = n / 16 * 16;
            const cmha_epilogue rest = moved(&after, whole, whole);
            column_product(c, a, b, &after, n / 16, w->K, w->accumulate);
            b.data += whole * b.col;
            if (whole < n)
                block_product(c + whole, 0, a, b, &rest, 1, n - whole, w->K, w->accumulate, packed_b, packed_b + size_b);
        } else
            block_product(c, w->c->row, a, b, &after, m, n, w->K, w->accumulate, packed_b, packed_b + size_b);
    }
}

/* M = 1, contiguous rows of b, several threads: a task is one block of the sum on one strip of columns, and as few strips
   as give every thread as many tasks. The blocks are added afterwards, in order. */
static void split_rows(const job *w, int threads) {
    const ptrdiff_t blocks = sum_blocks(w->K), N = w->N;
    const float *a = w->a->data + w->a->offsets[0], *b = w->b->data + w->b->offsets[0];
    float *c = w->c->data + w->c->offsets[0];
    ptrdiff_t strips = 1;
    while (blocks * strips % threads || N > strips * ROW_STRIP) strips++;
    const ptrdiff_t width = rounded_up((N + strips - 1) / strips, 16);
    CMHA_PARALLEL(threads, {
        ptrdiff_t begin, end;
        thread_share(blocks * strips, 1, &begin, &end);
        for (ptrdiff_t t = begin, count; t < end; t += count) {
            ptrdiff_t block = t % blocks, j = t / blocks * width;
            count = smaller(end - t, blocks - block);
            if (j < N)
                row_blocks(w->scratch + block * N + j, N, a, w->a->col, b + j, w->b->row, block * KC, count, w->K,
                           smaller(width, N - j));
        }
    })
    for (ptrdiff_t j = 0; j < N; j++) {
        float sum = w->accumulate ? c[j] : 0.0f;
        for (ptrdiff_t k = 0; k < blocks; k++) sum += w->scratch[k * N + j];
        c[j] = w->after->bias ? sum + w->after->bias[j] : sum;
    }
    const cmha_epilogue after = moved(w->after, c - w->c->data, 0);
    finish_rows(c, 0, &after, 1, N);
}

void KERNEL_NAME(matmul)(const cmha_matrix *c, const cmha_matrix *a, const cmha_matrix *b, const cmha_epilogue *after,
                         ptrdiff_t batch, ptrdiff_t M, ptrdiff_t N, ptrdiff_t K, int accumulate, float *scratch,
                         int threads) {
    if (batch == 0 || M == 0 || N == 0) return;
    const cmha_epilogue nothing = {NULL, NULL, NULL};
    job w = {c, a, b, after ? after : &nothing, batch, M, N, K, 0, 0, 0, accumulate, scratch};
    cmha_matrix a_turned = {b->data, b->offsets, b->col, b->row}, b_turned = {a->data, a->offsets, a->col, a->row};
    const int turned = N == 1 && M > 1 && c->row == 1 && !after; /* one column is the row of the transposed product */
    if (turned) w.a = &a_turned, w.b = &b_turned, w.M = 1, w.N = M;
    if (w.M == 1 && batch == 1 && w.b->col == 1 && threads > 1 && K > KC && w.N >= 16 * threads) {
        split_rows(&w, threads);
        return;
    }
    plan(&w, threads);
    CMHA_PARALLEL(threads, { run_share(&w); })
}

/* The definition, in three loops. */
void KERNEL_NAME(matmul_naive)(const cmha_matrix *c, const cmha_matrix *a, const cmha_matrix *b,
                               const cmha_epilogue *after, ptrdiff_t batch, ptrdiff_t M, ptrdiff_t N, ptrdiff_t K,
                               int accumulate) {
    for (ptrdiff_t item = 0; item < batch; item++)
        for (ptrdiff_t i = 0; i < M; i++)
            for (ptrdiff_t j = 0; j < N; j++) {
                float *y = c->data + c->offsets[item] + i * c->row + j;
                const float *row = a->data + a->offsets[item] + i * a->row;
                const float *column = b->data + b->offsets[item] + j * b->col;
                if (!accumulate) *y = 0.0f;
                for (ptrdiff_t k0 = 0; k0 < K; k0 += KC) {
                    float sum = 0.0f;
                    for (ptrdiff_t p = k0; p < smaller(K, k0 + KC); p++)
                        sum = f_fma(row[p * a->col], column[p * b->row], sum);
                    *y += sum;
                }
                if (after && after->bias) *y += after->bias[j];
                if (after && after->residual) *y += after->residual[y - c->data];
                if (after && after->activated) v_store_n(after->activated + (y - c->data), v_gelu(v_load_n(y, 1)), 1);
            }
}
