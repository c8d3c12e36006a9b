/*
Several operands of one shape, each with its own strides: what copy, the binary operations and where walk over.

Axes of length 1 are dropped, and neighbours are merged where every operand allows it: contiguous operands leave one
axis, a bias added to many rows two, however many the caller had. The last two axes are the kernel's own loops, the
outer ones are counted here. Steps are in bytes, because operands differ in item size. Operand 0 is the output.

    if (axes_part(&axes, p))                                       // this thread's part; p[k] points into operand k
        do ... shape[ndim - 2] rows of shape[ndim - 1] items at p ...; while (axes_next(&axes, index, p));
*/
#ifndef CMHA_AXES_H
#define CMHA_AXES_H

#include "variant.h"

#define AXES_OPERANDS 4

typedef struct {
    int ndim, operands; /* ndim >= 2 */
    ptrdiff_t shape[CMHA_MAX_NDIM + 2], step[AXES_OPERANDS][CMHA_MAX_NDIM + 2];
} axes_t;

INLINE axes_t axes_of(int operands) { return (axes_t){.ndim = 0, .operands = operands}; }

/* One more axis, inside those that are there: merged into the last one where it goes on where that one ends. */
INLINE void axes_add(axes_t *axes, ptrdiff_t length, const ptrdiff_t *step) {
    if (length == 1) return;
    int last = axes->ndim - 1, merge = last >= 0;
    for (int k = 0; k < axes->operands && merge; k++) merge = axes->step[k][last] == length * step[k];
    if (merge) axes->shape[last] *= length;
    else axes->shape[last = axes->ndim++] = length;
    for (int k = 0; k < axes->operands; k++) axes->step[k][last] = step[k];
}

/* At least two axes, so that the row loops need no special case. Returns 0 when there is nothing to do. */
INLINE int axes_finish(axes_t *axes) {
    for (int d = 0; d < axes->ndim; d++)
        if (axes->shape[d] == 0) return 0;
    while (axes->ndim < 2) { /* in front: the steps of an axis of length 1 are never taken */
        for (int d = axes->ndim; d > 0; d--) {
            axes->shape[d] = axes->shape[d - 1];
            for (int k = 0; k < axes->operands; k++) axes->step[k][d] = axes->step[k][d - 1];
        }
        axes->shape[0] = 1;
        for (int k = 0; k < axes->operands; k++) axes->step[k][0] = 0;
        axes->ndim++;
    }
    return 1;
}

/* Cut this thread's part out of one axis: the outermost that is long enough for all, else the longest. 0 = no part. */
INLINE int axes_part(axes_t *axes, char **p) {
    int axis = 0;
    for (int d = 1; d < axes->ndim; d++)
        if (axes->shape[axis] < 4 * thread_count() && axes->shape[d] > axes->shape[axis]) axis = d;
    ptrdiff_t begin, end;
    thread_share(axes->shape[axis], axis == axes->ndim - 1 ? 16 : 1, &begin, &end);
    for (int k = 0; k < axes->operands; k++) p[k] += begin * axes->step[k][axis];
    axes->shape[axis] = end - begin;
    return begin < end;
}

/* Move p to the next place of the outer axes; index starts as zeros. 0 = that was the last. */
INLINE int axes_next(const axes_t *axes, ptrdiff_t *index, char **p) {
    for (int d = axes->ndim - 3; d >= 0; d--) {
        for (int k = 0; k < axes->operands; k++) p[k] += axes->step[k][d];
        if (++index[d] < axes->shape[d]) return 1;
        for (int k = 0; k < axes->operands; k++) p[k] -= index[d] * axes->step[k][d];
        index[d] = 0;
    }
    return 0;
}
#endif
