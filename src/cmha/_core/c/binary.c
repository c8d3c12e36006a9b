/*
Two operands, element by element: y = a + b, a - b, a * b, a / b; a < b, a <= b, a == b, a != b; condition ? a : b.

y is contiguous; an operand that is broadcast has stride 0 there. Each result is one IEEE operation, so the vectors the
compiler chooses change no bit; comparisons with NaN are false, except !=.
*/
#include "variant.h"
#include "axes.h"

/* One row: the loops the compiler turns into vectors (both dense, or one of them a single number), then all others. */
#define DEFINE_ROW(name, type, operation)                                                                     \
    static void name##_row(void *y_row, const float *a, const float *b, ptrdiff_t n, ptrdiff_t a_step,        \
                           ptrdiff_t b_step) {                                                                \
        type *restrict y = y_row;                                                                             \
        if (a_step == 1 && b_step == 1)                                                                       \
            for (ptrdiff_t i = 0; i < n; i++) y[i] = a[i] operation b[i];                                     \
        else if (a_step == 1 && b_step == 0)                                                                  \
            for (ptrdiff_t i = 0; i < n; i++) y[i] = a[i] operation b[0];                                     \
        else if (a_step == 0 && b_step == 1)                                                                  \
            for (ptrdiff_t i = 0; i < n; i++) y[i] = a[0] operation b[i];                                     \
        else                                                                                                  \
            for (ptrdiff_t i = 0; i < n; i++) y[i] = a[i * a_step] operation b[i * b_step];                   \
    }
DEFINE_ROW(add, float, +)
DEFINE_ROW(subtract, float, -)
DEFINE_ROW(multiply, float, *)
DEFINE_ROW(divide, float, /)
DEFINE_ROW(less, uint8_t, <)
DEFINE_ROW(less_equal, uint8_t, <=)
DEFINE_ROW(equal, uint8_t, ==)
DEFINE_ROW(not_equal, uint8_t, !=)

typedef void (*row_function)(void *y, const float *a, const float *b, ptrdiff_t n, ptrdiff_t a_step, ptrdiff_t b_step);

/* y's strides are those of a contiguous array, counted from the innermost axis. */
static axes_t broadcast_axes(int operands, int ndim, const ptrdiff_t *shape, const ptrdiff_t *const *strides,
                             const ptrdiff_t *itemsize) {
    ptrdiff_t y_strides[CMHA_MAX_NDIM], dense = 1;
    for (int d = ndim - 1; d >= 0; d--) {
        y_strides[d] = dense;
        dense *= shape[d];
    }
    axes_t axes = axes_of(operands);
    for (int d = 0; d < ndim; d++) {
        ptrdiff_t step[AXES_OPERANDS] = {y_strides[d] * itemsize[0]};
        for (int k = 1; k < operands; k++) step[k] = strides[k - 1][d] * itemsize[k];
        axes_add(&axes, shape[d], step);
    }
    return axes;
}

static void each_row(row_function row, void *y, ptrdiff_t y_size, const float *a, const float *b, int ndim,
                     const ptrdiff_t *shape, const ptrdiff_t *a_strides, const ptrdiff_t *b_strides, int threads) {
    axes_t axes = broadcast_axes(3, ndim, shape, (const ptrdiff_t *[]){a_strides, b_strides},
                                 (const ptrdiff_t[]){y_size, sizeof(float), sizeof(float)});
    if (!axes_finish(&axes)) return;
    CMHA_PARALLEL(threads, {
        axes_t part = axes;
        char *p[3] = {y, (char *)a, (char *)b};
        ptrdiff_t index[CMHA_MAX_NDIM] = {0};
        const int r = axes.ndim - 2, c = axes.ndim - 1;
        const ptrdiff_t size = sizeof(float), a_step = axes.step[1][c] / size, b_step = axes.step[2][c] / size;
        if (axes_part(&part, p))
            do
                for (ptrdiff_t i = 0; i < part.shape[r]; i++)
                    row(p[0] + i * part.step[0][r], (const float *)(p[1] + i * part.step[1][r]),
                        (const float *)(p[2] + i * part.step[2][r]), part.shape[c], a_step, b_step);
            while (axes_next(&part, index, p));
    })
}

void KERNEL_NAME(binary)(float *y, const float *a, const float *b, int op, int ndim, const ptrdiff_t *shape,
                         const ptrdiff_t *a_strides, const ptrdiff_t *b_strides, int threads) {
    static const row_function rows[] = {[CMHA_ADD] = add_row, [CMHA_SUBTRACT] = subtract_row,
                                        [CMHA_MULTIPLY] = multiply_row, [CMHA_DIVIDE] = divide_row};
    each_row(rows[op], y, sizeof(float), a, b, ndim, shape, a_strides, b_strides, threads);
}

void KERNEL_NAME(compare)(uint8_t *y, const float *a, const float *b, int op, int ndim, const ptrdiff_t *shape,
                          const ptrdiff_t *a_strides, const ptrdiff_t *b_strides, int threads) {
    static const row_function rows[] = {[CMHA_LESS] = less_row, [CMHA_LESS_EQUAL] = less_equal_row,
                                        [CMHA_EQUAL] = equal_row, [CMHA_NOT_EQUAL] = not_equal_row};
    each_row(rows[op], y, sizeof(uint8_t), a, b, ndim, shape, a_strides, b_strides, threads);
}

/* Both sides are read whatever the condition says: a load is cheaper than a branch. */
static void where_row(float *restrict y, const uint8_t *condition, const float *a, const float *b, ptrdiff_t n,
                      ptrdiff_t condition_step, ptrdiff_t a_step, ptrdiff_t b_step) {
#define WHERE(c, a_index, b_index)                              \
    for (ptrdiff_t i = 0; i < n; i++) {                         \
        const float yes = a[a_index], no = b[b_index];          \
        y[i] = condition[c] ? yes : no;                         \
    }
    if (condition_step == 1 && a_step == 1 && b_step == 1) WHERE(i, i, i)
    else if (condition_step == 1 && a_step == 0 && b_step == 1) WHERE(i, 0, i)
    else if (condition_step == 1 && a_step == 1 && b_step == 0) WHERE(i, i, 0)
    else WHERE(i * condition_step, i * a_step, i * b_step)
#undef WHERE
}

void KERNEL_NAME(where)(float *y, const uint8_t *condition, const float *a, const float *b, int ndim,
                        const ptrdiff_t *shape, const ptrdiff_t *condition_strides, const ptrdiff_t *a_strides,
                        const ptrdiff_t *b_strides, int threads) {
    axes_t axes = broadcast_axes(4, ndim, shape, (const ptrdiff_t *[]){condition_strides, a_strides, b_strides},
                                 (const ptrdiff_t[]){sizeof(float), 1, sizeof(float), sizeof(float)});
    if (!axes_finish(&axes)) return;
    CMHA_PARALLEL(threads, {
        axes_t part = axes;
        char *p[4] = {(char *)y, (char *)condition, (char *)a, (char *)b};
        ptrdiff_t index[CMHA_MAX_NDIM] = {0};
        const int r = axes.ndim - 2, c = axes.ndim - 1;
        const ptrdiff_t size = sizeof(float), c_step = axes.step[1][c], a_step = axes.step[2][c] / size;
        const ptrdiff_t b_step = axes.step[3][c] / size;
        if (axes_part(&part, p))
            do
                for (ptrdiff_t i = 0; i < part.shape[r]; i++)
                    where_row((float *)(p[0] + i * part.step[0][r]), (const uint8_t *)(p[1] + i * part.step[1][r]),
                              (const float *)(p[2] + i * part.step[2][r]), (const float *)(p[3] + i * part.step[3][r]),
                              part.shape[c], c_step, a_step, b_step);
            while (axes_next(&part, index, p));
    })
}
