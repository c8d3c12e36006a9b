# cython: auto_pickle=False, autotestdict=False
# so that the module holds nothing but what _core.pyi names
"""The compiled core of cmha: arrays (shape, strides, views) and kernels on them. No gradients, no layers.

Each op below is the same four beats: check shapes, take memory, release the GIL, call the kernel.
"""

cimport cython
from cpython.buffer cimport (
    PyBUF_ANY_CONTIGUOUS, PyBUF_C_CONTIGUOUS, PyBUF_F_CONTIGUOUS, PyBUF_FORMAT, PyBUF_ND, PyBUF_STRIDES, PyBUF_WRITABLE,
    PyBuffer_IsContiguous, PyBuffer_Release, PyObject_GetBuffer,
)
from cpython.ref cimport Py_INCREF
from cpython.tuple cimport PyTuple_New, PyTuple_SET_ITEM
from libc.stdint cimport int64_t, uint8_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcmp, memcpy, memset


cdef extern from *:
    Py_ssize_t PY_SSIZE_T_MAX

cdef extern from "pool.h" nogil:
    ctypedef struct pool_statistics:
        size_t in_use, reserved, peak
    pool_statistics pool_look(int anew) noexcept
    void *pool_take(size_t bytes, size_t *size) noexcept
    void pool_give(void *data, size_t size) noexcept

cdef extern from "words.h" nogil:
    Py_ssize_t word_read(const Py_ssize_t *p) noexcept
    void word_write(Py_ssize_t *p, Py_ssize_t value) noexcept
    Py_ssize_t word_count(Py_ssize_t *p) noexcept

cdef extern from "dispatch.h" nogil:
    const char *cmha_dispatch(const char *name) noexcept
    int cmha_has_variant(const char *name) noexcept
    const char *cmha_variant_name(int i) noexcept
    const char *cmha_variant_flags(int i) noexcept
    const char *cmha_cpu_feature(int i) noexcept
    const char *cmha_compiler() noexcept
    void cmha_copy(void *y, const void *x, Py_ssize_t itemsize, int ndim, const Py_ssize_t *shape,
                   const Py_ssize_t *y_strides, const Py_ssize_t *x_strides, int threads) noexcept
    void cmha_int64_to_float(float *y, const int64_t *x, Py_ssize_t n, int threads) noexcept
    void cmha_bool_to_float(float *y, const uint8_t *x, Py_ssize_t n, int threads) noexcept


include "canary.pxi"
include "threads.pxi"
include "array.pxi"
include "arguments.pxi"
include "views.pxi"
include "lending.pxi"
include "binary.pxi"
include "unary.pxi"
include "gelu.pxi"
include "reduce.pxi"
include "softmax.pxi"
include "cross_entropy.pxi"
include "matmul.pxi"
include "layer_norm.pxi"
include "embedding.pxi"
include "dropout.pxi"
include "adamw.pxi"
include "attention.pxi"
