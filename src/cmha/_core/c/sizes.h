/* Arithmetic of sizes that every kernel needs. */
#ifndef CMHA_SIZES_H
#define CMHA_SIZES_H

#include "simd.h"

INLINE ptrdiff_t smaller(ptrdiff_t a, ptrdiff_t b) { return a < b ? a : b; }
INLINE ptrdiff_t rounded_up(ptrdiff_t n, ptrdiff_t unit) { return (n + unit - 1) / unit * unit; }
#endif
