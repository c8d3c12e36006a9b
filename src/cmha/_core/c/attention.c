/*
Scaled dot-product attention, forward, and its weights for looking at; no (T, S) array exists in the forward pass.

    s_ij = scale q_i . k_j + mask_ij
    p_ij = exp(s_ij) / sum_j exp(s_ij) over the keys that query i sees
    y_i  = sum_j p_ij f_ij v_j

q, y        (B, H, T, hd), any strides but the last      k, v   (B, H_kv, S, hd); head h reads key head h / (H / H_kv)
row_max     (B, H, T), scores in units of log 2          f      dropout's 0 or 1 / (1 - p), 1 without dropout
row_sum     (B, H, T), 0 = the row sees nothing, and y = 0

Vaswani et al. 2017, "Attention is all you need"; the online softmax of Milakov & Gimelshein 2018; blocks of queries and
keys as in Dao 2023, "FlashAttention-2". Here each block of keys is finished from zero and then merged, so a row's bits
do not depend on how many rows or blocks a call holds.

Order of sums
    score     q_d * float32(scale log2 e), rounded, then one fma chain over d ascending from +0; a float mask m is added
              as fma(m, float32(log2 e), s); at least -FLT_MAX. Hidden keys are decided before and do not count.
    block     of 128 keys from absolute key 0: m_b = highest score, e_j = exp2(s_j - m_b), l_b = 16 float lanes by j mod
              16 (ascending, from +0) and their tree, o_b = one fma chain over the visible keys ascending from +0 of
              (e_j f_j) v_j
    merge     ascending, blocks without a visible key left out: M = max(m, m_b), a = exp2(m - M), b = exp2(m_b - M),
              l = fma(l, a, l_b * b), o = fma(o, a, o_b * b); the first block is copied
    end       y = o / l;  a weight is exp2(s - row_max) / row_sum (times f)
*/
#include "variant.h"
#include "attention.h"

/* Of one thread: packed keys of a block (128, hd), q of a tile (ROWS, hd), scores (ROWS, 128), sums (ROWS, hd to
   16), dropout factors (128). */
typedef struct { float *keys, *q, *scores, *sums, *factors; } forward_scratch;

static ptrdiff_t forward_floats(const cmha_attention *call) {
    return rounded_up((ATTENTION_BLOCK + ATTENTION_ROWS) * call->hd, 16) +
           ATTENTION_ROWS * (ATTENTION_BLOCK + rounded_up(call->hd, 16)) + ATTENTION_BLOCK;
}

static forward_scratch forward_layout(float *at, const cmha_attention *call) {
    forward_scratch own;
    own.keys = at, at += ATTENTION_BLOCK * call->hd;
    own.q = at, at += rounded_up(ATTENTION_ROWS * call->hd, 16);
    own.scores = at, at += ATTENTION_ROWS * ATTENTION_BLOCK;
    own.sums = at, at += ATTENTION_ROWS * rounded_up(call->hd, 16);
    own.factors = at;
    return own;
}

void KERNEL_NAME(attention_scratch)(ptrdiff_t *floats, const cmha_attention *call, int backward, int threads) {
    ptrdiff_t each = forward_floats(call);
    if (backward) /* see backward_scratch */
        each += rounded_up((ATTENTION_BLOCK + ATTENTION_ROWS) * call->hd, 16) + 2 * ATTENTION_BLOCK * ATTENTION_BLOCK +
                rounded_up(call->T * (call->H_kv ? call->H / call->H_kv : 0), 16);
    *floats = each * threads;
}

/* A part: rows begin .. end - 1 of the group of key head h_kv, and how many keys its last-seeing row may see. */
typedef struct { ptrdiff_t b, h_kv, begin, end, length, bound; } attention_part;

/* Rows of one part: all of a group where groups are enough for the threads; at most 512, so that y stays in cache. */
static ptrdiff_t part_rows(const cmha_attention *call, int threads) {
    ptrdiff_t rows = call->T * (call->H / call->H_kv), groups = call->B * call->H_kv;
    ptrdiff_t parts = groups >= 4 * threads || threads == 1 ? 1 : (4 * threads + groups - 1) / groups;
    ptrdiff_t each = (rows + parts - 1) / parts;
    each = each < 512 ? each : 512;
    return rounded_up(each > 48 ? each : 48, ATTENTION_ROWS);
}

static attention_part part_number(const cmha_attention *call, ptrdiff_t number, ptrdiff_t each) {
    ptrdiff_t rows = call->T * (call->H / call->H_kv), parts = (rows + each - 1) / each, head = number / parts;
    attention_part part = {.b = head / call->H_kv, .h_kv = head % call->H_kv, .begin = number % parts * each};
    part.end = part.begin + each < rows ? part.begin + each : rows;
    part.length = call->lengths ? (ptrdiff_t)call->lengths[part.b] : call->S;
    for (ptrdiff_t r = part.begin; r < part.end; r++) {
        ptrdiff_t bound = key_bound(call, part.length, r % call->T);
        part.bound = bound > part.bound ? bound : part.bound;
    }
    return part;
}

static ptrdiff_t count_parts(const cmha_attention *call, ptrdiff_t each) {
    if (call->H_kv == 0) return 0;
    return call->B * call->H_kv * ((call->T * (call->H / call->H_kv) + each - 1) / each);
}

/* ------------------------------------------------------------------------------------------------------ forward */
/* Scores of one row to e_j (times dropout factors) in place; the block's sum of e_j is returned. */
static float exponentials(float *s, ptrdiff_t strips, float block_max, const float *factors) {
    v16 sum = v_zero();
    for (ptrdiff_t strip = 0; strip < strips; strip++) {
        v16 e = v_exp2_negative(v_sub(v_load(s + 16 * strip), v_set1(block_max))); /* hidden: 0 adds nothing */
        sum = v_add(sum, e);
        v_store(s + 16 * strip, factors ? v_mul(e, v_load(factors + 16 * strip)) : e);
    }
    return v_sum(sum);
}

static void merge_block(float *y, float *row_max, float *row_sum, const float *o, float block_max, float block_sum,
                        ptrdiff_t hd) {
    if (*row_sum == 0) { /* a block that saw a key has a sum of at least 1, or NaN */
        memcpy(y, o, sizeof(float) * (size_t)hd);
        *row_max = block_max, *row_sum = block_sum;
        return;
    }
    float top = block_max > *row_max ? block_max : *row_max, factor[16] = {*row_max - top, block_max - top};
    v_store(factor, v_exp2_negative(v_load(factor)));
    const v16 a = v_set1(factor[0]), b = v_set1(factor[1]);
    *row_sum = f_fma(*row_sum, factor[0], block_sum * factor[1]);
    *row_max = top;
    ptrdiff_t d = 0;
    for (; d + 16 <= hd; d += 16) v_store(y + d, v_fma(v_load(y + d), a, v_mul(v_load(o + d), b)));
    if (d < hd) v_store_n(y + d, v_fma(v_load_n(y + d, (int)(hd - d)), a, v_mul(v_load(o + d), b)), (int)(hd - d));
}

static void finish_row(float *y, float row_sum, ptrdiff_t hd) {
    if (row_sum == 0) {
        memset(y, 0, sizeof(float) * (size_t)hd);
        return;
    }
    ptrdiff_t d = 0;
    for (; d + 16 <= hd; d += 16) v_store(y + d, v_div(v_load(y + d), v_set1(row_sum)));
    for (; d < hd; d++) y[d] /= row_sum;
}

static void forward_part(const cmha_heads *y, float *row_max, float *row_sum, const cmha_heads *q, const cmha_heads *k,
                         const cmha_heads *v, const cmha_attention *call, attention_part part, forward_scratch own) {
    const ptrdiff_t hd = call->hd, width = rounded_up(hd, 16), group = call->H / call->H_kv;
    const float factor = query_factor(call);
    /* rows of a group are neighbours in row_max and row_sum too */
    const ptrdiff_t group_start = (part.b * call->H + part.h_kv * group) * call->T;
    row_max += group_start, row_sum += group_start;
    for (ptrdiff_t r = part.begin; r < part.end; r++) row_max[r] = row_sum[r] = 0;
    for (ptrdiff_t first = 0; first < part.bound; first += ATTENTION_BLOCK) {
        const term_set real = real_keys(call, part.b, part.length, first);
        const ptrdiff_t n = part.bound - first < ATTENTION_BLOCK ? part.bound - first : ATTENTION_BLOCK;
        const float *values = heads_row(v, part.b, part.h_kv, first);
        if (is_empty(real)) continue;
        pack_strips(own.keys, heads_row(k, part.b, part.h_kv, first), k->time, n, hd);
        for (ptrdiff_t row = part.begin; row < part.end; row += ATTENTION_ROWS) {
            const int rows = part.end - row < ATTENTION_ROWS ? (int)(part.end - row) : ATTENTION_ROWS;
            const attention_tile tile = look(call, part.b, part.h_kv, row, rows, part.length, first, real);
            float block_max[ATTENTION_ROWS], block_sum[ATTENTION_ROWS];
            if (tile.strips == 0) continue;
            pack_tile(own.q, q, part.b, &tile, hd, factor);
            dot_tile(own.scores, own.q, own.keys, hd, tile.strips, rows);
            for (int r = 0; r < rows; r++) {
                float *s = own.scores + r * ATTENTION_BLOCK;
                block_max[r] = finish_scores(s, call, part.b, &tile, r, first);
                if (call->dropout_p > 0) tile_factors(own.factors, call, part.b, &tile, r, first);
                block_sum[r] = exponentials(s, tile.strips, block_max[r], call->dropout_p > 0 ? own.factors : NULL);
            }
            sum_by_rows(own.sums, width, own.scores, values, v->time, hd, tile.seen, rows);
            for (int r = 0; r < rows; r++)
                if (!is_empty(tile.seen[r]))
                    merge_block(heads_row_out(y, part.b, tile.h[r], tile.t[r]), row_max + row + r, row_sum + row + r,
                                own.sums + r * width, block_max[r], block_sum[r], hd);
        }
    }
    for (ptrdiff_t r = part.begin; r < part.end; r++)
        finish_row(heads_row_out(y, part.b, part.h_kv * group + r / call->T, r % call->T), row_sum[r], hd);
}

void KERNEL_NAME(attention_forward)(const cmha_heads *y, float *row_max, float *row_sum, const cmha_heads *q,
                                    const cmha_heads *k, const cmha_heads *v, const cmha_attention *call,
                                    float *scratch, int threads) {
    if (call->H_kv == 0 || call->T == 0) return;
    const ptrdiff_t each = part_rows(call, threads), parts = count_parts(call, each);
    CMHA_PARALLEL(threads, {
        forward_scratch own = forward_layout(scratch + scratch_number() * forward_floats(call), call);
        for (ptrdiff_t i = thread_number(); i < parts; i += thread_count()) /* in turn: later parts see more keys */
            forward_part(y, row_max, row_sum, q, k, v, call, part_number(call, i, each), own);
    })
}

/* ------------------------------------------------------------------------------------------------------ weights */
static void weights_part(float *weights, const float *row_max, const float *row_sum, const cmha_heads *q,
                         const cmha_heads *k, const cmha_attention *call, attention_part part, forward_scratch own) {
    const ptrdiff_t hd = call->hd, S = call->S;
    const float factor = query_factor(call);
    const ptrdiff_t group_start = (part.b * call->H + part.h_kv * (call->H / call->H_kv)) * call->T;
    row_max += group_start, row_sum += group_start, weights += group_start * S;
    for (ptrdiff_t first = 0; first < S; first += ATTENTION_BLOCK) {
        const term_set real = real_keys(call, part.b, part.length, first);
        const ptrdiff_t columns = S - first < ATTENTION_BLOCK ? S - first : ATTENTION_BLOCK;
        const ptrdiff_t n = part.bound - first < columns ? part.bound - first : columns;
        if (!is_empty(real)) pack_strips(own.keys, heads_row(k, part.b, part.h_kv, first), k->time, n, hd);
        for (ptrdiff_t row = part.begin; row < part.end; row += ATTENTION_ROWS) {
            const int rows = part.end - row < ATTENTION_ROWS ? (int)(part.end - row) : ATTENTION_ROWS;
            const attention_tile tile = look(call, part.b, part.h_kv, row, rows, part.length, first, real);
            pack_tile(own.q, q, part.b, &tile, hd, factor);
            dot_tile(own.scores, own.q, own.keys, hd, tile.strips, rows);
            for (int r = 0; r < rows; r++) {
                float *p = own.scores + r * ATTENTION_BLOCK, *to = weights + (row + r) * S + first;
                const ptrdiff_t seen = 16 * tile.strips < columns ? 16 * tile.strips : columns;
                finish_scores(p, call, part.b, &tile, r, first);
                finish_weights(p, &tile, r, row_max[row + r], row_sum[row + r]);
                if (call->dropout_p > 0) {
                    tile_factors(own.factors, call, part.b, &tile, r, first);
                    for (ptrdiff_t i = 0; i < seen; i++) p[i] *= own.factors[i];
                }
                memcpy(to, p, sizeof(float) * (size_t)seen);
                memset(to + seen, 0, sizeof(float) * (size_t)(columns - seen));
            }
        }
    }
}

void KERNEL_NAME(attention_weights)(float *weights, const float *row_max, const float *row_sum, const cmha_heads *q,
                                    const cmha_heads *k, const cmha_attention *call, float *scratch, int threads) {
    if (call->H_kv == 0 || call->T == 0) return;
    const ptrdiff_t each = part_rows(call, threads), parts = count_parts(call, each);
    CMHA_PARALLEL(threads, {
        forward_scratch own = forward_layout(scratch + scratch_number() * forward_floats(call), call);
        for (ptrdiff_t i = thread_number(); i < parts; i += thread_count())
            weights_part(weights, row_max, row_sum, q, k, call, part_number(call, i, each), own);
    })
}
