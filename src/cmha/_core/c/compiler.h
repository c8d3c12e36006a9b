/*
The only file that knows which compiler this is: what C11 has no word for, said to gcc and clang, and to MSVC.

    CMHA_PRAGMA(text)  a pragma out of a macro
    INLINE, NOINLINE   static functions that are always, or never, copied into their callers; no warning when unused
    HIDDEN             seen by the files of this module, not by others
    MAY_ALIAS          a type whose objects may be read as any other
    UNROLL(n)          before a loop: n rounds at a time, all of them where the compiler knows that there are fewer
    PREFETCH(p)        a hint that *p will be written soon
    PAUSE()            in a loop that waits: leaves the core to its other hardware thread
*/
#ifndef CMHA_COMPILER_H
#define CMHA_COMPILER_H

#include <stddef.h>
#include <stdint.h>

#if defined(__x86_64__) || defined(__i386__) || defined(_M_X64) || defined(_M_IX86)
#define CMHA_X86
#endif

#ifdef _MSC_VER /* -------------------------------------------------------------------------------------- MSVC */
#include <intrin.h>
#ifndef __clang__
#pragma fp_contract(off) /* before 2022 the default was on, and fused where nobody asked for it */
#endif
#define CMHA_PRAGMA(...) __pragma(__VA_ARGS__)
#define INLINE static __forceinline
#define NOINLINE static __declspec(noinline)
#define HIDDEN
#define MAY_ALIAS
#define UNROLL(n)
#define PREFETCH(p) ((void)0)
#define PAUSE() ((void)0) /* nothing waits in a loop there: OpenMP has its own team */

/* *p += 1, and what it was before. */
INLINE ptrdiff_t atomic_take(ptrdiff_t *p) { return (ptrdiff_t)_InterlockedExchangeAdd64((volatile __int64 *)p, 1); }

/* The highest and the lowest bit of a number that is not 0. */
INLINE int highest_bit(uint64_t x) { unsigned long i; _BitScanReverse64(&i, x); return (int)i; }
INLINE int lowest_bit(uint64_t x) { unsigned long i; _BitScanForward64(&i, x); return (int)i; }

#ifdef CMHA_X86
/* CPUID: eax, ebx, ecx, edx of a leaf; zeros of one that this processor does not have. */
INLINE void cpu_id(unsigned leaf, unsigned part, unsigned r[4]) {
    int highest[4], found[4] = {0};
    __cpuid(highest, 0);
    if (leaf <= (unsigned)highest[0]) __cpuidex(found, (int)leaf, (int)part);
    for (int i = 0; i < 4; i++) r[i] = (unsigned)found[i];
}
/* XCR0: the registers that the operating system saves. Only where CPUID has OSXSAVE. */
INLINE uint64_t cpu_saved_registers(void) { return _xgetbv(0); }
#endif

#else /* --------------------------------------------------------------------------------------- gcc and clang */
#ifdef CMHA_SANITIZE /* with the sanitizers' checks in every copy the compiler would take minutes over one file */
#define INLINE static inline __attribute__((unused))
#else
#define INLINE static inline __attribute__((always_inline, unused))
#endif
#define CMHA_PRAGMA(...) _Pragma(#__VA_ARGS__)
#define NOINLINE static __attribute__((noinline, unused))
#define HIDDEN __attribute__((visibility("hidden")))
#define MAY_ALIAS __attribute__((may_alias))
#ifdef __clang__
#define UNROLL(n) CMHA_PRAGMA(unroll n)
#else
#define UNROLL(n) CMHA_PRAGMA(GCC unroll n)
#endif
#define PREFETCH(p) __builtin_prefetch(p, 1)
#if defined(CMHA_X86)
#define PAUSE() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define PAUSE() __asm__ volatile("yield")
#else
#define PAUSE() ((void)0)
#endif

INLINE ptrdiff_t atomic_take(ptrdiff_t *p) { return __atomic_fetch_add(p, 1, __ATOMIC_RELAXED); }
INLINE int highest_bit(uint64_t x) { return 63 - __builtin_clzll(x); }
INLINE int lowest_bit(uint64_t x) { return __builtin_ctzll(x); }

#ifdef CMHA_X86
#include <cpuid.h>
INLINE void cpu_id(unsigned leaf, unsigned part, unsigned r[4]) {
    if (!__get_cpuid_count(leaf, part, &r[0], &r[1], &r[2], &r[3])) r[0] = r[1] = r[2] = r[3] = 0;
}
INLINE uint64_t cpu_saved_registers(void) { /* by hand: the intrinsic wants -mxsave */
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (uint64_t)high << 32 | low;
}
#endif
#endif
#endif
