/*
The gradient of scaled dot-product attention; weights are computed again from what the forward pass stored for a row.

    p_ij = exp2(s_ij - row_max_i) / row_sum_i        D_i   = sum_d dy_id y_id
    dp_ij = f_ij dy_i . v_j                          ds_ij = p_ij (dp_ij - D_i)
    dv_j = sum_i (p_ij f_ij) dy_i                    dq_i  = scale sum_j ds_ij k_j        dk_j = scale sum_i ds_ij q_i

q, y, dy, dq   (B, H, T, hd)      k, v, dk, dv   (B, H_kv, S, hd)      f   dropout's factors, 1 without dropout

Dao 2023, "FlashAttention-2"; without its atomics: one thread owns dk and dv of a key head and dq of the heads that read
it.

Loops
    1  key heads (b, h_kv), to whichever thread is free
    2  query heads of the group, blocks of 128 queries: q and dy as rows and, by panels, as q^T and dy^T
    3  blocks of 128 keys, copied; panels: s^T = k q^T, dp^T = v dy^T, then p^T and ds^T (128, 128), dq^T += k^T ds^T
    4  tiles of keys: dv += p^T dy, dk += ds^T q

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

/* Of one thread: keys and values of the key head (S, padded hd each) and their gradients (S, hd); q and dy of a block of
   queries (128, padded hd each); q^T, dy^T and dq^T of its panels (panels, hd, LANES); p^T and ds^T (keys 128, queries
   PAIR_ROW); row_max, row_sum and D of the queries (128 each); float mask or dropout factors (128, LANES), sums of one panel or tile, rows before or after they
   are turned (LANES, 128 or padded hd). */
typedef struct {
    float *keys, *values, *dk, *dv, *q_rows, *dy_rows, *q, *dy, *dq, *p, *ds, *max, *sum, *dots, *extra, *sums, *rows;
} backward_scratch;

#define PAIR_ROW (ATTENTION_BLOCK + 16) /* an odd number of cache lines, as padded() */
#define SUMS_ROWS (LANES > PRODUCT_ROWS ? LANES : PRODUCT_ROWS)

static backward_scratch backward_layout(float *at, const cmha_attention *call, ptrdiff_t *floats) {
    const ptrdiff_t width = rounded_up(call->hd, 16), stride = padded(call->hd);
    const ptrdiff_t copies = ATTENTION_BLOCK * stride, turned = ATTENTION_BLOCK * width;
    backward_scratch own;
    ptrdiff_t i = 0;
    own.keys = at + i, i += call->S * stride;
    own.values = at + i, i += call->S * stride;
    own.dk = at + i, i += call->S * width;
    own.dv = at + i, i += call->S * width;
    own.q_rows = at + i, i += copies;
    own.dy_rows = at + i, i += copies;
    own.q = at + i, i += turned;
    own.dy = at + i, i += turned;
    own.dq = at + i, i += turned;
    own.p = at + i, i += ATTENTION_BLOCK * PAIR_ROW;
    own.ds = at + i, i += ATTENTION_BLOCK * PAIR_ROW;
    own.max = at + i, i += ATTENTION_BLOCK;
    own.sum = at + i, i += ATTENTION_BLOCK;
    own.dots = at + i, i += ATTENTION_BLOCK;
    own.extra = at + i, i += LANES * ATTENTION_BLOCK;
    own.sums = at + i, i += SUMS_ROWS * width;
    own.rows = at + i, i += LANES * (ATTENTION_BLOCK + stride);
    *floats = i;
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

/* n rows of x, `stride` apart, times scale to rows t .. of head h of y; plus 0, so that -0 becomes +0. */
static void scaled_rows(const cmha_heads *y, ptrdiff_t b, ptrdiff_t h, ptrdiff_t t, const float *x, ptrdiff_t stride,
                        ptrdiff_t n, ptrdiff_t hd, float scale) {
    for (ptrdiff_t i = 0; i < n; i++) {
        float *row = heads_row_out(y, b, h, t + i);
        for (ptrdiff_t d = 0; d < hd; d += 16)
            v_store_up_to(row + d, v_add(v_mul(v_load(x + i * stride + d), v_set1(scale)), v_zero()), hd - d);
    }
}

typedef struct {
    const cmha_heads *dq, *dk, *dv, *dy, *y, *q, *k, *v;
    const float *row_max, *row_sum;
    const cmha_attention *call;
} backward_call;

/* A block of queries of head h from t0, against a block of keys from `first`. */
typedef struct { ptrdiff_t b, h_kv, h, t0, queries, length, first; term_set real; } block_pair;

static void panel_of_pair(attention_panel *panel, const cmha_attention *call, const block_pair *at, ptrdiff_t i) {
    const ptrdiff_t row = (at->h - at->h_kv * (call->H / call->H_kv)) * call->T + at->t0 + i;
    panel_of_rows(panel, call, at->b, at->h_kv, row, smaller(at->queries - i, LANES));
}

/* The block of queries in all the forms that its pairs need. */
static void backward_queries(const backward_call *io, const block_pair *at, backward_scratch own) {
    const cmha_attention *call = io->call;
    const ptrdiff_t b = at->b, h = at->h, t0 = at->t0, n = at->queries, hd = call->hd, width = rounded_up(hd, 16);
    const ptrdiff_t row = (b * call->H + h) * call->T + t0;
    attention_panel panel;
    copy_rows(own.q_rows, heads_row(io->q, b, h, t0), io->q->time, n, hd);
    copy_rows(own.dy_rows, heads_row(io->dy, b, h, t0), io->dy->time, n, hd);
    for (ptrdiff_t i = 0; i < n; i += LANES) {
        panel_of_pair(&panel, call, at, i);
        panel_lanes(own.q + i * width, own.rows, io->q, &panel, hd, query_factor(call));
        panel_lanes(own.dy + i * width, own.rows, io->dy, &panel, hd, 1.0f);
    }
    memset(own.dq, 0, sizeof(float) * (size_t)(rounded_up(n, LANES) * width));
    for (ptrdiff_t i = 0; i < rounded_up(n, LANES); i++) {
        own.max[i] = i < n ? io->row_max[row + i] : 0;
        own.sum[i] = i < n ? io->row_sum[row + i] : 1;
        own.dots[i] = i < n ? dot_row(heads_row(io->dy, b, h, t0 + i), heads_row(io->y, b, h, t0 + i), hd) : 0;
    }
}

/* Queries i .. of the pair: their p^T (times factors) and ds^T, and what this block of keys adds to their dq^T. */
static void backward_panel(const backward_call *io, const block_pair *at, ptrdiff_t i, const attention_panel *panel,
                           backward_scratch own) {
    const cmha_attention *call = io->call;
    const ptrdiff_t hd = call->hd, width = rounded_up(hd, 16), stride = padded(hd);
    float *p = own.p + i, *ds = own.ds + i, *dq = own.dq + i * width, highest[LANES];
    const float *mask = NULL;
    if (call->float_mask) panel_float_mask(own.extra, own.rows, call, panel, at->first), mask = own.extra;
    panel_scores(p, PAIR_ROW, highest, own.keys, own.q + i * width, mask, panel, hd);
    panel_weights(p, PAIR_ROW, own.max + i, own.sum + i, panel);
    const product dots = {.out = ds, .out_row = PAIR_ROW, .a = own.values, .a_step = stride, .b = own.dy + i * width,
                          .b_row = LANES, .end = hd};
    product_all(BY_ROWS, &dots, panel->end, panel->vectors);
    if (call->dropout_p > 0) panel_factors(own.extra, own.rows, call, panel, at->first);
    for (ptrdiff_t x = 0; x < 16 * panel->vectors; x += 16) {
        const v16 dot = v_load(own.dots + i + x);
        for (ptrdiff_t j = 0; j < panel->end; j++) {
            const v16 weight = v_load(p + j * PAIR_ROW + x);
            v16 dp = v_load(ds + j * PAIR_ROW + x);
            if (call->dropout_p > 0) {
                const v16 factor = v_load(own.extra + j * LANES + x);
                dp = v_mul(dp, factor);
                v_store(p + j * PAIR_ROW + x, v_mul(weight, factor));
            }
            v_store(ds + j * PAIR_ROW + x, v_mul(weight, v_sub(dp, dot)));
        }
    }
    panel_sums(own.sums, own.keys, stride, ds, PAIR_ROW, panel, hd);
    for (ptrdiff_t d = 0; d < hd; d++)
        for (ptrdiff_t x = d * LANES; x < d * LANES + 16 * panel->vectors; x += 16)
            v_store(dq + x, v_add(v_load(dq + x), v_load(own.sums + x)));
}

/* Rows j .. j + r - 1 of the block's dx (dk or dv) get the sums over the queries that see them of
   weights^T (keys, PAIR_ROW) @ x. */
static void add_to_keys(float *dx, ptrdiff_t j, int r, const float *weights, const float *x, const term_set *seen_by,
                        ptrdiff_t hd, float *sums) {
    const ptrdiff_t width = rounded_up(hd, 16);
    const product w = {.out = sums, .out_row = width, .a = weights + j * PAIR_ROW, .a_step = PAIR_ROW, .b = x,
                       .b_row = padded(hd)};
    product_of_sets(w, seen_by + j, r, width / 16);
    dx += j * width;
    for (ptrdiff_t i = 0; i < r * width; i += 16) v_store(dx + i, v_add(v_load(dx + i), v_load(sums + i)));
}

static void backward_pair(const backward_call *io, const block_pair *at, backward_scratch own) {
    const ptrdiff_t hd = io->call->hd, width = rounded_up(hd, 16);
    term_set seen_by[ATTENTION_BLOCK];
    attention_panel panel;
    ptrdiff_t keys = 0;
    own.keys += at->first * padded(hd), own.values += at->first * padded(hd);
    own.dk += at->first * width, own.dv += at->first * width;
    memset(seen_by, 0, sizeof seen_by);
    for (ptrdiff_t i = 0; i < at->queries; i += LANES) {
        panel_of_pair(&panel, io->call, at, i);
        panel_look(&panel, io->call, at->length, at->first, at->real);
        const uint64_t all = first_terms(panel.rows).word[0];
        for (ptrdiff_t j = 0; j < panel.end; j++)
            seen_by[j].word[i >> 6] |= (j < panel.plain ? all : panel.sees[j]) << (i & 63);
        if (panel.end > 0) backward_panel(io, at, i, &panel, own);
        keys = panel.end > keys ? panel.end : keys;
    }
    for (ptrdiff_t j = 0, r; j < keys; j += r) {
        r = tile_rows(keys - j);
        add_to_keys(own.dk, j, (int)r, own.ds, own.q_rows, seen_by, hd, own.sums);
        add_to_keys(own.dv, j, (int)r, own.p, own.dy_rows, seen_by, hd, own.sums);
    }
}

/* dq^T times scale to the rows of dq. */
static void backward_finish(const backward_call *io, const block_pair *at, backward_scratch own) {
    const ptrdiff_t hd = io->call->hd, width = rounded_up(hd, 16), stride = padded(hd);
    for (ptrdiff_t i = 0; i < at->queries; i += 16) {
        const float *dq = own.dq + i / LANES * LANES * width + i % LANES;
        for (ptrdiff_t d = 0; d < width; d += 16) v_transpose(own.rows + d, stride, dq + d * LANES, LANES);
        scaled_rows(io->dq, at->b, at->h, at->t0 + i, own.rows, stride, smaller(at->queries - i, 16), hd, io->call->scale);
    }
}

/* All of one key head: its dk and dv, and dq of the query heads that read it. */
static void backward_group(const backward_call *io, ptrdiff_t b, ptrdiff_t h_kv, backward_scratch own) {
    const cmha_attention *call = io->call;
    const ptrdiff_t hd = call->hd, width = rounded_up(hd, 16), T = call->T, S = call->S, group = call->H / call->H_kv;
    block_pair at = {.b = b, .h_kv = h_kv, .length = call->lengths ? (ptrdiff_t)call->lengths[b] : call->S};
    copy_rows(own.keys, heads_row(io->k, b, h_kv, 0), io->k->time, S, hd);
    copy_rows(own.values, heads_row(io->v, b, h_kv, 0), io->v->time, S, hd);
    memset(own.dk, 0, sizeof(float) * (size_t)(S * width));
    memset(own.dv, 0, sizeof(float) * (size_t)(S * width));
    for (at.h = h_kv * group; at.h < (h_kv + 1) * group; at.h++)
        for (at.t0 = 0; at.t0 < T; at.t0 += ATTENTION_BLOCK) {
            at.queries = smaller(T - at.t0, ATTENTION_BLOCK);
            backward_queries(io, &at, own);
            const ptrdiff_t bound = key_bound(call, at.length, at.t0 + at.queries - 1);
            for (at.first = 0; at.first < bound; at.first += ATTENTION_BLOCK) {
                at.real = real_keys(call, b, at.length, at.first);
                if (!is_empty(at.real)) backward_pair(io, &at, own);
            }
            backward_finish(io, &at, own);
        }
    scaled_rows(io->dk, b, h_kv, 0, own.dk, width, S, hd, call->scale);
    scaled_rows(io->dv, b, h_kv, 0, own.dv, width, S, hd, 1.0f);
}

void KERNEL_NAME(attention_backward)(const cmha_heads *dq, const cmha_heads *dk, const cmha_heads *dv,
                                     const cmha_heads *dy, const cmha_heads *y, const float *row_max,
                                     const float *row_sum, const cmha_heads *q, const cmha_heads *k,
                                     const cmha_heads *v, const cmha_attention *call, float *scratch, int threads) {
    const backward_call io = {dq, dk, dv, dy, y, q, k, v, row_max, row_sum, call};
    ptrdiff_t taken = 0, floats;
    KERNEL_NAME(attention_backward_scratch)(&floats, call, 1);
    CMHA_PARALLEL(threads, {
        ptrdiff_t unused;
        const backward_scratch own = backward_layout(scratch + scratch_number() * floats, call, &unused);
        for (ptrdiff_t i; (i = take_item(&taken)) < call->B * call->H_kv;)
            backward_group(&io, i / call->H_kv, i % call->H_kv, own);
    })
}

void KERNEL_NAME(attention_backward_scratch)(ptrdiff_t *floats, const cmha_attention *call, int threads) {
    float base;
    backward_layout(&base, call, floats);
    *floats *= threads;
}
