/*
The weights of a forward pass of attention.c, computed again from what it stored for each row, for looking at.

    p_ij = exp2(s_ij - row_max_i) / row_sum_i, times f_ij with dropout; 0 where i does not see j

q (B, H, T, hd)    k (B, H_kv, S, hd)    row_max, row_sum (B, H, T)    weights (B, H, T, S); scores as in attention.c

Loops: panels of LANES query rows, to whichever thread is free; blocks of 128 keys.
*/
#include "variant.h"
#include "attention.h"

/* Of one thread: keys of a block (128, padded hd), q^T of a panel (hd, LANES), its weights (128, LANES), float mask or
   dropout factors (128, LANES), rows before or after they are turned (LANES, 128 or padded hd). */
typedef struct { float *keys, *q, *weights, *extra, *rows; } weights_scratch;

static weights_scratch weights_layout(float *at, const cmha_attention *call) {
    weights_scratch own;
    own.keys = at, at += ATTENTION_BLOCK * padded(call->hd);
    own.q = at, at += LANES * rounded_up(call->hd, 16);
    own.weights = at, at += LANES * ATTENTION_BLOCK;
    own.extra = at, at += LANES * ATTENTION_BLOCK;
    own.rows = at;
    return own;
}

/* Rows of the panel against the block at `first`, to row r at weights + r * S. */
static void weights_block(float *weights, const float *max, const float *sum, const cmha_attention *call,
                          const attention_panel *panel, ptrdiff_t first, weights_scratch own) {
    const ptrdiff_t columns = smaller(call->S - first, ATTENTION_BLOCK), seen = smaller(rounded_up(panel->end, 16), columns);
    const float *extra = NULL;
    float highest[LANES];
    if (panel->end > 0) {
        if (call->float_mask) panel_float_mask(own.extra, own.rows, call, panel, first), extra = own.extra;
        panel_scores(own.weights, LANES, highest, own.keys, own.q, extra, panel, call->hd);
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
                v_transpose(own.rows + 16 * x * ATTENTION_BLOCK + j, ATTENTION_BLOCK, own.weights + j * LANES + 16 * x, LANES);
    }
    for (ptrdiff_t r = 0; r < panel->rows; r++) {
        float *to = weights + r * call->S + first;
        memcpy(to, own.rows + r * ATTENTION_BLOCK, sizeof(float) * (size_t)seen);
        memset(to + seen, 0, sizeof(float) * (size_t)(columns - seen));
    }
}

void KERNEL_NAME(attention_weights)(float *weights, const float *row_max, const float *row_sum, const cmha_heads *q,
                                    const cmha_heads *k, const cmha_attention *call, float *scratch, int threads) {
    if (call->H_kv == 0 || call->T == 0) return;
    const ptrdiff_t rows = call->T * (call->H / call->H_kv), panels = (rows + LANES - 1) / LANES, hd = call->hd;
    ptrdiff_t taken = 0, floats;
    KERNEL_NAME(attention_scratch)(&floats, call, 1);
    CMHA_PARALLEL(threads, {
        const weights_scratch own = weights_layout(scratch + thread_number() * floats, call);
        attention_panel panel;
        float max[LANES] = {0}, sum[LANES] = {0};
        for (ptrdiff_t i; (i = take_item(&taken)) < call->B * call->H_kv * panels;) {
            const ptrdiff_t group = i / panels, b = group / call->H_kv, h_kv = group % call->H_kv;
            const ptrdiff_t row = i % panels * LANES, at = group * rows + row, n = smaller(rows - row, LANES);
            const ptrdiff_t length = call->lengths ? (ptrdiff_t)call->lengths[b] : call->S;
            panel_of_rows(&panel, call, b, h_kv, row, n);
            panel_lanes(own.q, own.rows, q, &panel, hd, query_factor(call));
            memcpy(max, row_max + at, sizeof(float) * (size_t)n);
            memcpy(sum, row_sum + at, sizeof(float) * (size_t)n);
            for (ptrdiff_t first = 0; first < call->S; first += ATTENTION_BLOCK) {
                panel.end = 0;
                if (first < length) {
                    panel_look(&panel, call, length, first, real_keys(call, b, length, first));
                    copy_rows(own.keys, heads_row(k, b, h_kv, first), k->time, panel.end, hd);
                }
                weights_block(weights + at * call->S, max, sum, call, &panel, first, own);
            }
        }
    })
}
