/*
Every kernel's prototype, once: KERNEL(name, (arguments)). Included with KERNEL defined (variant.h, dispatch.h, dispatch.c).

Conventions
    outputs first, then inputs, then sizes and options, then scratch, last `threads`: into how many parts (parallel.h)
    float32 throughout; ids are int64, masks uint8 (0 or 1); sizes and strides are ptrdiff_t, strides in elements
    x, y input and output, dx, dy their gradients; M rows, N columns; contiguous row-major unless strides are given
    a matrix is a pointer, a row stride and a column stride
    void: a kernel cannot fail, allocates nothing, keeps no state; everything was checked by its .pxi
    outputs are overwritten unless the argument is called `accumulate`; outputs never overlap inputs
    orders of sums: design.md 3, repeated at the head of each file
*/
#include <stddef.h>
#include <stdint.h>

#ifndef CMHA_KERNEL_TYPES
#define CMHA_KERNEL_TYPES
#define CMHA_MAX_NDIM 8

/* One operand of matmul: batch `i` starts at data + offsets[i]; element (r, c) is at r * row + c * col. */
typedef struct { float *data; const ptrdiff_t *offsets; ptrdiff_t row, col; } cmha_matrix;

/* What happens to a finished row of matmul's c; NULL where nothing does. residual and activated lie as c does. */
typedef struct {
    const float *bias;                  /* (N), added */
    const float *residual;              /* then added */
    float *activated;                   /* gelu(c) goes here */
} cmha_epilogue;

/* (B, H, T, hd) with any strides but the last, which is 1. */
typedef struct { float *data; ptrdiff_t batch, head, time; } cmha_heads;

/* What one attention call is about; the same struct for forward, weights and backward. */
typedef struct {
    ptrdiff_t B, H, H_kv, T, S, hd;     /* query head h reads key head h / (H / H_kv) */
    float scale;                        /* of the scores: 1 / sqrt(hd) unless the caller says otherwise */
    int is_causal;                      /* query i of row b sees keys j <= i + length_b - T */
    const int64_t *lengths;             /* (B): keys of each row, NULL = S; keys beyond are hidden */
    const uint8_t *bool_mask;           /* 1 = may attend, or NULL; strides may be 0 (broadcast) */
    const float *float_mask;            /* added to the scores, or NULL */
    ptrdiff_t mask_strides[4];          /* of bool_mask or float_mask over (B, H, T, S) */
    const uint8_t *key_mask;            /* (B, S) contiguous, 1 = a real token, or NULL */
    float dropout_p;                    /* 0 = none; weight (b, h, t, s) is element ((b*H + h)*T + t)*S + s of the stream */
    uint64_t seed, stream;
    uint64_t first_row;                 /* number of row 0 in the global batch */
} cmha_attention;

/* One parameter (n) of an optimiser's step: its moments and gradient. */
typedef struct { float *p, *m, *v; const float *g; ptrdiff_t n; } cmha_adamw_part;

enum { CMHA_ADD, CMHA_SUBTRACT, CMHA_MULTIPLY, CMHA_DIVIDE };
enum { CMHA_LESS, CMHA_LESS_EQUAL, CMHA_EQUAL, CMHA_NOT_EQUAL };
enum { CMHA_EXP, CMHA_LOG, CMHA_SQRT, CMHA_TANH, CMHA_SIGMOID, CMHA_RELU, CMHA_ABS, CMHA_NEGATIVE };
#endif

/* copy.c: any strides to any strides; itemsize 1, 4 or 8 */
KERNEL(copy, (void *y, const void *x, ptrdiff_t itemsize, int ndim, const ptrdiff_t *shape, const ptrdiff_t *y_strides, const ptrdiff_t *x_strides, int threads))
KERNEL(int64_to_float, (float *y, const int64_t *x, ptrdiff_t n, int threads))
KERNEL(bool_to_float, (float *y, const uint8_t *x, ptrdiff_t n, int threads))

/* binary.c: y contiguous of `shape`; a and b with strides, 0 where broadcast */
KERNEL(binary, (float *y, const float *a, const float *b, int op, int ndim, const ptrdiff_t *shape, const ptrdiff_t *a_strides, const ptrdiff_t *b_strides, int threads))
KERNEL(compare, (uint8_t *y, const float *a, const float *b, int op, int ndim, const ptrdiff_t *shape, const ptrdiff_t *a_strides, const ptrdiff_t *b_strides, int threads))
KERNEL(where, (float *y, const uint8_t *condition, const float *a, const float *b, int ndim, const ptrdiff_t *shape, const ptrdiff_t *condition_strides, const ptrdiff_t *a_strides, const ptrdiff_t *b_strides, int threads))

/* unary.c */
KERNEL(unary, (float *y, const float *x, int op, ptrdiff_t n, int threads))
KERNEL(unary_backward, (float *dx, const float *dy, const float *x, const float *y, int op, ptrdiff_t n, int threads))
KERNEL(clip_forward, (float *y, const float *x, float lowest, float highest, ptrdiff_t n, int threads))
KERNEL(clip_backward, (float *dx, const float *dy, const float *x, float lowest, float highest, ptrdiff_t n, int threads))

/* gelu.c: the tanh form */
KERNEL(gelu_forward, (float *y, const float *x, ptrdiff_t n, int threads))
KERNEL(gelu_backward, (float *dx, const float *dy, const float *x, ptrdiff_t n, int threads))

/* reduce.c: x (outer, n, inner) -> y (outer, inner). sum: sum / divisor with one rounding. var: mean of (x - mean)^2. */
KERNEL(sum, (float *y, const float *x, ptrdiff_t outer, ptrdiff_t n, ptrdiff_t inner, double divisor, int threads))
KERNEL(var, (float *y, const float *x, ptrdiff_t outer, ptrdiff_t n, ptrdiff_t inner, int threads))
/* largest (sign = 1) or smallest (sign = -1) value, NaN if there is one, and where it first stands */
KERNEL(extreme, (float *y, int64_t *index, const float *x, int sign, ptrdiff_t outer, ptrdiff_t n, ptrdiff_t inner, int threads))
KERNEL(extreme_backward, (float *dx, const float *dy, const int64_t *index, ptrdiff_t outer, ptrdiff_t n, ptrdiff_t inner, int threads))
/* the sum of squares, in double; totals holds (n + 511) / 512 doubles */
KERNEL(sum_of_squares, (double *y, const float *x, ptrdiff_t n, double *totals, int threads))

/* softmax.c: over the last axis of (M, N) */
KERNEL(softmax_forward, (float *y, const float *x, ptrdiff_t M, ptrdiff_t N, int threads))
KERNEL(softmax_backward, (float *dx, const float *dy, const float *y, ptrdiff_t M, ptrdiff_t N, int threads))
KERNEL(log_softmax_forward, (float *y, const float *x, ptrdiff_t M, ptrdiff_t N, int threads))
KERNEL(log_softmax_backward, (float *dx, const float *dy, const float *y, ptrdiff_t M, ptrdiff_t N, int threads))

/* cross_entropy.c: logits (M, V), targets (M). dlogits (the gradient of the mean for dy = 1) may be NULL.
   rows (M) is scratch; loss and count are one number each; no counted target: loss 0, gradient 0. */
KERNEL(cross_entropy, (float *loss, int64_t *count, float *dlogits, const float *logits, const int64_t *targets, ptrdiff_t M, ptrdiff_t V, int64_t ignore_index, double *rows, int threads))

/* layer_norm.c: x (M, N), gamma beta (N), beta may be NULL; stats (M, 3): mean as two floats (high, low),
   1 / sigma. lanes: scratch, 32 N floats for every 512 rows, begun or full. */
KERNEL(layer_norm_forward, (float *y, float *stats, const float *x, const float *gamma, const float *beta, ptrdiff_t M, ptrdiff_t N, float eps, int threads))
KERNEL(layer_norm_backward, (float *dx, float *dgamma, float *dbeta, const float *dy, const float *x, const float *stats, const float *gamma, ptrdiff_t M, ptrdiff_t N, float *lanes, int threads))

/* embedding.c: ids (n) into weight (V, D) */
KERNEL(embedding_forward, (float *y, const float *weight, const int64_t *ids, ptrdiff_t n, ptrdiff_t D, int threads))
KERNEL(embedding_backward, (float *dweight, const float *dy, const int64_t *ids, ptrdiff_t n, ptrdiff_t V, ptrdiff_t D, int threads))
KERNEL(embedding_add_rows, (float *weight, const float *rows, const int64_t *ids, ptrdiff_t n, ptrdiff_t D, int threads))

/* dropout.c: element i of the stream is element first + i: y = x / (1 - p) where the draw is >= p, else 0;
   backward is the same function of dy */
KERNEL(dropout, (float *y, const float *x, ptrdiff_t n, float p, uint64_t seed, uint64_t stream, uint64_t first, int threads))

/* matmul.c: c (batch, M, N) = a (batch, M, K) @ b (batch, K, N) [+ c when accumulate], then `after` (NULL: nothing);
   c.col is 1. scratch: cmha_matmul_scratch(...) floats, 64-byte aligned. matmul_naive: the same bits by plain loops. */
KERNEL(matmul, (const cmha_matrix *c, const cmha_matrix *a, const cmha_matrix *b, const cmha_epilogue *after, ptrdiff_t batch, ptrdiff_t M, ptrdiff_t N, ptrdiff_t K, int accumulate, float *scratch, int threads))
KERNEL(matmul_naive, (const cmha_matrix *c, const cmha_matrix *a, const cmha_matrix *b, const cmha_epilogue *after, ptrdiff_t batch, ptrdiff_t M, ptrdiff_t N, ptrdiff_t K, int accumulate))
KERNEL(matmul_scratch, (ptrdiff_t *floats, ptrdiff_t M, ptrdiff_t N, ptrdiff_t K, int threads))

/* attention.c: y (B, H, T, hd), row_max and row_sum (B, H, T): softmax weight = exp2(s - row_max) / row_sum, scores s in
   units of log 2; row_sum 0 = nothing visible. scratch: attention_scratch floats. weights (B, H, T, S), without dropout
   unless dropout_p > 0. */
KERNEL(attention_forward, (const cmha_heads *y, float *row_max, float *row_sum, const cmha_heads *q, const cmha_heads *k, const cmha_heads *v, const cmha_attention *call, float *scratch, int threads))
KERNEL(attention_scratch, (ptrdiff_t *floats, const cmha_attention *call, int threads))
/* attention_weights.c: scratch as of the forward pass */
KERNEL(attention_weights, (float *weights, const float *row_max, const float *row_sum, const cmha_heads *q, const cmha_heads *k, const cmha_attention *call, float *scratch, int threads))
/* attention_backward.c: all of dq (B, H, T, hd), dk and dv (B, H_kv, S, hd) is overwritten */
KERNEL(attention_backward, (const cmha_heads *dq, const cmha_heads *dk, const cmha_heads *dv, const cmha_heads *dy, const cmha_heads *y, const float *row_max, const float *row_sum, const cmha_heads *q, const cmha_heads *k, const cmha_heads *v, const cmha_attention *call, float *scratch, int threads))
KERNEL(attention_backward_scratch, (ptrdiff_t *floats, const cmha_attention *call, int threads))

/* adamw.c: one step of `count` parameters, gradients scaled by grad_scale first; correction1, 2 are 1 - beta^t */
KERNEL(adamw, (const cmha_adamw_part *parts, ptrdiff_t count, double lr, double beta1, double beta2, double eps, double weight_decay, double correction1, double correction2, double grad_scale, int threads))
