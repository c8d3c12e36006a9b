/*
The only file that names OpenMP. It is used for its pragma alone: the compiler cuts a block out into a function.

    CMHA_PARALLEL(parts, {
        ptrdiff_t begin, end;
        thread_share(rows, 1, &begin, &end);       // this part of `rows`, in whole units
        for (ptrdiff_t i = begin; i < end; i++) ...
    })

Who runs the block, and how often (threads_kind):

    gcc, clang         the team of team.c, once for each of `parts`, of which there may be more than threads
    MSVC               OpenMP's own (vcomp), once in every thread that came, at most `parts` and perhaps fewer
    neither            the caller, once: setup.py defines CMHA_OPENMP where the compiler knows the pragma

One part runs the same block without a region. Parts are whole outputs, or whole blocks of a sum
(docs/order-of-sums.md: threads never split the inside of a sum), so the number of parts changes no bit, nor does who
runs one: thread_number() and thread_count() are those of the part, asked inside the block. Large work has parts_per_thread() parts for every thread,
so that one that is held up by other programs leaves its rest to the others. scratch_number(), below the number of
parts, is the thread's own.
*/
#ifndef CMHA_PARALLEL_H
#define CMHA_PARALLEL_H

#include "compiler.h"

#ifdef CMHA_OPENMP
#define CMHA_PARALLEL(parts, ...)                                            \
    if ((parts) > 1) {                                                       \
        CMHA_PRAGMA(omp parallel num_threads(parts)) __VA_ARGS__             \
    } else __VA_ARGS__
#else
#define CMHA_PARALLEL(parts, ...) { (void)(parts); __VA_ARGS__ }
#endif

#if defined(CMHA_OPENMP) && !defined(_WIN32)
#define CMHA_OWN_TEAM
typedef struct { int number, count, member; } cmha_part_of;
extern _Thread_local cmha_part_of cmha_part HIDDEN; /* {0, 1, 0} outside */
void cmha_team_limit(int threads) HIDDEN;           /* how many may work on one region */
INLINE int thread_number(void) { return cmha_part.number; }
INLINE int thread_count(void) { return cmha_part.count; }
INLINE int scratch_number(void) { return cmha_part.member; }
INLINE int parts_per_thread(void) { return 4; }
INLINE const char *threads_kind(void) { return "own team (OpenMP pragma)"; }
#elif defined(CMHA_OPENMP)
#include <omp.h>
INLINE void cmha_team_limit(int threads) { (void)threads; } /* the number of parts is the limit */
INLINE int thread_number(void) { return omp_get_thread_num(); }
INLINE int thread_count(void) { return omp_get_num_threads(); }
INLINE int scratch_number(void) { return omp_get_thread_num(); }
INLINE int parts_per_thread(void) { return 1; }
INLINE const char *threads_kind(void) { return "OpenMP (vcomp)"; }
#else
INLINE void cmha_team_limit(int threads) { (void)threads; }
INLINE int thread_number(void) { return 0; }
INLINE int thread_count(void) { return 1; }
INLINE int scratch_number(void) { return 0; }
INLINE int parts_per_thread(void) { return 1; }
INLINE const char *threads_kind(void) { return "none"; }
#endif

/* The next of items 0, 1, ... for whichever part comes first; `taken`, 0 before the block, is what all parts share. */
INLINE ptrdiff_t take_item(ptrdiff_t *taken) { return atomic_take(taken); }

/* This part of `n` items, cut at multiples of `unit`. */
INLINE void thread_share(ptrdiff_t n, ptrdiff_t unit, ptrdiff_t *begin, ptrdiff_t *end) {
    ptrdiff_t units = (n + unit - 1) / unit, count = thread_count(), number = thread_number();
    ptrdiff_t each = units / count, extra = units % count;
    ptrdiff_t first = number * each + (number < extra ? number : extra);
    ptrdiff_t last = first + each + (number < extra ? 1 : 0);
    *begin = first * unit < n ? first * unit : n;
    *end = last * unit < n ? last * unit : n;
}
#endif
