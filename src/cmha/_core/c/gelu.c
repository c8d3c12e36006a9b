/*
GELU, the tanh form, as GPT-2 was trained with it (Hendrycks & Gimpel 2016; the erf form differs by up to 4.7e-4).

    forward    y  = x/2 (1 + tanh u),   u = sqrt(2/pi) (x + 0.044715 x^3)
    backward   dx = dy (s + x s (1 - s) 2u'),   s = 1 / (1 + e^-2u)

x, y, dx, dy   (n), contiguous. Threads take whole vectors.
*/
#include "variant.h"
#include "vmath.h"

void KERNEL_NAME(gelu_forward)(float *y, const float *x, ptrdiff_t n, int threads) {
    CMHA_PARALLEL(threads, {
        ptrdiff_t begin, end;
        thread_share(n, 16, &begin, &end);
        for (ptrdiff_t i = begin; i < end; i += 16)
            v_store_up_to(y + i, v_gelu(v_load_up_to(x + i, end - i)), end - i);
    })
}

void KERNEL_NAME(gelu_backward)(float *dx, const float *dy, const float *x, ptrdiff_t n, int threads) {
    CMHA_PARALLEL(threads, {
        ptrdiff_t begin, end;
        thread_share(n, 16, &begin, &end);
        for (ptrdiff_t i = begin; i < end; i += 16) {
            v16 slope = v_gelu_slope(v_load_up_to(x + i, end - i));
            v_store_up_to(dx + i, v_mul(v_load_up_to(dy + i, end - i), slope), end - i);
        }
    })
}
