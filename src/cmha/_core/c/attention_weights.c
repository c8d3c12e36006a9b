/*
The weights of a forward pass of attention.c, computed again from what it stored for each row, for looking at.

    p_ij = exp2(s_ij - row_max_i) / row_sum_i, times f_ij with dropout; 0 where i does not see j

q (B, H, T, hd)    k (B, H_kv, S, hd)    row_max, row_sum (B, H, T)    weights (B, H, T, S); scores as in attention.c

Loops
    1  parts: WEIGHTS_ROWS query rows of a group of heads, to whichever thread is free
    2  blocks of 128 keys, copied once for the part
    3  panels of LANES rows: s^T = k q^T, weights, turned back to rows
*/
#include "variant.h"
#include "attention.h"

#define WEIGHTS_ROWS 128

/* Of one thread: keys of a block (128, padded hd), q^T of a part (panels, hd, LANES); of a panel: weights (128, LANES), float mask or
   dropout factors (128, LANES), rows before or after they are turned (LANES, 128 or padded hd). */
typedef struct { float *keys, *q, *weights, *extra, *rows; } weights_scratch;

static weights_scratch weights_layout(float *at, const cmha_attention *call) {
    weights_scratch own;
    own.keys = at, at += ATTENTION_BLOCK * padded(call->hd);
    own.q = at, at += WEIGHTS_ROWS * rounded_up(call->hd, 16);
    own.weights = at, at += LANES * ATTENTION_BLOCK;
    own.extra = at, at += LANES * ATTENTION_BLOCK;
    own.rows = at;
    return own;
}

/* Rows of the panel against the block at `first`, to row r at weights + r * S. */
static void weights_block(float *weights, const float *max, const float *sum, const float *q, const cmha_attention *call,
                          const attention_panel *panel, ptrdiff_t first, weights_scratch own) {
    const ptrdiff_t columns = smaller(call->S - first, ATTENTION_BLOCK);
    const ptrdiff_t seen = smaller(rounded_up(panel->end, 16), columns);
    const float *extra = NULL;
    float highest[LANES];
    if (panel->end > 0) {
        if (call->float_mask) panel_float_mask(own.extra, own.rows, call, panel, first), extra = own.extra;
        panel_scores(own.weights, LANES, highest, own.keys, q, extra, panel, call->hd);
        panel_weights(own.weights, LANES, max, sum, panel);
        for (ptrdiff_t j = panel->end; j < rounded_up(panel->end, 16); j++)
            memset(own.weights + j * LANES, 0, sizeof(float) * LANES);
        if (call->dropout_p > 0) {
            panel_factors(own.extra, own.rows, call, panel, first);
            for (ptrdiff_t i = 0; i < panel->end * LANES; i += 16)
                v_store(own.weights + i, v_mul(v_load(own.weights + i), v_load(own.extra + i)));
        }
        for (ptrdiff_t x = 0; x < panel->vectors; x++)
            for (ptrdiff_t j = 0; j < seen; j += 16)
                v_transpose(own.rows + 16 * x * ATTENTION_BLOCK + j, ATTENTION_BLOCK, own.weights + j * LANES + 16 * x,
                            LANES);
    }
    for (ptrdiff_t r = 0; r < panel->rows; r++) {
        float *to = weights + r * call->S + first;
        memcpy(to, own.rows + r * ATTENTION_BLOCK, sizeof(float) * (size_t)seen);
        memset(to + seen, 0, sizeof(float) * (size_t)(columns - seen));
    }
}

/* Panels `row`, `row` + LANES, ... of a group, up to `end`, against all blocks; keys are copied once for all of them. */
static void weights_part(float *weights, const float *row_max, const float *row_sum, const cmha_heads *q,
                         const cmha_heads *k, const cmha_attention *call, ptrdiff_t group, ptrdiff_t begin,
                         ptrdiff_t end, weights_scratch own) {
    const ptrdiff_t b = group / call->H_kv, h_kv = group % call->H_kv, hd = call->hd, width = rounded_up(hd, 16);
    const ptrdiff_t length = call->lengths ? (ptrdiff_t)call->lengths[b] : call->S;
    const ptrdiff_t start = group * (call->H / call->H_kv) * call->T; /* rows of a group are neighbours */
    attention_panel panel;
    for (ptrdiff_t row = begin; row < end; row += LANES) {
        panel_of_rows(&panel, call, b, h_kv, row, smaller(end - row, LANES));
        panel_lanes(own.q + (row - begin) * width, own.rows, q, &panel, hd, query_factor(call));
    }
    for (ptrdiff_t first = 0; first < call->S; first += ATTENTION_BLOCK) {
        const term_set real = first < length ? real_keys(call, b, length, first) : (term_set){{0, 0}};
        copy_rows(own.keys, heads_row(k, b, h_kv, first), k->time, terms_end(real), hd);
        for (ptrdiff_t row = begin; row < end; row += LANES) {
            float max[LANES] = {0}, sum[LANES] = {0};
            panel_of_rows(&panel, call, b, h_kv, row, smaller(end - row, LANES));
            panel_look(&panel, call, length, first, real);
            memcpy(max, row_max + start + row, sizeof(float) * (size_t)panel.rows);
            memcpy(sum, row_sum + start + row, sizeof(float) * (size_t)panel.rows);
            weights_block(weights + (start + row) * call->S, max, sum, own.q + (row - begin) * width, call, &panel,
                          first, own);
        }
    }
}

void KERNEL_NAME(attention_weights)(float *weights, const float *row_max, const float *row_sum, const cmha_heads *q,
                                    const cmha_heads *k, const cmha_attention *call, float *scratch, int threads) {
    if (call->H_kv == 0 || call->T == 0) return;
    const ptrdiff_t rows = call->T * (call->H / call->H_kv), parts = (rows + WEIGHTS_ROWS - 1) / WEIGHTS_ROWS;
    ptrdiff_t taken = 0, floats;
    KERNEL_NAME(attention_scratch)(&floats, call, 1);
    CMHA_PARALLEL(threads, {
        const weights_scratch own = weights_layout(scratch + scratch_number() * floats, call);
        for (ptrdiff_t i; (i = take_item(&taken)) < call->B * call->H_kv * parts;) {
            const ptrdiff_t begin = i % parts * WEIGHTS_ROWS;
            weights_part(weights, row_max, row_sum, q, k, call, i / parts, begin, smaller(begin + WEIGHTS_ROWS, rows), own);
        }
    })
}
