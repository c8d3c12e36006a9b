/* What Cython calls: one pointer per kernel, cmha_<name>, set once by cmha_dispatch. And what this build is. */
#ifndef CMHA_DISPATCH_H
#define CMHA_DISPATCH_H

#include <stddef.h>
#include <stdint.h>

#define KERNEL(name, args) extern void(*cmha_##name) args;
#include "kernels.h"
#undef KERNEL

/* Choose the variant `name` ("base", "avx2", ...), or the best one when name is empty. Returns the name of the one
   chosen, NULL when this processor or this build does not have it (nothing changes then). */
const char *cmha_dispatch(const char *name);

/* Does this processor (and the system below it) run that variant, and was it built? */
int cmha_has_variant(const char *name);

/* The variants that were built, best first, and their compiler flags; the features of this processor that variants ask
   for. NULL behind the last one. */
const char *cmha_variant_name(int i);
const char *cmha_variant_flags(int i);
const char *cmha_cpu_feature(int i);

/* Name and version. */
const char *cmha_compiler(void);
#endif
