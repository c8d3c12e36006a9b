/*
The only file that asks the processor. A variant is usable when it was built (CMHA_HAVE_<VARIANT>), when CPUID lists its
instructions, and when the operating system saves its registers (XCR0, read with XGETBV).

Intel's Software Developer's Manual, volume 1, chapters 14.3 and 15.2: CPUID leaf 1 has FMA, OSXSAVE and AVX in ecx, leaf
7 has AVX2 and the parts of AVX-512 in ebx; XCR0 has 6 for the ymm registers, 0xe0 for those of AVX-512.
*/
#include "dispatch.h"
#include "compiler.h"
#include <string.h>

#define KERNEL(name, args) void(*cmha_##name) args;
#include "kernels.h"
#undef KERNEL

#define TEXT_OF(...) #__VA_ARGS__
#define TEXT(...) TEXT_OF(__VA_ARGS__)

/* -------------------------------------------------------------------------------------------- the processor */

enum { AVX = 1, FMA = 2, AVX2 = 4, AVX512F = 8, AVX512DQ = 16, AVX512BW = 32, AVX512VL = 64, NEON = 128 };
static const struct { int feature; const char *name; } feature_names[] = {
    {AVX, "avx"}, {FMA, "fma"}, {AVX2, "avx2"}, {AVX512F, "avx512f"}, {AVX512DQ, "avx512dq"}, {AVX512BW, "avx512bw"},
    {AVX512VL, "avx512vl"}, {NEON, "neon"},
};

/* What this processor has and the system below it lets be used. */
static int features(void) {
    int found = 0;
#ifdef CMHA_X86
    unsigned one[4], seven[4];
    cpu_id(1, 0, one);
    cpu_id(7, 0, seven);
    const uint64_t saved = one[2] >> 27 & 1 ? cpu_saved_registers() : 0;
    if ((saved & 6) != 6) return 0;
    if (one[2] >> 28 & 1) found |= AVX;
    if (one[2] >> 12 & 1) found |= FMA;
    if (seven[1] >> 5 & 1) found |= AVX2;
#ifndef __APPLE__ /* macOS sets the bits of a thread on its first use of a register, and always saves them */
    if ((saved & 0xe0) != 0xe0) return found;
#endif
    if (seven[1] >> 16 & 1) found |= AVX512F;
    if (seven[1] >> 17 & 1) found |= AVX512DQ;
    if (seven[1] >> 30 & 1) found |= AVX512BW;
    if (seven[1] >> 31 & 1) found |= AVX512VL;
#elif defined(__aarch64__) || defined(_M_ARM64)
    found = NEON; /* part of every such processor */
#endif
    return found;
}

const char *cmha_cpu_feature(int i) {
    const int found = features();
    for (size_t k = 0; k < sizeof feature_names / sizeof feature_names[0]; k++)
        if (found & feature_names[k].feature && i-- == 0) return feature_names[k].name;
    return NULL;
}

/* ---------------------------------------------------------------------------------------------- the variants */

#define KERNEL(name, args) void cmha_##name##_base args;
#include "kernels.h"
#undef KERNEL
static void take_base(void) {
#define KERNEL(name, args) cmha_##name = cmha_##name##_base;
#include "kernels.h"
#undef KERNEL
}

#ifdef CMHA_HAVE_AVX2
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
#define KERNEL(name, args) void cmha_##name##_neon args;
#include "kernels.h"
#undef KERNEL
static void take_neon(void) {
#define KERNEL(name, args) cmha_##name = cmha_##name##_neon;
#include "kernels.h"
#undef KERNEL
}
#endif

/* Best first; CMHA_HAVE_<VARIANT> is the text of the flags it was compiled with. */
static const struct { const char *name, *flags; int needs; void (*take)(void); } variants[] = {
#ifdef CMHA_HAVE_AVX512
    {"avx512", TEXT(CMHA_HAVE_AVX512), FMA | AVX512F | AVX512DQ | AVX512BW | AVX512VL, take_avx512},
#endif
#ifdef CMHA_HAVE_AVX2
    {"avx2", TEXT(CMHA_HAVE_AVX2), AVX | FMA | AVX2, take_avx2},
#endif
#ifdef CMHA_HAVE_NEON
    {"neon", TEXT(CMHA_HAVE_NEON), NEON, take_neon},
#endif
    {"base", TEXT(CMHA_HAVE_BASE), 0, take_base},
};
#define N_VARIANTS (int)(sizeof variants / sizeof variants[0])

static int runs(int i) { return (features() & variants[i].needs) == variants[i].needs; }

const char *cmha_variant_name(int i) { return i < N_VARIANTS ? variants[i].name : NULL; }
const char *cmha_variant_flags(int i) { return i < N_VARIANTS ? variants[i].flags : NULL; }

int cmha_has_variant(const char *name) {
    for (int i = 0; i < N_VARIANTS; i++)
        if (!strcmp(variants[i].name, name)) return runs(i);
    return 0;
}

const char *cmha_dispatch(const char *name) {
    for (int i = 0; i < N_VARIANTS; i++)
        if ((!*name || !strcmp(variants[i].name, name)) && runs(i)) {
            variants[i].take();
            return variants[i].name;
        }
    return NULL;
}

/* ---------------------------------------------------------------------------------------------- the compiler */

const char *cmha_compiler(void) {
#if defined(__apple_build_version__)
    return "Apple clang " __clang_version__;
#elif defined(__clang__)
    return "clang " __clang_version__;
#elif defined(__GNUC__)
    return "gcc " __VERSION__;
#elif defined(_MSC_VER)
    return "MSVC " TEXT(_MSC_FULL_VER);
#else
    return "unknown";
#endif
}
