/*
The only file that names OpenMP (team.c runs what it marks). Without gcc's -fopenmp every block runs on one thread.

    CMHA_PARALLEL(parts, {
        ptrdiff_t begin, end;
        thread_share(rows, 1, &begin, &end);       // this part of `rows`, in whole units
        for (ptrdiff_t i = begin; i < end; i++) ...
    })

One part runs the same block without a region. Parts are whole outputs, or whole blocks of a sum (design: threads never
split the inside of a sum), so the number of parts changes no bit, nor does who runs one: thread_number() and
thread_count() are those of the part. Large work has a few parts for every thread, so that one that is held up by other
programs leaves its rest to the others. scratch_number(), below the number of parts, is the thread's own.
*/
#ifndef CMHA_PARALLEL_H
#define CMHA_PARALLEL_H

#include <stddef.h>

#ifdef _OPENMP
typedef struct { int number, count, member; } cmha_part_of;
extern _Thread_local cmha_part_of cmha_part __attribute__((visibility("hidden"))); /* {0, 1, 0} outside */

#define CMHA_PRAGMA(text) _Pragma(#text)
#define CMHA_PARALLEL(parts, ...)                                            \
    if ((parts) > 1) {                                                       \
        CMHA_PRAGMA(omp parallel num_threads(parts)) __VA_ARGS__             \
    } else __VA_ARGS__
void cmha_team_limit(int threads) __attribute__((visibility("hidden"))); /* how many may work on one region */
static inline int thread_number(void) { return cmha_part.number; }
static inline int thread_count(void) { return cmha_part.count; }
static inline int scratch_number(void) { return cmha_part.member; }
static inline int threads_available(void) { return 1; }
#else
#define CMHA_PARALLEL(parts, ...) __VA_ARGS__
static inline void cmha_team_limit(int threads) { (void)threads; }
static inline int thread_number(void) { return 0; }
static inline int thread_count(void) { return 1; }
static inline int scratch_number(void) { return 0; }
static inline int threads_available(void) { return 0; }
#endif

/* The next of items 0, 1, ... for whichever part comes first; `taken`, 0 before the block, is what all parts share. */
static inline ptrdiff_t take_item(ptrdiff_t *taken) { return __atomic_fetch_add(taken, 1, __ATOMIC_RELAXED); }

/* This part of `n` items, cut at multiples of `unit`. */
static inline void thread_share(ptrdiff_t n, ptrdiff_t unit, ptrdiff_t *begin, ptrdiff_t *end) {
    ptrdiff_t units = (n + unit - 1) / unit, count = thread_count(), number = thread_number();
    ptrdiff_t each = units / count, extra = units % count;
    ptrdiff_t first = number * each + (number < extra ? number : extra);
    ptrdiff_t last = first + each + (number < extra ? 1 : 0);
    *begin = first * unit < n ? first * unit : n;
    *end = last * unit < n ? last * unit : n;
}
#endif
