/*
Two deliberate faults, each of which a sanitizer must stop: without them a green run under ASan and UBSan proves nothing.
In every other build they do nothing. The volatiles keep the compiler from seeing the fault, or throwing it away.
*/
#ifndef CMHA_CANARY_H
#define CMHA_CANARY_H

#include <limits.h>
#include <stdlib.h>

static inline int cmha_is_sanitized(void) {
#ifdef CMHA_SANITIZE
    return 1;
#else
    return 0;
#endif
}

/* Reads one float behind a block of four. */
static inline void cmha_canary_heap(void) {
#ifdef CMHA_SANITIZE
    float *volatile block = malloc(4 * sizeof(float));
    volatile int behind = 4;
    volatile float value = block ? block[behind] : 0;
    (void)value;
    free(block);
#endif
}

/* Adds one to the largest int. */
static inline void cmha_canary_overflow(void) {
#ifdef CMHA_SANITIZE
    volatile int largest = INT_MAX;
    largest = largest + 1;
#endif
}
#endif
