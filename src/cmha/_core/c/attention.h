/*
What the forward and backward pass of attention share: which keys a query sees, rows laid out for the products, and what
happens to a panel of scores.

    block   128 keys (or queries) counted from absolute index 0
    panel   LANES query rows, one a lane of the vectors: scores stand as s^T (keys, LANES), so that the maximum and the
            sum over keys go down the columns. The rows of a panel share one key head, not always one query head: row r
            of a group of H / H_kv heads is query r mod T of its head r / T.

What a panel computes for one of its rows does not depend on the other rows, so panels, parts of a sequence (a cache, one
token at a time), batch and threads change no bit. Hidden terms are skipped, never multiplied by 0: NaN and infinity
behind a mask stay there, and -0 stays -0.
*/
#ifndef CMHA_ATTENTION_H
#define CMHA_ATTENTION_H

#include "attention_product.h"
#include "philox.h"
#include "vmath.h"

#define ATTENTION_BLOCK 128
#define LANES (16 * PRODUCT_VECTORS)

/* A set of keys (or queries) of one block: bit i of the 128 is term i. */
typedef struct { uint64_t word[2]; } term_set;

typedef struct {
    ptrdiff_t b, rows, vectors;           /* query rows, and the vectors that hold them */
    ptrdiff_t h[LANES], t[LANES];
    ptrdiff_t plain, end;                 /* every row sees keys 0 .. plain - 1 of the block, no row one from `end` on */
    uint32_t sees[ATTENTION_BLOCK];       /* bit r: row r sees the key; filled for plain .. end - 1 */
    uint32_t some;                        /* bit r: row r sees a key of the block */
} attention_panel;

/* From row to row of copies of hd floats: whole vectors, and an odd number of cache lines, lest a column of them share
   few of L1's sets. */
INLINE ptrdiff_t padded(ptrdiff_t hd) { return 16 * ((hd + 15) / 16 | 1); }
INLINE const float *heads_row(const cmha_heads *x, ptrdiff_t b, ptrdiff_t h, ptrdiff_t t) {
    return x->data + b * x->batch + h * x->head + t * x->time;
}
INLINE float *heads_row_out(const cmha_heads *x, ptrdiff_t b, ptrdiff_t h, ptrdiff_t t) {
    return x->data + b * x->batch + h * x->head + t * x->time;
}

/* ------------------------------------------------------------------------------------------------- sets of keys */
INLINE term_set first_terms(ptrdiff_t n) {
    const uint64_t all = ~(uint64_t)0;
    return (term_set){{n <= 0 ? 0 : n >= 64 ? all : ((uint64_t)1 << n) - 1,
                       n <= 64 ? 0 : n >= 128 ? all : ((uint64_t)1 << (n - 64)) - 1}};
}
INLINE term_set both(term_set a, term_set b) { return (term_set){{a.word[0] & b.word[0], a.word[1] & b.word[1]}}; }
INLINE term_set either(term_set a, term_set b) { return (term_set){{a.word[0] | b.word[0], a.word[1] | b.word[1]}}; }
INLINE term_set complement(term_set a) { return (term_set){{~a.word[0], ~a.word[1]}}; }
INLINE int is_empty(term_set a) { return (a.word[0] | a.word[1]) == 0; }
INLINE unsigned has_term(const term_set *a, ptrdiff_t i) { return (unsigned)(a->word[i >> 6] >> (i & 63)) & 1; }
INLINE unsigned strip_bits(const term_set *a, ptrdiff_t strip) {
    return (unsigned)(a->word[strip >> 2] >> (16 * (strip & 3))) & 0xffffu;
}
/* One more than the highest member. */
INLINE ptrdiff_t terms_end(term_set a) {
    return a.word[1] ? 65 + highest_bit(a.word[1]) : a.word[0] ? 1 + highest_bit(a.word[0]) : 0;
}
/* The lowest member >= i, or `end`. */
INLINE ptrdiff_t next_member(term_set a, ptrdiff_t i, ptrdiff_t end) {
    for (; i < end; i = (i | 63) + 1) {
        uint64_t rest = a.word[i >> 6] >> (i & 63);
        if (rest) {
            i += lowest_bit(rest);
            return i < end ? i : end;
        }
    }
    return end;
}

/* n <= 128 bytes a `stride` apart, non-zero = member; no byte beyond is read. */
INLINE term_set terms_from_bytes(const uint8_t *p, ptrdiff_t stride, ptrdiff_t n) {
    term_set a = {{0, 0}};
    if (stride == 0) return n > 0 && *p ? first_terms(n) : a;
    ptrdiff_t i = 0;
    if (stride == 1)
        for (; i + 16 <= n; i += 16) a.word[i >> 6] |= (uint64_t)m_bits(m_from_bytes(p + i, 16)) << (i & 63);
    for (; i < n; i++) a.word[i >> 6] |= (uint64_t)(p[i * stride] != 0) << (i & 63);
    return a;
}

/* n <= 16 floats a `stride` apart, the other lanes 0; no float beyond is read. */
INLINE v16 spread_load(const float *p, ptrdiff_t stride, ptrdiff_t n) {
    if (stride == 1) return n < 16 ? v_load_n(p, (int)n) : v_load(p);
    float lanes[16] = {0};
    for (ptrdiff_t i = 0; i < n; i++) lanes[i] = p[i * stride];
    return v_load(lanes);
}

/* Of n <= 128 floats, those that are not -infinity. */
INLINE term_set terms_from_floats(const float *p, ptrdiff_t stride, ptrdiff_t n) {
    term_set a = first_terms(n);
    for (ptrdiff_t i = 0; i < n; i += 16) {
        const v16 x = spread_load(p + i * stride, stride, smaller(n - i, 16));
        a.word[i >> 6] &= ~((uint64_t)m_bits(v_eq(x, v_set1(-INFINITY))) << (i & 63));
    }
    return a;
}

/* How many leading keys of row b the query t may see before masks: its length, and the causal bound. */
INLINE ptrdiff_t key_bound(const cmha_attention *call, ptrdiff_t length, ptrdiff_t t) {
    ptrdiff_t bound = t + length - call->T + 1;
    if (!call->is_causal || bound > length) return length;
    return bound < 0 ? 0 : bound;
}

/* The keys of the block at `first` that the key mask leaves, of those below `length`. */
INLINE term_set real_keys(const cmha_attention *call, ptrdiff_t b, ptrdiff_t length, ptrdiff_t first) {
    const ptrdiff_t n = smaller(length - first, ATTENTION_BLOCK);
    return call->key_mask ? terms_from_bytes(call->key_mask + b * call->S + first, 1, n) : first_terms(n);
}

INLINE ptrdiff_t mask_offset(const cmha_attention *call, ptrdiff_t b, ptrdiff_t h, ptrdiff_t t, ptrdiff_t first) {
    const ptrdiff_t *strides = call->mask_strides;
    return b * strides[0] + h * strides[1] + t * strides[2] + first * strides[3];
}

/* Which of the `real` keys of the block at `first` query (b, h, t) sees. */
INLINE term_set seen_keys(const cmha_attention *call, ptrdiff_t b, ptrdiff_t h, ptrdiff_t t, ptrdiff_t length,
                          ptrdiff_t first, term_set real) {
    const ptrdiff_t n = smaller(key_bound(call, length, t) - first, ATTENTION_BLOCK), stride = call->mask_strides[3];
    const ptrdiff_t at = mask_offset(call, b, h, t, first);
    term_set seen = both(first_terms(n), real);
    if (call->bool_mask && n > 0) seen = both(seen, terms_from_bytes(call->bool_mask + at, stride, n));
    if (call->float_mask && n > 0) seen = both(seen, terms_from_floats(call->float_mask + at, stride, n));
    return seen;
}

/* ------------------------------------------------------------------------------------------------------- panels */
/* Rows first_row .. first_row + rows - 1 of the group of key head h_kv; what they see is still to be found. */
INLINE void panel_of_rows(attention_panel *panel, const cmha_attention *call, ptrdiff_t b, ptrdiff_t h_kv,
                          ptrdiff_t first_row, ptrdiff_t rows) {
    ptrdiff_t h = h_kv * (call->H / call->H_kv) + first_row / call->T, t = first_row % call->T;
    panel->b = b, panel->rows = rows, panel->vectors = (rows + 15) / 16;
    for (ptrdiff_t r = 0; r < rows; r++) {
        panel->h[r] = h, panel->t[r] = t;
        if (++t == call->T) t = 0, h++;
    }
}

/* What the panel sees of the block at `first`. */
INLINE void panel_look(attention_panel *panel, const cmha_attention *call, ptrdiff_t length, ptrdiff_t first,
                       term_set real) {
    const int masked = call->bool_mask || call->float_mask;
    term_set seen[LANES], all = real, any = {{0, 0}};
    float bounds[LANES] = {0};
    if (masked) {
        for (ptrdiff_t r = 0; r < panel->rows; r++) {
            seen[r] = seen_keys(call, panel->b, panel->h[r], panel->t[r], length, first, real);
            all = both(all, seen[r]), any = either(any, seen[r]);
        }
    } else {
        ptrdiff_t lowest = ATTENTION_BLOCK, highest = 0;
        for (ptrdiff_t r = 0; r < panel->rows; r++) {
            const ptrdiff_t n = smaller(key_bound(call, length, panel->t[r]) - first, ATTENTION_BLOCK);
            bounds[r] = (float)n;
            lowest = smaller(lowest, n), highest = n > highest ? n : highest;
        }
        all = both(real, first_terms(lowest)), any = both(real, first_terms(highest));
    }
    panel->plain = next_member(complement(all), 0, ATTENTION_BLOCK);
    panel->end = terms_end(any);
    panel->some = panel->plain > 0 ? ~(uint32_t)0 : 0;
    for (ptrdiff_t j = panel->plain; j < panel->end; j++) {
        uint32_t bits = 0;
        if (masked)
            for (ptrdiff_t r = 0; r < panel->rows; r++) bits |= (uint32_t)has_term(&seen[r], j) << r;
        else if (has_term(&real, j))
            for (ptrdiff_t x = 0; x < panel->vectors; x++)
                bits |= (uint32_t)m_bits(v_lt(v_set1((float)j), v_load(bounds + 16 * x))) << (16 * x);
        panel->sees[j] = bits, panel->some |= bits;
    }
}

/* hd floats times factor, filled up with 0 to whole vectors. */
INLINE void copy_row(float *to, const float *from, ptrdiff_t hd, float factor) {
    ptrdiff_t d = 0;
    for (; d + 16 <= hd; d += 16) v_store(to + d, v_mul(v_load(from + d), v_set1(factor)));
    if (d < hd) v_store(to + d, v_mul(v_load_n(from + d, (int)(hd - d)), v_set1(factor)));
}

/* n rows of x to rows padded(hd) apart. */
INLINE void copy_rows(float *to, const float *x, ptrdiff_t stride, ptrdiff_t n, ptrdiff_t hd) {
    for (ptrdiff_t i = 0; i < n; i++) copy_row(to + i * padded(hd), x + i * stride, hd, 1.0f);
}

/* rows (16 * vectors, n) to columns (n, 16 * vectors), n in whole vectors. */
INLINE void rows_to_lanes(float *to, ptrdiff_t to_row, const float *rows, ptrdiff_t stride, ptrdiff_t n,
                          ptrdiff_t vectors) {
    for (ptrdiff_t x = 0; x < vectors; x++)
        for (ptrdiff_t d = 0; d < n; d += 16)
            v_transpose(to + d * to_row + 16 * x, to_row, rows + 16 * x * stride + d, stride);
}

/* The panel's rows of x, times factor, to x^T (hd in whole vectors, LANES); lanes without a row are 0.
   rows: scratch (LANES, padded(hd)). */
INLINE void panel_lanes(float *to, float *rows, const cmha_heads *x, const attention_panel *panel, ptrdiff_t hd,
                        float factor) {
    const ptrdiff_t stride = padded(hd), lanes = 16 * panel->vectors;
    for (ptrdiff_t r = 0; r < panel->rows; r++)
        copy_row(rows + r * stride, heads_row(x, panel->b, panel->h[r], panel->t[r]), hd, factor);
    for (ptrdiff_t r = panel->rows; r < lanes; r++) memset(rows + r * stride, 0, sizeof(float) * (size_t)stride);
    rows_to_lanes(to, LANES, rows, stride, rounded_up(hd, 16), panel->vectors);
}

/* The factor of q that makes scores exponents of 2. */
INLINE float query_factor(const cmha_attention *call) { return (float)((double)call->scale * 1.44269504088896340736); }

/* A score: the dot product x, and m log2 e where there is a float mask; at least -FLT_MAX, so that a block of "minus a
   lot" (the common -3.4e38 of other libraries) still has a finite maximum and a row of them a mean. */
INLINE v16 score_with_mask(v16 x, v16 m) { return v_fma(m, v_set1(LOG2_E), x); }
INLINE v16 score_at_least(v16 x) { return v_max(v_set1(-FLT_MAX), x); }

/* Number of weight (b, h, t, first) in dropout's stream. */
INLINE uint64_t weight_number(const cmha_attention *call, ptrdiff_t b, ptrdiff_t h, ptrdiff_t t, ptrdiff_t first) {
    const uint64_t head = (call->first_row + (uint64_t)b) * (uint64_t)call->H + (uint64_t)h;
    return (head * (uint64_t)call->T + (uint64_t)t) * (uint64_t)call->S + (uint64_t)first;
}

/* The float mask, or dropout's factors, of the panel and the block at `first` to (128, LANES); 0 beyond S.
   rows: scratch (LANES, 128). */
INLINE void panel_float_mask(float *to, float *rows, const cmha_attention *call, const attention_panel *panel,
                             ptrdiff_t first) {
    const ptrdiff_t stride = call->mask_strides[3];
    for (ptrdiff_t r = 0; r < panel->rows; r++) {
        const float *mask = call->float_mask + mask_offset(call, panel->b, panel->h[r], panel->t[r], first);
        for (ptrdiff_t j = 0; j < panel->end; j += 16) {
            const v16 x = spread_load(mask + j * stride, stride, smaller(call->S - first - j, 16));
            v_store(rows + r * ATTENTION_BLOCK + j, x);
        }
    }
    rows_to_lanes(to, LANES, rows, ATTENTION_BLOCK, rounded_up(panel->end, 16), panel->vectors);
}
INLINE void panel_factors(float *to, float *rows, const cmha_attention *call, const attention_panel *panel,
                          ptrdiff_t first) {
    for (ptrdiff_t r = 0; r < panel->rows; r++)
        dropout_row(rows + r * ATTENTION_BLOCK, call->seed, call->stream,
                    weight_number(call, panel->b, panel->h[r], panel->t[r], first), (int)panel->end, call->dropout_p);
    rows_to_lanes(to, LANES, rows, ATTENTION_BLOCK, rounded_up(panel->end, 16), panel->vectors);
}

/* s^T (end, LANES), `row` floats apart: keys @ q^T, then the float mask (or NULL); hidden keys -infinity. The highest of
   each lane to `highest`, NaN not counted, 0 as +0. */
INLINE void panel_scores(float *s, ptrdiff_t row, float *highest, const float *keys, const float *q, const float *mask,
                         const attention_panel *panel, ptrdiff_t hd) {
    const product dots = {.out = s, .out_row = row, .a = keys, .a_step = padded(hd), .b = q, .b_row = LANES, .end = hd};
    product_all(BY_ROWS, &dots, panel->end, panel->vectors);
    for (ptrdiff_t x = 0; x < 16 * panel->vectors; x += 16) {
        v16 top = v_set1(-INFINITY);
        ptrdiff_t j = 0;
        for (; j < (mask ? 0 : panel->plain); j++) {
            const v16 score = score_at_least(v_load(s + j * row + x));
            v_store(s + j * row + x, score);
            top = v_max(score, top); /* this order: score > top ? score : top */
        }
        for (; j < panel->end; j++) {
            v16 score = v_load(s + j * row + x);
            if (mask) score = score_with_mask(score, v_load(mask + j * LANES + x));
            score = score_at_least(score);
            if (j >= panel->plain)
                score = v_select(m_from_bits(panel->sees[j] >> x & 0xffffu), score, v_set1(-INFINITY));
            v_store(s + j * row + x, score);
            top = v_max(score, top);
        }
        v_store(highest + x, v_add(top, v_zero()));
    }
}

/* Scores to softmax weights, in place, with what the forward pass stored for each lane; hidden keys 0. */
INLINE void panel_weights(float *s, ptrdiff_t row, const float *max, const float *sum, const attention_panel *panel) {
    for (ptrdiff_t x = 0; x < 16 * panel->vectors; x += 16)
        for (ptrdiff_t j = 0; j < panel->end; j++) {
            const v16 e = v_exp2_negative(v_sub(v_load(s + j * row + x), v_load(max + x)));
            v16 p = v_div(e, v_load(sum + x));
            if (j >= panel->plain) p = v_select(m_from_bits(panel->sees[j] >> x & 0xffffu), p, v_zero());
            v_store(s + j * row + x, p);
        }
}

/* out^T (n, LANES) = rows^T @ weights^T: sums over the keys that each lane sees, from +0 or onto what is there. */
INLINE void panel_sums(float *out, const float *rows, ptrdiff_t stride, const float *weights, ptrdiff_t weights_row,
                       const attention_panel *panel, ptrdiff_t n) {
    product sums = {.out = out, .out_row = LANES, .a = rows, .a_step = stride, .b = weights, .b_row = weights_row,
                    .end = panel->plain, .sees = panel->sees};
    product_all(BY_COLUMNS, &sums, n, panel->vectors);
    sums.begin = panel->plain, sums.end = panel->end, sums.onto = 1;
    if (sums.begin < sums.end) product_all(MASKED, &sums, n, panel->vectors);
}

/* ------------------------------------------------------------------------------------------ rows, a set for each */
/* out (r, vectors) as in `w`, from +0, by rows: row i adds only the terms of seen[i]. */
INLINE void product_of_sets(product w, const term_set *seen, int r, ptrdiff_t vectors) {
    term_set all = seen[0], any = seen[0];
    uint32_t sees[ATTENTION_BLOCK];
    for (int i = 1; i < r; i++) all = both(all, seen[i]), any = either(any, seen[i]);
    const term_set not_all = complement(all), none = complement(any);
    const ptrdiff_t end = terms_end(any);
    w.onto = 0, w.sees = sees;
    for (w.begin = next_member(any, 0, end); w.begin < end; w.begin = next_member(any, w.end, end)) {
        if ((w.end = next_member(not_all, w.begin, end)) > w.begin) {
            product_rows(BY_ROWS, r, &w, 0, vectors);
        } else {
            w.end = smaller(next_member(all, w.begin, end), next_member(none, w.begin, end));
            for (ptrdiff_t p = w.begin; p < w.end; p++) {
                sees[p] = 0;
                for (int i = 0; i < r; i++) sees[p] |= (uint32_t)has_term(&seen[i], p) << i;
            }
            product_rows(PICKED, r, &w, 0, vectors);
        }
        w.onto = 1;
    }
    if (!w.onto)
        for (int i = 0; i < r; i++) memset(w.out + i * w.out_row, 0, sizeof(float) * 16 * (size_t)vectors);
}
#endif
