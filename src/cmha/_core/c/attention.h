/*
What the forward and backward pass of attention share: which keys a query sees, scores, and weighted sums of rows.

    block   128 keys (or queries) counted from absolute index 0
    strip   16 keys of a block, one vector; a block has 8
    tile    up to ATTENTION_ROWS query rows worked on together. The rows of a tile share one key head, not always one
            query head: row r of a group of H / H_kv heads is query r mod T of its head r / T, so that grouped heads
            share packed keys.

What a tile computes for one of its rows does not depend on the other rows, so tiles, parts of a sequence (a cache, one
token at a time), batch and threads change no bit. Hidden terms are skipped, never multiplied by 0: NaN and infinity
behind a mask stay there, and -0 stays -0.
*/
#ifndef CMHA_ATTENTION_H
#define CMHA_ATTENTION_H

#include "philox.h"
#include "vmath.h"
#include <float.h>

#define ATTENTION_BLOCK 128
#define ATTENTION_ROWS V_TILE_ROWS /* ROWS x VECTORS accumulators fill the registers, as in matmul */
#define ATTENTION_VECTORS (V_TILE_VECTORS > 1 ? 2 : 1)

/* A set of keys (or queries) of one block: bit i of the 128 is term i. */
typedef struct { uint64_t word[2]; } term_set;

typedef struct {
    int rows;
    ptrdiff_t strips;                           /* so many strips hold every key the tile sees; 0 = it sees none */
    ptrdiff_t h[ATTENTION_ROWS], t[ATTENTION_ROWS];
    term_set seen[ATTENTION_ROWS];
} attention_tile;

INLINE ptrdiff_t rounded_up(ptrdiff_t n, ptrdiff_t unit) { return (n + unit - 1) / unit * unit; }
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
INLINE unsigned strip_bits(const term_set *a, ptrdiff_t strip) {
    return (unsigned)(a->word[strip >> 2] >> (16 * (strip & 3))) & 0xffffu;
}
/* One more than the highest member. */
INLINE ptrdiff_t terms_end(term_set a) {
    return a.word[1] ? 128 - __builtin_clzll(a.word[1]) : a.word[0] ? 64 - __builtin_clzll(a.word[0]) : 0;
}
/* The lowest member >= i, or `end`. */
INLINE ptrdiff_t next_member(term_set a, ptrdiff_t i, ptrdiff_t end) {
    for (; i < end; i = (i | 63) + 1) {
        uint64_t rest = a.word[i >> 6] >> (i & 63);
        if (rest) {
            i += __builtin_ctzll(rest);
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
        const v16 x = spread_load(p + i * stride, stride, n - i < 16 ? n - i : 16);
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

/* Rows first_row .. first_row + rows - 1 of the group of key head h_kv against the keys from `first`, of which the key
   mask leaves `real`. */
INLINE attention_tile look(const cmha_attention *call, ptrdiff_t b, ptrdiff_t h_kv, ptrdiff_t first_row, int rows,
                           ptrdiff_t length, ptrdiff_t first, term_set real) {
    attention_tile tile = {.rows = rows};
    const ptrdiff_t *strides = call->mask_strides;
    ptrdiff_t h = h_kv * (call->H / call->H_kv) + first_row / call->T, t = first_row % call->T;
    term_set any = {{0, 0}};
    for (int r = 0; r < rows; r++) {
        ptrdiff_t n = key_bound(call, length, t) - first;
        term_set seen = both(first_terms(n), real);
        n = n < ATTENTION_BLOCK ? n : ATTENTION_BLOCK;
        ptrdiff_t at = b * strides[0] + h * strides[1] + t * strides[2] + first * strides[3];
        if (call->bool_mask && n > 0) seen = both(seen, terms_from_bytes(call->bool_mask + at, strides[3], n));
        if (call->float_mask && n > 0) seen = both(seen, terms_from_floats(call->float_mask + at, strides[3], n));
        tile.seen[r] = seen, tile.h[r] = h, tile.t[r] = t;
        any = either(any, seen);
        if (++t == call->T) t = 0, h++;
    }
    tile.strips = (terms_end(any) + 15) / 16;
    return tile;
}

/* The keys of the block at `first` that the key mask leaves, of those below `length`. */
INLINE term_set real_keys(const cmha_attention *call, ptrdiff_t b, ptrdiff_t length, ptrdiff_t first) {
    ptrdiff_t n = length - first < ATTENTION_BLOCK ? length - first : ATTENTION_BLOCK;
    return call->key_mask ? terms_from_bytes(call->key_mask + b * call->S + first, 1, n) : first_terms(n);
}

/* ------------------------------------------------------------------------------------------------------ packing */
/* n rows of x (keys or values) to strips: packed[strip][d][16]; the last strip is filled up with 0. */
INLINE void pack_strips(float *packed, const float *x, ptrdiff_t stride, ptrdiff_t n, ptrdiff_t hd) {
    for (; n > 0; n -= 16, x += 16 * stride, packed += 16 * hd) {
        const ptrdiff_t lanes = n < 16 ? n : 16;
        ptrdiff_t d = 0;
        if (lanes == 16)
            for (; d + 16 <= hd; d += 16) v_transpose(packed + 16 * d, 16, x + d, stride);
        for (; d < hd; d++)
            for (ptrdiff_t lane = 0; lane < 16; lane++)
                packed[16 * d + lane] = lane < lanes ? x[lane * stride + d] : 0.0f;
    }
}

/* The tile's rows of x, times factor, to packed[row][d]. */
INLINE void pack_tile(float *packed, const cmha_heads *x, ptrdiff_t b, const attention_tile *tile, ptrdiff_t hd,
                      float factor) {
    for (int r = 0; r < tile->rows; r++) {
        const float *row = heads_row(x, b, tile->h[r], tile->t[r]);
        for (ptrdiff_t d = 0; d < hd; d++) packed[r * hd + d] = row[d] * factor;
    }
}

/* ------------------------------------------------------------------------------------------------------- scores */
/* dots[row][128]: one fma chain over d ascending from +0 for each row and each key of the strips. */
INLINE void dot_strips(float *dots, const float *rows, const float *keys, ptrdiff_t hd, const int n_rows,
                       const int n_strips) {
    v16 sum[ATTENTION_ROWS][4];
    for (int r = 0; r < n_rows; r++)
        for (int s = 0; s < n_strips; s++) sum[r][s] = v_zero();
    for (ptrdiff_t d = 0; d < hd; d++) {
        v16 key[4];
        for (int s = 0; s < n_strips; s++) key[s] = v_load(keys + 16 * (s * hd + d));
        for (int r = 0; r < n_rows; r++) {
            v16 x = v_set1(rows[r * hd + d]);
            for (int s = 0; s < n_strips; s++) sum[r][s] = v_fma(x, key[s], sum[r][s]);
        }
    }
    for (int r = 0; r < n_rows; r++)
        for (int s = 0; s < n_strips; s++) v_store(dots + r * ATTENTION_BLOCK + 16 * s, sum[r][s]);
}

/* Strips side by side, so that there are chains enough to fill the time an fma takes. */
INLINE void dot_rows(float *dots, const float *rows, const float *keys, ptrdiff_t hd, ptrdiff_t strips,
                     const int n_rows) {
    const int wide = n_rows == 1 ? 4 : n_rows <= 3 ? 2 : ATTENTION_VECTORS;
    ptrdiff_t strip = 0;
    for (; strip + wide <= strips; strip += wide)
        dot_strips(dots + 16 * strip, rows, keys + 16 * strip * hd, hd, n_rows, wide);
    for (; strip < strips; strip++) dot_strips(dots + 16 * strip, rows, keys + 16 * strip * hd, hd, n_rows, 1);
}

static void dot_tile(float *dots, const float *rows, const float *keys, ptrdiff_t hd, ptrdiff_t strips, int n_rows) {
    switch (n_rows) {
    case 1: dot_rows(dots, rows, keys, hd, strips, 1); break;
    case 2: dot_rows(dots, rows, keys, hd, strips, 2); break;
    case 3: dot_rows(dots, rows, keys, hd, strips, 3); break;
    case 4: dot_rows(dots, rows, keys, hd, strips, 4); break;
#if ATTENTION_ROWS > 4
    case 5: dot_rows(dots, rows, keys, hd, strips, 5); break;
    case 6: dot_rows(dots, rows, keys, hd, strips, 6); break;
#endif
#if ATTENTION_ROWS > 6
    case 7: dot_rows(dots, rows, keys, hd, strips, 7); break;
    case 8: dot_rows(dots, rows, keys, hd, strips, 8); break;
#endif
    }
}

/* The factor of q that makes scores exponents of 2. */
INLINE float query_factor(const cmha_attention *call) { return (float)((double)call->scale * 1.44269504088896340736); }

/* Dot products of tile row r to scores, in place: the float mask, s = fma(mask, float32(log2 e), s); at least -FLT_MAX,
   so that a block of "minus a lot" (the common -3.4e38 of other libraries) still has a finite maximum and a row of them
   a mean; hidden keys -infinity. Returns the maximum of the visible ones, NaN not counted. */
INLINE float finish_scores(float *s, const cmha_attention *call, ptrdiff_t b, const attention_tile *tile, int r,
                           ptrdiff_t first) {
    const ptrdiff_t *strides = call->mask_strides;
    const float *mask = call->float_mask;
    if (mask) mask += b * strides[0] + tile->h[r] * strides[1] + tile->t[r] * strides[2] + first * strides[3];
    v16 highest = v_set1(-INFINITY);
    for (ptrdiff_t strip = 0; strip < tile->strips; strip++) {
        v16 x = v_load(s + 16 * strip);
        unsigned bits = strip_bits(&tile->seen[r], strip);
        if (mask) {
            const ptrdiff_t key = 16 * strip, n = call->S - first - key < 16 ? call->S - first - key : 16;
            x = v_fma(spread_load(mask + key * strides[3], strides[3], n), v_set1(LOG2_E), x);
        }
        x = v_max(v_set1(-FLT_MAX), x);
        if (bits != 0xffffu) x = v_select(m_from_bits(bits), x, v_set1(-INFINITY));
        v_store(s + 16 * strip, x);
        highest = v_max(x, highest); /* this order: x > highest ? x : highest */
    }
    return v_highest(highest);
}

/* Scores to softmax weights, in place, with what the forward pass stored for the row; hidden keys 0. */
INLINE void finish_weights(float *s, const attention_tile *tile, int r, float row_max, float row_sum) {
    for (ptrdiff_t strip = 0; strip < tile->strips; strip++) {
        v16 p = v_div(v_exp2_negative(v_sub(v_load(s + 16 * strip), v_set1(row_max))), v_set1(row_sum));
        unsigned bits = strip_bits(&tile->seen[r], strip);
        if (bits != 0xffffu) p = v_select(m_from_bits(bits), p, v_zero());
        v_store(s + 16 * strip, p);
    }
}

/* Dropout factors of the tile row's keys first .. first + 16 * strips - 1 (those beyond S have no number: 0). */
INLINE void tile_factors(float *factors, const cmha_attention *call, ptrdiff_t b, const attention_tile *tile, int r,
                         ptrdiff_t first) {
    const uint64_t head = (call->first_row + (uint64_t)b) * (uint64_t)call->H + (uint64_t)tile->h[r];
    const uint64_t row = head * (uint64_t)call->T + (uint64_t)tile->t[r];
    for (ptrdiff_t strip = 0; strip < tile->strips; strip++) {
        ptrdiff_t key = first + 16 * strip, n = call->S - key < 16 ? call->S - key : 16;
        v_store(factors + 16 * strip, v_zero());
        dropout_factors(factors + 16 * strip, call->seed, call->stream, row * (uint64_t)call->S + (uint64_t)key, (int)n,
                        call->dropout_p);
    }
}

/* ------------------------------------------------------------------------------------------------ weighted sums */
/* Sums of rows of x, x[i * stride + d]: row r of the tile weighs term i with c[r * c_row + i * c_term]. */
typedef struct { const float *c; ptrdiff_t c_row, c_term; const float *x; ptrdiff_t stride, hd; } weighted_rows;

/* Columns d .. d + 16 * n_vectors - 1 (or `columns` < 16 of them) of n_rows sums over begin .. end - 1, onto out. */
INLINE void sum_columns(float *out, ptrdiff_t width, const weighted_rows *w, ptrdiff_t d, ptrdiff_t begin,
                        ptrdiff_t end, const int n_rows, const int n_vectors, const int columns) {
    const float *c = w->c, *x = w->x + d;
    const ptrdiff_t c_row = w->c_row, c_term = w->c_term, stride = w->stride;
    v16 sum[ATTENTION_ROWS][4];
    out += d;
    for (int r = 0; r < n_rows; r++)
        for (int v = 0; v < n_vectors; v++) sum[r][v] = v_load(out + r * width + 16 * v);
    for (ptrdiff_t i = begin; i < end; i++) {
        v16 term[4];
        for (int v = 0; v < n_vectors; v++)
            term[v] = columns < 16 ? v_load_n(x + i * stride, columns) : v_load(x + i * stride + 16 * v);
        for (int r = 0; r < n_rows; r++) {
            const v16 weight = v_set1(c[r * c_row + i * c_term]);
            for (int v = 0; v < n_vectors; v++) sum[r][v] = v_fma(weight, term[v], sum[r][v]);
        }
    }
    for (int r = 0; r < n_rows; r++)
        for (int v = 0; v < n_vectors; v++) v_store(out + r * width + 16 * v, sum[r][v]);
}

INLINE void sum_run(float *out, ptrdiff_t width, const weighted_rows *w, ptrdiff_t begin, ptrdiff_t end,
                    const int n_rows) {
    const int wide = n_rows == 1 ? 4 : n_rows == 2 ? 2 : ATTENTION_VECTORS;
    ptrdiff_t d = 0;
    for (; d + 16 * wide <= w->hd; d += 16 * wide) sum_columns(out, width, w, d, begin, end, n_rows, wide, 16);
    for (; d + 16 <= w->hd; d += 16) sum_columns(out, width, w, d, begin, end, n_rows, 1, 16);
    if (d < w->hd) sum_columns(out, width, w, d, begin, end, n_rows, 1, (int)(w->hd - d));
}

INLINE void sum_run_of(float *out, ptrdiff_t width, const weighted_rows *w, ptrdiff_t begin, ptrdiff_t end,
                       int n_rows) {
    switch (n_rows) {
    case 1: sum_run(out, width, w, begin, end, 1); break;
    case 2: sum_run(out, width, w, begin, end, 2); break;
    case 3: sum_run(out, width, w, begin, end, 3); break;
    case 4: sum_run(out, width, w, begin, end, 4); break;
#if ATTENTION_ROWS > 4
    case 5: sum_run(out, width, w, begin, end, 5); break;
    case 6: sum_run(out, width, w, begin, end, 6); break;
#endif
#if ATTENTION_ROWS > 6
    case 7: sum_run(out, width, w, begin, end, 7); break;
    case 8: sum_run(out, width, w, begin, end, 8); break;
#endif
    }
}

/*
out[r][d] = one fma chain from +0 over the terms i of seen[r], ascending, of c * x. Runs of terms that every row sees go
through the tile; between them each row takes its own runs. Rows of out are `width` = hd rounded up to 16 apart.
*/
INLINE void weighted_sum(float *out, ptrdiff_t width, const weighted_rows w, const term_set *seen, int n_rows) {
    term_set all = seen[0], any = seen[0];
    for (int r = 1; r < n_rows; r++) all = both(all, seen[r]), any = either(any, seen[r]);
    const term_set not_all = complement(all);
    const ptrdiff_t end = terms_end(any);
    memset(out, 0, sizeof(float) * (size_t)(width * n_rows));
    for (ptrdiff_t i = 0, next; i < end; i = next) {
        if ((next = next_member(not_all, i, end)) > i) {
            sum_run_of(out, width, &w, i, next, n_rows);
            continue;
        }
        next = next_member(all, i, end);
        for (int r = 0; r < n_rows; r++) {
            const term_set hidden = complement(seen[r]);
            weighted_rows own = w;
            own.c += r * w.c_row;
            for (ptrdiff_t from = i, to; (from = next_member(seen[r], from, next)) < next; from = to) {
                to = next_member(hidden, from, next);
                sum_run(out + r * width, width, &own, from, to, 1);
            }
        }
    }
}

/* Weights (rows, 128), and the same read down its columns: two functions, so that the strides are constants. */
static void sum_by_rows(float *out, ptrdiff_t width, const float *c, const float *x, ptrdiff_t stride, ptrdiff_t hd,
                        const term_set *seen, int n_rows) {
    weighted_sum(out, width, (weighted_rows){c, ATTENTION_BLOCK, 1, x, stride, hd}, seen, n_rows);
}
static inline void sum_by_columns(float *out, ptrdiff_t width, const float *c, const float *x, ptrdiff_t stride,
                                  ptrdiff_t hd, const term_set *seen, int n_rows) {
    weighted_sum(out, width, (weighted_rows){c, 1, ATTENTION_BLOCK, x, stride, hd}, seen, n_rows);
}
#endif
