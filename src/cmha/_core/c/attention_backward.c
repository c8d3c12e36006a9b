/*
The gradient of scaled dot-product attention; weights are computed again from what the forward pass stored for a row.

    p_ij = exp2(s_ij - row_max_i) / row_sum_i        D_i   = sum_d dy_id y_id
    dp_ij = f_ij dy_i . v_j                          ds_ij = p_ij (dp_ij - D_i)
    dv_j = sum_i (p_ij f_ij) dy_i                    dq_i  = scale sum_j ds_ij k_j        dk_j = scale sum_i ds_ij q_i

q, y, dy, dq   (B, H, T, hd)      k, v, dk, dv   (B, H_kv, S, hd)      f   dropout's factors, 1 without dropout

Dao 2023, "FlashAttention-2"; without its atomics: one thread owns dk and dv of a key head and dq of the heads that read
it.

Order of sums (scores as in attention.c; pairs (i, j) where i does not see j are left out everywhere)
    D_i       16 lanes by d mod 16, fma(dy, y, lane) ascending from +0, and their tree, for each 512; these totals in
              double from 0.0, rounded once
    dp_ij     one fma chain over d ascending from +0, then times f_ij
    dq_i      one fma chain over the keys of a block of 128, ascending from +0; blocks added ascending from +0; times
              scale, plus 0 (so a zero is +0)
    dk_j dv_j one fma chain over the queries of a block of 128, ascending from +0; blocks added from +0: heads of the
              group ascending, in each head blocks ascending; then dk times scale, plus 0
*/
#include "variant.h"
#include "attention.h"

/* Of one thread: packed keys and values of a block (128, hd), q and dy of a tile (ROWS, hd), scores that become
   weights and dp that becomes ds, (queries 128, keys 128) each, sums (ROWS, hd to 16), dropout factors (128), D of each
   row of the group (H / H_kv, T). */
typedef struct { float *keys, *values, *q, *dy, *p, *ds, *sums, *factors, *dots; } backward_scratch;

static backward_scratch backward_layout(float *at, const cmha_attention *call) {
    backward_scratch own;
    own.keys = at, at += ATTENTION_BLOCK * call->hd;
    own.values = at, at += ATTENTION_BLOCK * call->hd;
    own.q = at, at += rounded_up(ATTENTION_ROWS * call->hd, 16);
    own.dy = at, at += rounded_up(ATTENTION_ROWS * call->hd, 16);
    own.p = at, at += ATTENTION_BLOCK * ATTENTION_BLOCK;
    own.ds = at, at += ATTENTION_BLOCK * ATTENTION_BLOCK;
    own.sums = at, at += ATTENTION_ROWS * rounded_up(call->hd, 16);
    own.factors = at, at += ATTENTION_BLOCK;
    own.dots = at;
    return own;
}

static float dot_row(const float *a, const float *b, ptrdiff_t n) {
    double total = 0;
    for (ptrdiff_t start = 0; start < n; start += 512) {
        ptrdiff_t end = start + 512 < n ? start + 512 : n, i = start;
        v16 sum = v_zero();
        for (; i + 16 <= end; i += 16) sum = v_fma(v_load(a + i), v_load(b + i), sum);
        if (i < end) {
            const int rest = (int)(end - i);
            sum = v_select(m_first(rest), v_fma(v_load_n(a + i, rest), v_load_n(b + i, rest), sum), sum);
        }
        total += (double)v_sum(sum);
    }
    return (float)total;
}

static void add_row(float *y, const float *x, ptrdiff_t n) {
    for (ptrdiff_t i = 0; i < n; i++) y[i] += x[i];
}
static void fill_zero(const cmha_heads *x, ptrdiff_t b, ptrdiff_t h, ptrdiff_t n, ptrdiff_t hd) {
    for (ptrdiff_t t = 0; t < n; t++) memset(heads_row_out(x, b, h, t), 0, sizeof(float) * (size_t)hd);
}
static void multiply(const cmha_heads *x, ptrdiff_t b, ptrdiff_t h, ptrdiff_t n, ptrdiff_t hd, float scale) {
    for (ptrdiff_t t = 0; t < n; t++) {
        float *row = heads_row_out(x, b, h, t);
        for (ptrdiff_t d = 0; d < hd; d++) row[d] = row[d] * scale + 0.0f;
    }
}

/* 64 x 64 bits: halves swapped across the diagonal, then quarters, ... (Warren, "Hacker's Delight", 7-3). */
static void transpose_bits(uint64_t rows[64]) {
    uint64_t low = 0x00000000ffffffffu;
    for (int j = 32; j > 0; j >>= 1, low ^= low << j)
        for (int k = 0; k < 64; k = ((k | j) + 1) & ~j) {
            const uint64_t swap = ((rows[k] >> j) ^ rows[k | j]) & low;
            rows[k | j] ^= swap;
            rows[k] ^= swap << j;
        }
}

/* Which of the n queries see each of the first n_keys keys, from which keys each query sees. */
static void transpose_sets(term_set *queries, const term_set *keys, ptrdiff_t n, ptrdiff_t n_keys) {
    uint64_t rows[64];
    memset(queries, 0, sizeof(term_set) * (size_t)ATTENTION_BLOCK);
    for (ptrdiff_t i = 0; i < n; i += 64)
        for (ptrdiff_t j = 0; j < n_keys; j += 64) {
            for (ptrdiff_t r = 0; r < 64; r++) rows[r] = i + r < n ? keys[i + r].word[j >> 6] : 0;
            transpose_bits(rows);
            for (ptrdiff_t r = 0; r < 64; r++) queries[j + r].word[i >> 6] = rows[r];
        }
}

typedef struct {
    const cmha_heads *dq, *dk, *dv, *dy, *y, *q, *k, *v;
    const float *row_max, *row_sum;
    const cmha_attention *call;
} backward_call;

/* A block of queries of head h from t0, against a block of keys from `first`. */
typedef struct { ptrdiff_t b, h_kv, h, t0, queries, first; const float *dots; } block_pair;

/* Rows i .. of the pair: their p (times factors) and ds, and what this block of keys adds to their dq. */
static void backward_tile(const backward_call *io, const block_pair *at, ptrdiff_t i, const attention_tile *tile,
                          backward_scratch own) {
    const cmha_attention *call = io->call;
    const ptrdiff_t b = at->b, hd = call->hd, width = rounded_up(hd, 16);
    const ptrdiff_t row = (b * call->H + at->h) * call->T + at->t0 + i;
    float *p = own.p + i * ATTENTION_BLOCK, *ds = own.ds + i * ATTENTION_BLOCK;
    pack_tile(own.q, io->q, b, tile, hd, query_factor(call));
    pack_tile(own.dy, io->dy, b, tile, hd, 1.0f);
    dot_tile(p, own.q, own.keys, hd, tile->strips, tile->rows);
    dot_tile(ds, own.dy, own.values, hd, tile->strips, tile->rows);
    for (int r = 0; r < tile->rows; r++) {
        float *p_row = p + r * ATTENTION_BLOCK, *ds_row = ds + r * ATTENTION_BLOCK;
        const v16 dot = v_set1(at->dots[i + r]);
        finish_scores(p_row, call, b, tile, r, at->first);
        finish_weights(p_row, tile, r, io->row_max[row + r], io->row_sum[row + r]);
        if (call->dropout_p > 0) tile_factors(own.factors, call, b, tile, r, at->first);
        for (ptrdiff_t j = 0; j < 16 * tile->strips; j += 16) {
            v16 weight = v_load(p_row + j), dp = v_load(ds_row + j);
            if (call->dropout_p > 0) {
                const v16 factor = v_load(own.factors + j);
                dp = v_mul(dp, factor);
                v_store(p_row + j, v_mul(weight, factor));
            }
            v_store(ds_row + j, v_mul(weight, v_sub(dp, dot)));
        }
    }
    sum_by_rows(own.sums, width, ds, heads_row(io->k, b, at->h_kv, at->first), io->k->time, hd, tile->seen, tile->rows);
    for (int r = 0; r < tile->rows; r++) add_row(heads_row_out(io->dq, b, at->h, tile->t[r]), own.sums + r * width, hd);
}

static void backward_pair(const backward_call *io, const block_pair *at, ptrdiff_t length, term_set real,
                          backward_scratch own) {
    const cmha_attention *call = io->call;
    const ptrdiff_t b = at->b, hd = call->hd, width = rounded_up(hd, 16), group = call->H / call->H_kv;
    const ptrdiff_t first_row = (at->h - at->h_kv * group) * call->T + at->t0;
    term_set sees[ATTENTION_BLOCK], seen_by[ATTENTION_BLOCK], any = {{0, 0}};
    for (ptrdiff_t i = 0; i < at->queries; i += ATTENTION_ROWS) {
        const int rows = at->queries - i < ATTENTION_ROWS ? (int)(at->queries - i) : ATTENTION_ROWS;
        const attention_tile tile = look(call, b, at->h_kv, first_row + i, rows, length, at->first, real);
        for (int r = 0; r < rows; r++) sees[i + r] = tile.seen[r], any = either(any, tile.seen[r]);
        if (tile.strips > 0) backward_tile(io, at, i, &tile, own);
    }
    const ptrdiff_t keys = terms_end(any);
    transpose_sets(seen_by, sees, at->queries, keys);
    const float *q = heads_row(io->q, b, at->h, at->t0), *dy = heads_row(io->dy, b, at->h, at->t0);
    for (ptrdiff_t j = 0; j < keys; j += ATTENTION_ROWS) {
        const int rows = keys - j < ATTENTION_ROWS ? (int)(keys - j) : ATTENTION_ROWS;
        sum_by_columns(own.sums, width, own.ds + j, q, io->q->time, hd, seen_by + j, rows);
        for (int r = 0; r < rows; r++)
            add_row(heads_row_out(io->dk, b, at->h_kv, at->first + j + r), own.sums + r * width, hd);
        sum_by_columns(own.sums, width, own.p + j, dy, io->dy->time, hd, seen_by + j, rows);
        for (int r = 0; r < rows; r++)
            add_row(heads_row_out(io->dv, b, at->h_kv, at->first + j + r), own.sums + r * width, hd);
    }
}

/* All of one key head: its dk and dv, and dq of the query heads that read it. */
static void backward_group(const backward_call *io, ptrdiff_t b, ptrdiff_t h_kv, backward_scratch own) {
    const cmha_attention *call = io->call;
    const ptrdiff_t hd = call->hd, T = call->T, group = call->H / call->H_kv;
    const ptrdiff_t length = call->lengths ? (ptrdiff_t)call->lengths[b] : call->S;
    fill_zero(io->dk, b, h_kv, call->S, hd);
    fill_zero(io->dv, b, h_kv, call->S, hd);
    for (ptrdiff_t g = 0; g < group; g++) {
        const ptrdiff_t h = h_kv * group + g;
        fill_zero(io->dq, b, h, T, hd);
        for (ptrdiff_t t = 0; t < T; t++)
            own.dots[g * T + t] = dot_row(heads_row(io->dy, b, h, t), heads_row(io->y, b, h, t), hd);
    }
    for (ptrdiff_t first = 0; first < length; first += ATTENTION_BLOCK) { /* packed once for all queries */
        const term_set real = real_keys(call, b, length, first);
        const ptrdiff_t n = length - first < ATTENTION_BLOCK ? length - first : ATTENTION_BLOCK;
        if (is_empty(real)) continue;
        pack_strips(own.keys, heads_row(io->k, b, h_kv, first), io->k->time, n, hd);
        pack_strips(own.values, heads_row(io->v, b, h_kv, first), io->v->time, n, hd);
        for (ptrdiff_t g = 0; g < group; g++)
            for (ptrdiff_t t0 = 0; t0 < T; t0 += ATTENTION_BLOCK) {
                const ptrdiff_t queries = T - t0 < ATTENTION_BLOCK ? T - t0 : ATTENTION_BLOCK;
                if (key_bound(call, length, t0 + queries - 1) <= first) continue; /* above the causal diagonal */
                const block_pair at = {b, h_kv, h_kv * group + g, t0, queries, first, own.dots + g * T + t0};
                backward_pair(io, &at, length, real, own);
            }
    }
    multiply(io->dk, b, h_kv, call->S, hd, call->scale);
    for (ptrdiff_t g = 0; g < group; g++) multiply(io->dq, b, h_kv * group + g, T, hd, call->scale);
}

void KERNEL_NAME(attention_backward)(const cmha_heads *dq, const cmha_heads *dk, const cmha_heads *dv,
                                     const cmha_heads *dy, const cmha_heads *y, const float *row_max,
                                     const float *row_sum, const cmha_heads *q, const cmha_heads *k,
                                     const cmha_heads *v, const cmha_attention *call, float *scratch, int threads) {
    const backward_call io = {dq, dk, dv, dy, y, q, k, v, row_max, row_sum, call};
    ptrdiff_t floats;
    KERNEL_NAME(attention_scratch)(&floats, call, 1, 1);
    CMHA_PARALLEL(threads, {
        const backward_scratch own = backward_layout(scratch + scratch_number() * floats, call);
        for (ptrdiff_t i = thread_number(); i < call->B * call->H_kv; i += thread_count())
            backward_group(&io, i / call->H_kv, i % call->H_kv, own);
    })
}
