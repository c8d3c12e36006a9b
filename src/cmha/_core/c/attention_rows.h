/*
Attention forward for a few query rows, as in one-token decoding: keys in the lanes of the vectors.

    s (rows, keys) = q k^T       e_j = exp2(s_j - m_b), their sum       o (rows, hd) = e v

The same sums in the same order as attention.c's panels, so the same bits: a score and an output are one fma chain each,
and the 16 lanes of the sum over keys, there 16 vectors, are here the lanes of one.
*/
#ifndef CMHA_ATTENTION_ROWS_H
#define CMHA_ATTENTION_ROWS_H

#include "attention.h"

#define FEW_TILE PRODUCT_ROWS
#define KEYS_ROW (ATTENTION_BLOCK + 16) /* of k^T: an odd number of cache lines, as padded() */

typedef struct {
    const cmha_heads *y;
    float *row_max, *row_sum;
    const cmha_heads *q, *k, *v;
    const cmha_attention *call;
} forward_call;

/* A part: rows begin .. end - 1 of the group of key head h_kv; how many keys its last-seeing row may see. */
typedef struct { ptrdiff_t b, h_kv, begin, end, length, bound; } attention_part;

/* k^T of a block (hd, 128) and, where rows are no whole vectors, its values (128, padded hd); of a tile: q (ROWS, hd),
   scores (ROWS, 128), sums (ROWS, hd), dropout factors (128). */
typedef struct { float *keys, *values, *q, *scores, *sums, *factors; } few_scratch;

static ptrdiff_t few_floats(const cmha_attention *call) {
    const ptrdiff_t width = rounded_up(call->hd, 16), stride = padded(call->hd);
    return width * KEYS_ROW + ATTENTION_BLOCK * stride + FEW_TILE * (stride + ATTENTION_BLOCK + width) + ATTENTION_BLOCK;
}

static few_scratch few_layout(float *at, const cmha_attention *call) {
    const ptrdiff_t width = rounded_up(call->hd, 16), stride = padded(call->hd);
    few_scratch own;
    own.keys = at, at += width * KEYS_ROW;
    own.values = at, at += ATTENTION_BLOCK * stride;
    own.q = at, at += FEW_TILE * stride;
    own.scores = at, at += FEW_TILE * ATTENTION_BLOCK;
    own.sums = at, at += FEW_TILE * width;
    own.factors = at;
    return own;
}

/* n keys to k^T (hd, KEYS_ROW); the last strip of 16 is filled up with 0. */
static void keys_to_lanes(float *to, const float *k, ptrdiff_t stride, ptrdiff_t n, ptrdiff_t hd) {
    for (ptrdiff_t j = 0; j < n; j += 16, k += 16 * stride) {
        const ptrdiff_t lanes = smaller(n - j, 16);
        ptrdiff_t d = 0;
        if (lanes == 16)
            for (; d + 16 <= hd; d += 16) v_transpose(to + d * KEYS_ROW + j, KEYS_ROW, k + d, stride);
        for (; d < hd; d++)
            for (ptrdiff_t lane = 0; lane < 16; lane++)
                to[d * KEYS_ROW + j + lane] = lane < lanes ? k[lane * stride + d] : 0.0f;
    }
}

/* Dot products of a row to scores, in place; hidden keys -infinity. Returns the maximum of the visible ones, NaN not
   counted, 0 as +0. */
static float few_scores(float *s, ptrdiff_t strips, const float *mask, ptrdiff_t mask_stride, ptrdiff_t n,
                        const term_set *seen) {
    v16 highest = v_set1(-INFINITY);
    for (ptrdiff_t strip = 0, key = 0; strip < strips; strip++, key += 16) {
        v16 x = v_load(s + key);
        const unsigned bits = strip_bits(seen, strip);
        if (mask) x = score_with_mask(x, spread_load(mask + key * mask_stride, mask_stride, smaller(n - key, 16)));
        x = score_at_least(x);
        if (bits != 0xffffu) x = v_select(m_from_bits(bits), x, v_set1(-INFINITY));
        v_store(s + key, x);
        highest = v_max(x, highest); /* this order: x > highest ? x : highest */
    }
    return v_highest(highest) + 0.0f;
}

/* Scores of a row to e_j (times dropout factors) in place; the block's sum of e_j is returned. */
static float few_exponentials(float *s, ptrdiff_t strips, float block_max, const float *factors) {
    v16 sum = v_zero();
    for (ptrdiff_t strip = 0; strip < strips; strip++) {
        const v16 e = v_exp2_negative(v_sub(v_load(s + 16 * strip), v_set1(block_max))); /* hidden: 0 adds nothing */
        sum = v_add(sum, e);
        v_store(s + 16 * strip, factors ? v_mul(e, v_load(factors + 16 * strip)) : e);
    }
    return v_sum(sum);
}

static void few_merge(float *y, float *row_max, float *row_sum, const float *o, float block_max, float block_sum,
                      ptrdiff_t hd) {
    if (*row_sum == 0) { /* a block that saw a key has a sum of at least 1, or NaN */
        memcpy(y, o, sizeof(float) * (size_t)hd);
        *row_max = block_max, *row_sum = block_sum;
        return;
    }
    const float top = block_max > *row_max ? block_max : *row_max;
    float factor[16] = {*row_max - top, block_max - top};
    v_store(factor, v_exp2_negative(v_load(factor)));
    const v16 a = v_set1(factor[0]), b = v_set1(factor[1]);
    *row_sum = f_fma(*row_sum, factor[0], block_sum * factor[1]);
    *row_max = top;
    for (ptrdiff_t d = 0; d < hd; d += 16)
        v_store_up_to(y + d, v_fma(v_load_up_to(y + d, hd - d), a, v_mul(v_load(o + d), b)), hd - d);
}

/* Rows row .. row + rows - 1 against the block of keys at `first`. */
static void few_tile(const forward_call *io, const attention_part *part, ptrdiff_t row, ptrdiff_t rows, ptrdiff_t first,
                     term_set real, product values, few_scratch own) {
    const cmha_attention *call = io->call;
    const ptrdiff_t hd = call->hd, width = rounded_up(hd, 16), stride = padded(hd), group = call->H / call->H_kv;
    ptrdiff_t h[FEW_TILE], t[FEW_TILE];
    term_set seen[FEW_TILE], any = {{0, 0}};
    for (ptrdiff_t r = 0; r < rows; r++) {
        h[r] = part->h_kv * group + (row + r) / call->T, t[r] = (row + r) % call->T;
        seen[r] = seen_keys(call, part->b, h[r], t[r], part->length, first, real);
        any = either(any, seen[r]);
        copy_row(own.q + r * stride, heads_row(io->q, part->b, h[r], t[r]), hd, query_factor(call));
    }
    const ptrdiff_t strips = (terms_end(any) + 15) / 16;
    if (strips == 0) return;
    const product dots = {.out = own.scores, .out_row = ATTENTION_BLOCK, .a = own.q, .a_step = stride, .b = own.keys,
                          .b_row = KEYS_ROW, .end = hd};
    float block_max[FEW_TILE], block_sum[FEW_TILE];
    product_rows(BY_ROWS, (int)rows, &dots, 0, strips);
    for (ptrdiff_t r = 0; r < rows; r++) {
        float *s = own.scores + r * ATTENTION_BLOCK;
        const float *mask = call->float_mask ? call->float_mask + mask_offset(call, part->b, h[r], t[r], first) : NULL;
        block_max[r] = few_scores(s, strips, mask, call->mask_strides[3], call->S - first, &seen[r]);
        if (call->dropout_p > 0)
            dropout_row(own.factors, call->seed, call->stream, weight_number(call, part->b, h[r], t[r], first),
                        (int)smaller(16 * strips, call->S - first), call->dropout_p);
        block_sum[r] = few_exponentials(s, strips, block_max[r], call->dropout_p > 0 ? own.factors : NULL);
    }
    values.out = own.sums, values.out_row = width, values.a = own.scores, values.a_step = ATTENTION_BLOCK;
    product_of_sets(values, seen, (int)rows, width / 16);
    for (ptrdiff_t r = 0; r < rows; r++) {
        const ptrdiff_t at = (part->b * call->H + h[r]) * call->T + t[r];
        if (!is_empty(seen[r]))
            few_merge(heads_row_out(io->y, part->b, h[r], t[r]), io->row_max + at, io->row_sum + at,
                      own.sums + r * width, block_max[r], block_sum[r], hd);
    }
}

static void few_part(const forward_call *io, const attention_part *part, few_scratch own) {
    const cmha_attention *call = io->call;
    const ptrdiff_t hd = call->hd, group = call->H / call->H_kv;
    const ptrdiff_t start = (part->b * call->H + part->h_kv * group) * call->T; /* rows of a group are neighbours */
    float *row_max = io->row_max + start, *row_sum = io->row_sum + start;
    for (ptrdiff_t row = part->begin; row < part->end; row++) row_max[row] = row_sum[row] = 0;
    for (ptrdiff_t first = 0; first < part->bound; first += ATTENTION_BLOCK) {
        const term_set real = real_keys(call, part->b, part->length, first);
        const ptrdiff_t n = smaller(part->bound - first, ATTENTION_BLOCK);
        const float *v = heads_row(io->v, part->b, part->h_kv, first);
        product values = {.b = v, .b_row = io->v->time};
        if (is_empty(real)) continue;
        keys_to_lanes(own.keys, heads_row(io->k, part->b, part->h_kv, first), io->k->time, n, hd);
        if (hd % 16) {
            copy_rows(own.values, v, io->v->time, n, hd);
            values.b = own.values, values.b_row = padded(hd);
        }
        for (ptrdiff_t row = part->begin; row < part->end; row += FEW_TILE)
            few_tile(io, part, row, smaller(part->end - row, FEW_TILE), first, real, values, own);
    }
    for (ptrdiff_t row = part->begin; row < part->end; row++) {
        float *y = heads_row_out(io->y, part->b, part->h_kv * group + row / call->T, row % call->T);
        if (row_sum[row] == 0) memset(y, 0, sizeof(float) * (size_t)hd);
        else
            for (ptrdiff_t d = 0; d < hd; d += 16)
                v_store_up_to(y + d, v_div(v_load_up_to(y + d, hd - d), v_set1(row_sum[row])), hd - d);
    }
}
#endif
