/*
Words that Python threads share where there is no GIL: each is read, written and counted whole. No order is promised
between two of them: whoever hands an array to another thread does so through a lock or a queue of Python's.
*/
#ifndef CMHA_WORDS_H
#define CMHA_WORDS_H

#include <stdint.h>

static inline uint64_t word_read(const uint64_t *p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
static inline void word_write(uint64_t *p, uint64_t value) { __atomic_store_n(p, value, __ATOMIC_RELAXED); }
/* *p += 1, and what it is then. */
static inline uint64_t word_count(uint64_t *p) { return __atomic_add_fetch(p, 1, __ATOMIC_RELAXED); }
#endif
