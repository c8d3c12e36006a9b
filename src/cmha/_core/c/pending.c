/* Kernels that are not written yet trap; weak, so that a written one takes its place. Goes when all are there. */
#include <stddef.h>
#include <stdint.h>
#define CMHA_JOIN2(a, b) cmha_##a##_##b
#define CMHA_JOIN(a, b) CMHA_JOIN2(a, b)
#define KERNEL_NAME(name) CMHA_JOIN(name, CMHA_VARIANT)
#define KERNEL(name, args) __attribute__((weak)) void KERNEL_NAME(name) args { __builtin_trap(); }
#include "kernels.h"
