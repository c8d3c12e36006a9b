/*
Words that Python threads share where there is no GIL: each is read, written and counted whole, two of them in no order.
Whoever hands an array to another thread does so through a lock or a queue of Python's, which order everything.
*/
#ifndef CMHA_WORDS_H
#define CMHA_WORDS_H

#include "compiler.h"

INLINE ptrdiff_t word_read(const ptrdiff_t *p) { return *(const volatile ptrdiff_t *)p; }
INLINE void word_write(ptrdiff_t *p, ptrdiff_t value) { *(volatile ptrdiff_t *)p = value; }
/* *p += 1, and what it is then. */
INLINE ptrdiff_t word_count(ptrdiff_t *p) { return atomic_take(p) + 1; }
#endif
