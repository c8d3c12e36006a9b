# Storage and Array: a row-major tensor is a block of memory, an offset, a shape and strides (in elements).
# permute, expand and slices make new strides over the same block; reshape copies only when no strides can express it.

cdef enum:
    MAX_NDIM = 8

ctypedef int Kind
cdef enum:
    FLOAT, INT64, BOOL

cdef tuple KIND_NAMES = ("float32", "int64", "bool")
cdef Py_ssize_t[3] KIND_SIZES = [4, 8, 1]
cdef const char *KIND_FORMATS = "f\0q\0?"               # of the struct module, two bytes each


@cython.freelist(64)
cdef class Storage:
    """A block of the pool, or memory of another object (shared: it may change behind our back)."""
    cdef char *data
    cdef size_t nbytes
    cdef Py_buffer foreign
    cdef bint shared
    cdef Py_ssize_t version             # the value of `changes` when the memory was last written in place
    cdef int loans                      # how often it is lent to who may write it (lending.pxi)
    cdef uint64_t seal                  # checksum of the memory while it is lent

    def __dealloc__(self):
        if self.shared:
            PyBuffer_Release(&self.foreign)
        elif self.data != NULL:
            pool_give(self.data, self.nbytes)


cdef Py_ssize_t changes = 0             # in-place writes so far; backward compares it with Storage.version


cdef inline void mark_changed(Storage storage) noexcept:
    """The memory was written in place. Every change has a number of its own, whatever other threads do meanwhile."""
    word_write(&storage.version, word_count(&changes))


@cython.freelist(64)
cdef class Array:
    """Row-major n-dimensional array of float32, int64 or bool on memory of the core."""
    cdef Storage storage
    cdef char *data                     # of the first element
    cdef Kind kind
    cdef int nd
    cdef Py_ssize_t length              # number of elements
    cdef Py_ssize_t[MAX_NDIM] dims
    cdef Py_ssize_t[MAX_NDIM] steps     # strides, in elements

    @property
    def shape(self):
        return dims_tuple(self)

    @property
    def strides(self):
        """In elements, not bytes."""
        return sizes_tuple(self.steps, self.nd)

    @property
    def ndim(self):
        return self.nd

    @property
    def size(self):
        return self.length

    @property
    def dtype(self):
        return KIND_NAMES[self.kind]

    @property
    def nbytes(self):
        return self.length * KIND_SIZES[self.kind]

    @property
    def shared(self):
        """True for memory that others may write: who keeps values for later must copy them."""
        return self.storage.shared or self.storage.loans > 0

    @property
    def version(self):
        """Number of the last in-place write to this memory (see `change_count()`)."""
        if self.storage.loans > 0:
            look_for_writes(self.storage)
        return word_read(&self.storage.version)

    def bump(self):
        """Say that this memory was written in place."""
        mark_changed(self.storage)

    def same_storage(self, Array other not None):
        return self.storage is other.storage

    def is_contiguous(self):
        return is_packed(self)

    def contiguous(self):
        """Itself when already row-major and dense, else a copy."""
        return packed(self)

    def item(self):
        if self.length != 1:
            raise ValueError(f"[item] only an array of one element has an item; got shape {self.shape}")
        if self.kind == FLOAT:
            return (<float *>self.data)[0]
        return (<int64_t *>self.data)[0] if self.kind == INT64 else bool(self.data[0])

    def __len__(self):
        if self.nd == 0:
            raise TypeError("[len] an array without axes has no length; got shape ()")
        return self.dims[0]

    def reshape(self, shape):
        return reshape(self, shape)

    def permute(self, axes):
        return permute(self, axes)

    def expand(self, shape):
        return expand(self, shape)

    def __getitem__(self, index):
        return index_view(self, index)

    def __deepcopy__(self, memo):
        return duplicate(self)

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        fill_buffer(self, buffer, flags)

    def __releasebuffer__(self, Py_buffer *buffer):
        free(buffer.internal)


# ------------------------------------------------------------------------------------------------- taking memory

cdef tuple sizes_tuple(const Py_ssize_t *sizes, int n):
    cdef tuple out = PyTuple_New(n)
    cdef int i
    for i in range(n):
        size = <object>sizes[i]
        Py_INCREF(size)                     # PyTuple_SET_ITEM takes a reference over
        PyTuple_SET_ITEM(out, i, size)
    return out


cdef inline tuple dims_tuple(Array x):
    return sizes_tuple(x.dims, x.nd)


cdef str human_bytes(object n):
    for unit in ("bytes", "KiB", "MiB", "GiB", "TiB"):
        if n < 1024 or unit == "TiB":
            return f"{n} bytes" if unit == "bytes" else f"{n:.2f} {unit}"
        n /= 1024


cdef Array new_array(Kind kind, int nd, const Py_ssize_t *dims):
    """Uninitialised, contiguous. The only place where an Array gets memory of the pool."""
    cdef Array out = Array.__new__(Array)
    cdef Storage storage = Storage.__new__(Storage)
    cdef Py_ssize_t length = 1, i
    cdef bint too_large = False, empty = False
    for i in range(nd):                     # an empty array may have any sizes whose strides do not overflow
        empty |= dims[i] == 0
    for i in range(nd - 1, -1, -1):
        out.dims[i] = dims[i]
        out.steps[i] = length
        too_large |= dims[i] > 0 and length > PY_SSIZE_T_MAX // 8 // dims[i]
        if not too_large and dims[i] > 0:
            length *= dims[i]
    out.kind, out.nd, out.length, out.storage = kind, nd, (0 if empty else length), storage
    if not too_large:
        storage.data = <char *>pool_take(<size_t>(out.length * KIND_SIZES[kind]), &storage.nbytes)
    elif empty:
        raise ValueError(f"[array] sizes beside a 0 must multiply to less than 2**60; got {sizes_tuple(dims, nd)}")
    if storage.data == NULL:
        shape = sizes_tuple(dims, nd)
        needed = KIND_SIZES[kind]
        for n in shape:
            needed *= n
        raise MemoryError(f"cannot allocate {human_bytes(needed)} for an array of shape {shape}, "
                          f"dtype {KIND_NAMES[kind]}")
    out.data = storage.data
    return out


cdef inline Array like(Array x):
    """Uninitialised float32 of the same shape, contiguous."""
    return new_array(FLOAT, x.nd, x.dims)


cdef inline float *floats(Array x) noexcept nogil:
    return <float *>x.data


cdef inline Array new_vector(Kind kind, Py_ssize_t n):
    return new_array(kind, 1, &n)


cdef inline Array new_matrix(Kind kind, Py_ssize_t m, Py_ssize_t n):
    cdef Py_ssize_t[2] dims = [m, n]
    return new_array(kind, 2, dims)


cdef inline Array alias(Array x):
    """A second Array on the same memory, same shape and strides; the caller then changes its fields."""
    cdef Array out = Array.__new__(Array)
    out.storage, out.data, out.kind, out.nd, out.length = x.storage, x.data, x.kind, x.nd, x.length
    memcpy(out.dims, x.dims, sizeof(x.dims))
    memcpy(out.steps, x.steps, sizeof(x.steps))
    return out


cdef inline bint is_packed(Array x) noexcept:
    cdef Py_ssize_t expected = 1, i
    if x.length == 0:
        return True
    for i in range(x.nd - 1, -1, -1):
        if x.dims[i] != 1 and x.steps[i] != expected:
            return False
        expected *= x.dims[i]
    return True


cdef Array packed(Array x):
    return x if is_packed(x) else duplicate(x)


cdef Array duplicate(Array x):
    cdef Array y = new_array(x.kind, x.nd, x.dims)
    copy_elements(y, x)
    return y


cdef void copy_elements(Array y, Array x):
    """x into y; same shape and kind."""
    cdef int threads = gate(x.length)
    with nogil:
        cmha_copy(y.data, x.data, KIND_SIZES[x.kind], x.nd, x.dims, y.steps, x.steps, threads)


cdef Array as_float(Array x):
    """float32 itself; int64 and bool converted."""
    if x.kind == FLOAT:
        return x
    cdef Array source = packed(x), y = like(x)
    cdef int threads = gate(x.length)
    with nogil:
        if source.kind == INT64:
            cmha_int64_to_float(floats(y), <int64_t *>source.data, source.length, threads)
        else:
            cmha_bool_to_float(floats(y), <uint8_t *>source.data, source.length, threads)
    return y


# ------------------------------------------------------------------------------------------------- making arrays

def empty(shape, dtype="float32", str op="empty"):
    """Uninitialised array. op: in whose name sizes are refused."""
    cdef Py_ssize_t[MAX_NDIM] dims
    cdef int nd = read_shape(op, shape, dims), i
    for i in range(nd):
        if dims[i] < 0:
            raise ValueError(f"[{op}] sizes must not be negative; got {short(shape)}")
    return new_array(kind_of(dtype), nd, dims)


def full(shape, value, dtype="float32", str op="full"):
    cdef Array out = empty(shape, dtype, op)
    cdef Py_ssize_t i
    cdef float f
    cdef int64_t n
    if out.kind == FLOAT:
        f = value
        for i in range(out.length):
            (<float *>out.data)[i] = f
    elif out.kind == INT64:
        n = value
        for i in range(out.length):
            (<int64_t *>out.data)[i] = n
    else:
        memset(out.data, 1 if value else 0, out.length)
    return out


def from_buffer(obj):
    """An array on the memory of `obj` (buffer protocol): native float32, int64 or bool, aligned. Marked as shared."""
    cdef Array out = Array.__new__(Array)
    cdef Storage storage = Storage.__new__(Storage)
    cdef Py_ssize_t size, i
    PyObject_GetBuffer(obj, &storage.foreign, PyBUF_FORMAT | PyBUF_STRIDES)
    storage.shared, storage.data = True, <char *>storage.foreign.buf
    cdef Py_buffer *b = &storage.foreign
    cdef str form = b.format.decode()
    if form not in ("f", "l", "q", "?") or b.ndim > MAX_NDIM:
        raise TypeError(f"[from_buffer] float32, int64 or bool with at most {MAX_NDIM} axes; "
                        f"got format {form!r}, {b.ndim} axes")
    out.kind = FLOAT if form == "f" else BOOL if form == "?" else INT64
    size = KIND_SIZES[out.kind]
    if b.itemsize != size or <size_t>b.buf % <size_t>size:
        raise TypeError(f"[from_buffer] elements must be aligned and {size} bytes wide; got itemsize {b.itemsize}")
    out.storage, out.data, out.nd, out.length = storage, storage.data, b.ndim, 1
    for i in range(b.ndim):
        if b.strides[i] % size and b.shape[i] > 1:
            raise TypeError(f"[from_buffer] strides must be multiples of {size} bytes; got {b.strides[i]}")
        out.dims[i], out.steps[i] = b.shape[i], b.strides[i] // size
        out.length *= b.shape[i]
    return out


def copy(Array x not None):
    """A contiguous copy on memory of its own."""
    return duplicate(x)


def assign(Array target not None, Array source not None):
    """Write source into target's memory (broadcasting source), in place; counts as a change of target."""
    if target.storage.shared:
        raise ValueError("[assign] memory from outside is read-only; got a shared target")
    if target.kind != source.kind:
        raise TypeError(f"[assign] dtypes must be equal; got {target.dtype}, {source.dtype}")
    copy_elements(target, source if same_shape(source, target) else expand(source, target.shape))
    target.bump()


def to_float(Array x not None):
    """float32 itself, int64 and bool converted."""
    return as_float(x)


def change_count():
    """In-place writes so far, over all arrays (see Array.version)."""
    return word_read(&changes)


def memory_stats():
    """Bytes of the core's pool: `allocated` by arrays now, the `peak` of that so far, `reserved` from the system.

    Blocks are reserved for good, so that a training step asks the system for none; `reset_peak_memory_stats()` starts
    the peak anew.
    """
    cdef pool_statistics now = pool_look(False)
    return {"allocated": now.in_use, "peak": now.peak, "reserved": now.reserved}


def reset_peak_memory_stats():
    """The peak of memory_stats() becomes what is allocated now."""
    pool_look(True)
