/*
What every kernel file includes. One source is compiled once per instruction set, with its own flags and with
-DCMHA_VARIANT=base|avx2|avx512|neon; KERNEL_NAME(softmax_forward) is then softmax_forward_avx2, and so on.
*/
#ifndef CMHA_VARIANT_H
#define CMHA_VARIANT_H

#include <stddef.h>
#include <stdint.h>

#define CMHA_JOIN2(a, b) cmha_##a##_##b
#define CMHA_JOIN(a, b) CMHA_JOIN2(a, b)
#define KERNEL_NAME(name) CMHA_JOIN(name, CMHA_VARIANT)

#define KERNEL(name, args) void KERNEL_NAME(name) args;
#include "kernels.h"
#undef KERNEL

#include "parallel.h"
#include "simd.h"
#endif
