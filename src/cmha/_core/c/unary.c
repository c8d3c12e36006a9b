/*
One function of one element: exp, log, sqrt, tanh, sigmoid, relu, abs, negative, clip.

    forward    y = f(x)
    backward   dx = dy f'(x), from x or from y, whichever costs less
                   exp       dy y              sigmoid   dy y (1 - y)
                   log       dy / x            relu      dy where x > 0, else 0
                   sqrt      dy / (2 y)        abs       dy sign(x), 0 at 0
                   tanh      dy (1 - y^2)
               clip: dy where lowest <= x <= highest, else 0

x, y, dx, dy   (n), contiguous. NaN stays NaN forward, in relu and clip too, as with NumPy's maximum.

Every element goes through a vector, the last ones through a vector filled up with zeros, so a value never depends on
its place. Threads take whole vectors.
*/
#include "variant.h"
#include "vmath.h"

INLINE v16 opposite(v16 x) { return v_mul(x, v_set1(-1.0f)); } /* 0 - x would turn 0 into 0 instead of -0 */

INLINE v16 unary_vector(v16 x, int op) {
    switch (op) {
    case CMHA_EXP: return v_exp(x);
    case CMHA_LOG: return v_log(x);
    case CMHA_SQRT: return v_sqrt(x);
    case CMHA_TANH: return v_tanh(x);
    case CMHA_SIGMOID: return v_sigmoid(x);
    case CMHA_RELU: return v_max(v_zero(), x); /* in this order: v_max gives its second argument if one is NaN */
    case CMHA_ABS: return v_abs(x);
    default: return opposite(x);
    }
}

void KERNEL_NAME(unary)(float *y, const float *x, int op, ptrdiff_t n, int threads) {
    CMHA_PARALLEL(threads, {
        ptrdiff_t begin, end;
        thread_share(n, 16, &begin, &end);
        for (ptrdiff_t i = begin; i < end; i += 16)
            v_store_up_to(y + i, unary_vector(v_load_up_to(x + i, end - i), op), end - i);
    })
}

/* `saved` is y for the functions whose slope follows from their value, x for the others. */
INLINE v16 unary_slope_vector(v16 dy, v16 saved, int op) {
    v16 one = v_set1(1.0f), zero = v_zero();
    switch (op) {
    case CMHA_EXP: return v_mul(dy, saved);
    case CMHA_LOG: return v_div(dy, saved);
    case CMHA_SQRT: return v_div(dy, v_add(saved, saved));
    case CMHA_TANH: return v_mul(dy, v_fma(opposite(saved), saved, one));
    case CMHA_SIGMOID: return v_mul(dy, v_mul(saved, v_sub(one, saved)));
    case CMHA_RELU: return v_select(v_lt(zero, saved), dy, zero);
    default: return v_select(v_lt(zero, saved), dy, v_select(v_lt(saved, zero), opposite(dy), zero)); /* abs */
    }
}

void KERNEL_NAME(unary_backward)(float *dx, const float *dy, const float *x, const float *y, int op, ptrdiff_t n,
                                 int threads) {
    int from_y = op == CMHA_EXP || op == CMHA_SQRT || op == CMHA_TANH || op == CMHA_SIGMOID;
    const float *saved = from_y ? y : x;
    CMHA_PARALLEL(threads, {
        ptrdiff_t begin, end;
        thread_share(n, 16, &begin, &end);
        for (ptrdiff_t i = begin; i < end; i += 16) {
            v16 d = v_load_up_to(dy + i, end - i), s = v_load_up_to(saved + i, end - i);
            v_store_up_to(dx + i, unary_slope_vector(d, s, op), end - i);
        }
    })
}

void KERNEL_NAME(clip_forward)(float *y, const float *x, float lowest, float highest, ptrdiff_t n, int threads) {
    CMHA_PARALLEL(threads, {
        ptrdiff_t begin, end;
        thread_share(n, 16, &begin, &end);
        for (ptrdiff_t i = begin; i < end; i += 16) {
            v16 raised = v_max(v_set1(lowest), v_load_up_to(x + i, end - i));
            v_store_up_to(y + i, v_min(v_set1(highest), raised), end - i);
        }
    })
}

void KERNEL_NAME(clip_backward)(float *dx, const float *dy, const float *x, float lowest, float highest, ptrdiff_t n,
                                int threads) {
    CMHA_PARALLEL(threads, {
        ptrdiff_t begin, end;
        thread_share(n, 16, &begin, &end);
        for (ptrdiff_t i = begin; i < end; i += 16) {
            v16 a = v_load_up_to(x + i, end - i), d = v_load_up_to(dy + i, end - i);
            m16 inside = m_and(v_le(v_set1(lowest), a), v_le(a, v_set1(highest)));
            v_store_up_to(dx + i, v_select(inside, d, v_zero()), end - i);
        }
    })
}
