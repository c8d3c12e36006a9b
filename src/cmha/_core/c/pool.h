/*
A pool of 64-byte-aligned blocks, so that a training step takes no fresh pages from the system (they are dear, most of all
on a virtual machine). A freed block goes to the list of its size class and is handed out again; nothing is given back
until the system refuses more. Four classes per power of two. Large blocks ask for huge pages. Callers hold the GIL, or,
on a Python without one, take turns at a lock, which is never held while the system looks for memory.
*/
#ifndef CMHA_POOL_H
#define CMHA_POOL_H

#include <stdint.h>
#include <stdlib.h>
#if defined(_WIN32)
#include <malloc.h>
#elif defined(__linux__)
#include <sys/mman.h>
#endif

#define POOL_HUGE ((size_t)2 << 20)

#ifdef Py_GIL_DISABLED
static PyMutex pool_mutex;
#define POOL_LOCK() PyMutex_Lock(&pool_mutex)
#define POOL_UNLOCK() PyMutex_Unlock(&pool_mutex)
#else
#define POOL_LOCK() ((void)0)
#define POOL_UNLOCK() ((void)0)
#endif

typedef struct pool_block { struct pool_block *next; } pool_block;
typedef struct { size_t in_use, reserved, peak; } pool_statistics; /* bytes */

static pool_block *pool_lists[4 * 64];
static pool_statistics pool_stats;

/* Class of `bytes`, and the size its blocks have: the next of 4/4, 5/4, 6/4, 7/4 times a power of two. */
static inline int pool_class(size_t bytes, size_t *size) {
    size_t top = 256;
    int octave = 0;
    if (bytes <= 256) { *size = (bytes + 63) / 64 * 64; if (!*size) *size = 64; return (int)(*size / 64) - 1; }
    while (top * 2 < bytes) { top *= 2; octave++; }
    size_t quarter = top / 4, over = (bytes - top + quarter - 1) / quarter;
    *size = top + over * quarter;
    return 4 * (octave + 1) + (int)over - 1;
}

#ifdef _WIN32
static inline void *pool_system(size_t size) { return _aligned_malloc(size, 64); }
static inline void pool_system_free(void *block) { _aligned_free(block); } /* free() may not have it */
#else
static inline void *pool_system(size_t size) {
    void *block = NULL;
    if (posix_memalign(&block, size >= POOL_HUGE ? POOL_HUGE : 64, size)) return NULL;
#ifdef MADV_HUGEPAGE
    if (size >= POOL_HUGE) madvise(block, size, MADV_HUGEPAGE);
#endif
    return block;
}
static inline void pool_system_free(void *block) { free(block); }
#endif

/* Gives every free block back to the system. */
static inline void pool_trim(void) {
    POOL_LOCK();
    for (int i = 0; i < 4 * 64; i++)
        while (pool_lists[i]) { pool_block *block = pool_lists[i]; pool_lists[i] = block->next; pool_system_free(block); }
    pool_stats.reserved = pool_stats.in_use;
    POOL_UNLOCK();
}

#ifdef CMHA_SANITIZE /* exact sizes and no reuse, so that the sanitizer sees every overrun */
static inline void *pool_take(size_t bytes, size_t *size) {
    *size = bytes ? bytes : 1;
    return bytes > PTRDIFF_MAX / 2 ? NULL : malloc(*size);
}
static inline void pool_give(void *data, size_t size) { (void)size; free(data); }
#else
/* NULL when there is no memory. `size` receives what pool_give wants back. */
static inline void *pool_take(size_t bytes, size_t *size) {
    size_t reserved = 0;
    if (bytes > PTRDIFF_MAX / 2) return NULL;
    int i = pool_class(bytes, size);
    POOL_LOCK();
    pool_block *block = pool_lists[i];
    if (block) {
        pool_lists[i] = block->next;
    } else {
        POOL_UNLOCK();
        block = pool_system(*size);
        if (!block) { pool_trim(); block = pool_system(*size); }
        if (!block) return NULL;
        reserved = *size;
        POOL_LOCK();
    }
    pool_stats.reserved += reserved;
    pool_stats.in_use += *size;
    if (pool_stats.in_use > pool_stats.peak) pool_stats.peak = pool_stats.in_use;
    POOL_UNLOCK();
    return block;
}

static inline void pool_give(void *data, size_t size) {
    pool_block *block = data;
    size_t same;
    int i = pool_class(size, &same);
    POOL_LOCK();
    block->next = pool_lists[i];
    pool_lists[i] = block;
    pool_stats.in_use -= size;
    POOL_UNLOCK();
}
#endif

/* All three figures of one moment; with `anew` the peak begins again at what is in use. */
static inline pool_statistics pool_look(int anew) {
    POOL_LOCK();
    if (anew) pool_stats.peak = pool_stats.in_use;
    pool_statistics now = pool_stats;
    POOL_UNLOCK();
    return now;
}
#endif
