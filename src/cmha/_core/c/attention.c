/*
Scaled dot-product attention, forward; no (T, S) array exists.

    s_ij = scale q_i . k_j + mask_ij
    p_ij = exp(s_ij) / sum_j exp(s_ij) over the keys that query i sees
    y_i  = sum_j p_ij f_ij v_j

q, y        (B, H, T, hd), any strides but the last      k, v   (B, H_kv, S, hd); head h reads key head h / (H / H_kv)
row_max     (B, H, T), scores in units of log 2          f      dropout's 0 or 1 / (1 - p), 1 without dropout
row_sum     (B, H, T), 0 = the row sees nothing, and y = 0

Vaswani et al. 2017, "Attention is all you need"; the online softmax of Milakov & Gimelshein 2018; blocks of queries and
keys as in Dao 2023, "FlashAttention-2". Here each block of keys is finished from zero and then merged, so a row's bits
do not depend on how many rows or blocks a call holds.

Loops
    1  parts: up to PART_ROWS query rows of a group of heads, to whichever thread is free; those that see most first
    2  blocks of 128 keys, copied once for the part
    3  panels of LANES rows: s^T = k q^T, exponentials down the columns, y^T += v^T e^T (attention.h)
A part of a few rows (one-token decoding) would leave most lanes empty: there keys are in the lanes (attention_rows.h).

Order of sums
    score     q_d * float32(scale log2 e), rounded, then one fma chain over d ascending from +0; a float mask m is added
              as fma(m, float32(log2 e), s); at least -FLT_MAX. Hidden keys are decided before and do not count.
    block     of 128 keys from absolute key 0: m_b = highest score (0 is +0), e_j = exp2(s_j - m_b), l_b = 16 float lanes
              by j mod 16 (ascending, from +0) and their tree, o_b = one fma chain over the visible keys ascending from
              +0 of (e_j f_j) v_j
    merge     ascending, blocks without a visible key left out: M = max(m, m_b), a = exp2(m - M), b = exp2(m_b - M),
              l = fma(l, a, l_b * b), o = fma(o, a, o_b * b); the first block is copied
    end       y = o / l;  a weight is exp2(s - row_max) / row_sum (times f)
*/
#include "variant.h"
#include "attention.h"
#include "attention_rows.h"

#define PART_ROWS 512 /* q^T and y^T of a part stay in the second-level cache */
#define FEW_ROWS 8    /* below that, lanes hold keys */

/* Of one thread: keys and values of a block (128, padded hd), q^T and y^T of a part (panels, hd, LANES), its maxima and
   sums (PART_ROWS each); of a panel: scores (128, LANES), float mask or dropout factors (128, LANES), the block's sums
   (hd, LANES), rows before they are turned (LANES, 128 or padded hd). */
typedef struct { float *keys, *values, *q, *y, *max, *sum, *scores, *extra, *block, *rows; } forward_scratch;

static ptrdiff_t forward_floats(const cmha_attention *call) {
    const ptrdiff_t width = rounded_up(call->hd, 16), stride = padded(call->hd);
    const ptrdiff_t panels = 2 * ATTENTION_BLOCK * stride + 2 * PART_ROWS * (width + 1) +
                             LANES * (3 * ATTENTION_BLOCK + width + stride);
    return panels > few_floats(call) ? panels : few_floats(call);
}

static forward_scratch forward_layout(float *at, const cmha_attention *call) {
    const ptrdiff_t width = rounded_up(call->hd, 16), stride = padded(call->hd);
    forward_scratch own;
    own.keys = at, at += ATTENTION_BLOCK * stride;
    own.values = at, at += ATTENTION_BLOCK * stride;
    own.q = at, at += PART_ROWS * width;
    own.y = at, at += PART_ROWS * width;
    own.max = at, at += PART_ROWS;
    own.sum = at, at += PART_ROWS;
    own.scores = at, at += LANES * ATTENTION_BLOCK;
    own.extra = at, at += LANES * ATTENTION_BLOCK;
    own.block = at, at += LANES * width;
    own.rows = at; /* LANES * (ATTENTION_BLOCK + stride) */
    return own;
}

/* Rows of one part: all of a group where groups are enough for the threads. */
static ptrdiff_t part_rows(const cmha_attention *call, int threads) {
    const ptrdiff_t rows = call->T * (call->H / call->H_kv), groups = call->B * call->H_kv;
    const ptrdiff_t parts = groups >= 4 * threads || threads == 1 ? 1 : (4 * threads + groups - 1) / groups;
    return smaller(rounded_up((rows + parts - 1) / parts, LANES), PART_ROWS);
}

/* Item `number` of count_parts: the last rows of every group first, as they see the most keys. */
static attention_part part_number(const cmha_attention *call, ptrdiff_t number, ptrdiff_t each) {
    const ptrdiff_t rows = call->T * (call->H / call->H_kv), groups = call->B * call->H_kv;
    const ptrdiff_t group = number % groups, place = (rows + each - 1) / each - 1 - number / groups;
    attention_part part = {.b = group / call->H_kv, .h_kv = group % call->H_kv, .begin = place * each};
    part.end = smaller(part.begin + each, rows);
    part.length = call->lengths ? (ptrdiff_t)call->lengths[part.b] : call->S;
    const ptrdiff_t first = part.begin % call->T, last = first + part.end - part.begin - 1; /* may run over a head's end */
    part.bound = key_bound(call, part.length, smaller(last, call->T - 1));
    return part;
}

static ptrdiff_t count_parts(const cmha_attention *call, ptrdiff_t each) {
    return call->B * call->H_kv * ((call->T * (call->H / call->H_kv) + each - 1) / each);
}

/* Scores (end, LANES) to e_j, times dropout's factors (or NULL), in place; the block's sums of e_j to sum. Lane l of the
   order of sums is keys l, l + 16, ... */
static void panel_exponentials(float *s, float *sum, const float *highest, const float *factors,
                               const attention_panel *panel) {
    for (ptrdiff_t x = 0; x < 16 * panel->vectors; x += 16) {
        const v16 top = v_load(highest + x);
        float lanes[16 * 16];
        for (int i = 0; i < 16; i++) v_store(lanes + 16 * i, v_zero());
        for (ptrdiff_t j = 0; j < panel->end; j++) {
            const v16 e = v_exp2_negative(v_sub(v_load(s + j * LANES + x), top)); /* hidden: 0 adds nothing */
            float *lane = lanes + 16 * (j & 15);
            v_store(lane, v_add(v_load(lane), e));
            v_store(s + j * LANES + x, e);
        }
        for (int half = 8; half > 0; half /= 2)
            for (int i = 0; i < half; i++)
                v_store(lanes + 16 * i, v_add(v_load(lanes + 16 * i), v_load(lanes + 16 * (i + half))));
        v_store(sum + x, v_load(lanes));
        if (factors)
            for (ptrdiff_t j = 0; j < panel->end; j++)
                v_store(s + j * LANES + x, v_mul(v_load(s + j * LANES + x), v_load(factors + j * LANES + x)));
    }
}

/* A finished block onto what the blocks before it gave: y^T (hd, LANES), max and sum of each lane. */
static void panel_merge(float *y, float *max, float *sum, const float *block, const float *block_max,
                        const float *block_sum, const attention_panel *panel, ptrdiff_t hd) {
    for (ptrdiff_t x = 0; x < 16 * panel->vectors; x += 16) {
        const v16 m = v_load(max + x), l = v_load(sum + x), m_b = v_load(block_max + x), l_b = v_load(block_sum + x);
        const m16 is_first = v_eq(l, v_zero()); /* a block that saw a key has a sum of at least 1, or NaN */
        const m16 sees = m_from_bits(panel->some >> x & 0xffffu);
        const v16 top = v_max(m_b, m), a = v_exp2_negative(v_sub(m, top)), b = v_exp2_negative(v_sub(m_b, top));
        v_store(max + x, v_select(sees, v_select(is_first, m_b, top), m));
        v_store(sum + x, v_select(sees, v_select(is_first, l_b, v_fma(l, a, v_mul(l_b, b))), l));
        for (ptrdiff_t d = 0; d < hd; d++) {
            const v16 before = v_load(y + d * LANES + x), o = v_load(block + d * LANES + x);
            const v16 merged = v_select(is_first, o, v_fma(before, a, v_mul(o, b)));
            v_store(y + d * LANES + x, v_select(sees, merged, before));
        }
    }
}

/* One panel against one block of keys. */
static void forward_panel(const forward_call *io, const attention_part *part, attention_panel *panel, ptrdiff_t first,
                          term_set real, ptrdiff_t row, forward_scratch own) {
    const cmha_attention *call = io->call;
    const ptrdiff_t hd = call->hd, width = rounded_up(hd, 16);
    const float *mask = NULL, *factors = NULL;
    float highest[LANES], sums[LANES];
    panel_of_rows(panel, call, part->b, part->h_kv, part->begin + row, smaller(part->end - part->begin - row, LANES));
    panel_look(panel, call, part->length, first, real);
    if (panel->end == 0) return;
    if (call->float_mask) panel_float_mask(own.extra, own.rows, call, panel, first), mask = own.extra;
    panel_scores(own.scores, LANES, highest, own.keys, own.q + row * width, mask, panel, hd);
    if (call->dropout_p > 0) panel_factors(own.extra, own.rows, call, panel, first), factors = own.extra;
    panel_exponentials(own.scores, sums, highest, factors, panel);
    panel_sums(own.block, own.values, padded(hd), own.scores, LANES, panel, hd);
    panel_merge(own.y + row * width, own.max + row, own.sum + row, own.block, highest, sums, panel, hd);
}

/* y^T / row_sum of one panel to y, and its statistics. */
static void forward_finish(const forward_call *io, const attention_part *part, attention_panel *panel, ptrdiff_t row,
                           forward_scratch own) {
    const ptrdiff_t hd = io->call->hd, width = rounded_up(hd, 16), stride = padded(hd);
    float *y = own.y + row * width;
    panel_of_rows(panel, io->call, part->b, part->h_kv, part->begin + row, smaller(part->end - part->begin - row, LANES));
    for (ptrdiff_t x = 0; x < panel->vectors; x++) {
        const v16 l = v_load(own.sum + row + 16 * x);
        const m16 nothing = v_eq(l, v_zero());
        for (ptrdiff_t d = 0; d < hd; d++) {
            float *at = y + d * LANES + 16 * x;
            v_store(at, v_select(nothing, v_zero(), v_div(v_load(at), l)));
        }
        for (ptrdiff_t d = 0; d < width; d += 16)
            v_transpose(own.rows + 16 * x * stride + d, stride, y + d * LANES + 16 * x, LANES);
    }
    for (ptrdiff_t r = 0; r < panel->rows; r++) {
        const ptrdiff_t at = (panel->b * io->call->H + panel->h[r]) * io->call->T + panel->t[r];
        memcpy(heads_row_out(io->y, panel->b, panel->h[r], panel->t[r]), own.rows + r * stride, sizeof(float) * (size_t)hd);
        io->row_max[at] = own.max[row + r], io->row_sum[at] = own.sum[row + r];
    }
}

static void forward_part(const forward_call *io, const attention_part *part, forward_scratch own) {
    const cmha_attention *call = io->call;
    const ptrdiff_t hd = call->hd, width = rounded_up(hd, 16), rows = part->end - part->begin;
    attention_panel panel;
    for (ptrdiff_t row = 0; row < rows; row += LANES) {
        panel_of_rows(&panel, call, part->b, part->h_kv, part->begin + row, smaller(rows - row, LANES));
        panel_lanes(own.q + row * width, own.rows, io->q, &panel, hd, query_factor(call));
        memset(own.y + row * width, 0, sizeof(float) * (size_t)(LANES * width));
    }
    memset(own.max, 0, sizeof(float) * PART_ROWS);
    memset(own.sum, 0, sizeof(float) * PART_ROWS);
    for (ptrdiff_t first = 0; first < part->bound; first += ATTENTION_BLOCK) {
        const term_set real = real_keys(call, part->b, part->length, first);
        const ptrdiff_t n = smaller(part->bound - first, ATTENTION_BLOCK);
        if (is_empty(real)) continue;
        copy_rows(own.keys, heads_row(io->k, part->b, part->h_kv, first), io->k->time, n, hd);
        copy_rows(own.values, heads_row(io->v, part->b, part->h_kv, first), io->v->time, n, hd);
        for (ptrdiff_t row = 0; row < rows; row += LANES) forward_panel(io, part, &panel, first, real, row, own);
    }
    for (ptrdiff_t row = 0; row < rows; row += LANES) forward_finish(io, part, &panel, row, own);
}

void KERNEL_NAME(attention_forward)(const cmha_heads *y, float *row_max, float *row_sum, const cmha_heads *q,
                                    const cmha_heads *k, const cmha_heads *v, const cmha_attention *call,
                                    float *scratch, int threads) {
    if (call->H_kv == 0 || call->T == 0) return;
    const forward_call io = {y, row_max, row_sum, q, k, v, call};
    const ptrdiff_t each = part_rows(call, threads), parts = count_parts(call, each);
    ptrdiff_t taken = 0;
    CMHA_PARALLEL(threads, {
        float *own = scratch + scratch_number() * forward_floats(call);
        for (ptrdiff_t i; (i = take_item(&taken)) < parts;) {
            const attention_part part = part_number(call, i, each);
            if (part.end - part.begin < FEW_ROWS) few_part(&io, &part, few_layout(own, call));
            else forward_part(&io, &part, forward_layout(own, call));
        }
    })
}

void KERNEL_NAME(attention_scratch)(ptrdiff_t *floats, const cmha_attention *call, int threads) {
    *floats = forward_floats(call) * threads;
}
