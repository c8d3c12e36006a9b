/*
The only file that asks the processor. A variant is usable when it was built (CMHA_HAVE_<VARIANT>), when CPUID lists its
instructions, and when the operating system saves its registers (XGETBV; __builtin_cpu_supports checks both).
*/
#include "dispatch.h"
#include <string.h>

#define KERNEL(name, args) void(*cmha_##name) args;
#include "kernels.h"
#undef KERNEL

static int runs_base(void) { return 1; }
#define KERNEL(name, args) void cmha_##name##_base args;
#include "kernels.h"
#undef KERNEL
static void take_base(void) {
#define KERNEL(name, args) cmha_##name = cmha_##name##_base;
#include "kernels.h"
#undef KERNEL
}

#ifdef CMHA_HAVE_AVX2
static int runs_avx2(void) {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}
#define KERNEL(name, args) void cmha_##name##_avx2 args;
#include "kernels.h"
#undef KERNEL
static void take_avx2(void) {
#define KERNEL(name, args) cmha_##name = cmha_##name##_avx2;
#include "kernels.h"
#undef KERNEL
}
#endif

#ifdef CMHA_HAVE_AVX512
static int runs_avx512(void) {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("fma");
}
#define KERNEL(name, args) void cmha_##name##_avx512 args;
#include "kernels.h"
#undef KERNEL
static void take_avx512(void) {
#define KERNEL(name, args) cmha_##name = cmha_##name##_avx512;
#include "kernels.h"
#undef KERNEL
}
#endif

#ifdef CMHA_HAVE_NEON
static int runs_neon(void) { return 1; } /* part of every aarch64 processor */
#define KERNEL(name, args) void cmha_##name##_neon args;
#include "kernels.h"
#undef KERNEL
static void take_neon(void) {
#define KERNEL(name, args) cmha_##name = cmha_##name##_neon;
#include "kernels.h"
#undef KERNEL
}
#endif

/* Best first. */
static const struct { const char *name; int (*runs)(void); void (*take)(void); } variants[] = {
#ifdef CMHA_HAVE_AVX512
    {"avx512", runs_avx512, take_avx512},
#endif
#ifdef CMHA_HAVE_AVX2
    {"avx2", runs_avx2, take_avx2},
#endif
#ifdef CMHA_HAVE_NEON
    {"neon", runs_neon, take_neon},
#endif
    {"base", runs_base, take_base},
};
#define N_VARIANTS (int)(sizeof variants / sizeof variants[0])

int cmha_has_variant(const char *name) {
    for (int i = 0; i < N_VARIANTS; i++)
        if (!strcmp(variants[i].name, name)) return variants[i].runs();
    return 0;
}

const char *cmha_dispatch(const char *name) {
    for (int i = 0; i < N_VARIANTS; i++)
        if ((!*name || !strcmp(variants[i].name, name)) && variants[i].runs()) {
            variants[i].take();
            return variants[i].name;
        }
    return NULL;
}
