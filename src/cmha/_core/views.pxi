# Views: new shape and strides over the same memory. Only reshape may have to copy.


def reshape(Array x not None, shape):
    """The same elements in row-major order under another shape; one size may be -1. A view where strides allow it."""
    cdef Py_ssize_t[MAX_NDIM] dims
    cdef Py_ssize_t known = 1, i, unknown = -1
    cdef int nd = read_shape("reshape", shape, dims)
    for i in range(nd):
        if dims[i] >= 0:
            if dims[i] and known > PY_SSIZE_T_MAX // dims[i]:
                raise ValueError(f"[reshape] sizes must multiply to {x.length}; got {x.shape} -> {tuple(shape)}")
            known *= dims[i]
        elif unknown >= 0:
            raise ValueError(f"[reshape] only one size may be -1; got {x.shape} -> {tuple(shape)}")
        else:
            unknown = i
    if unknown >= 0:
        if known == 0:
            raise ValueError(f"[reshape] -1 has no unique size beside a 0; got {x.shape} -> {tuple(shape)}")
        dims[unknown] = x.length // known
        known *= dims[unknown]
    if known != x.length:
        wanted = tuple(shape) if isinstance(shape, (tuple, list)) else (shape,)
        raise ValueError(f"[reshape] the number of elements must stay; got {x.shape} -> {wanted}: "
                         f"{x.length} != {known}")
    cdef Array out = alias(x)
    out.nd = nd
    memcpy(out.dims, dims, sizeof(dims))
    if not reshape_strides(x, out):
        out = duplicate(x)
        out.nd = nd
        memcpy(out.dims, dims, sizeof(dims))
        pack_strides(out)
    return out


cdef void pack_strides(Array out) noexcept:
    cdef Py_ssize_t step = 1, i
    for i in range(out.nd - 1, -1, -1):
        out.steps[i] = step
        step *= max(out.dims[i], 1)


cdef bint reshape_strides(Array x, Array out) noexcept:
    """Strides of `out` (same memory as x, new dims), or False when no strides can express it.

    Walks both shapes in groups of axes with equal products; a group is a view when its old axes are dense among
    themselves (stride of one = size of the next times its stride).
    """
    cdef Py_ssize_t[MAX_NDIM] dims
    cdef Py_ssize_t[MAX_NDIM] steps
    cdef int nd = 0, i, j = 0, first, start, k
    cdef Py_ssize_t old, new
    if x.length == 0:
        pack_strides(out)
        return True
    for i in range(x.nd):
        if x.dims[i] != 1:
            dims[nd], steps[nd] = x.dims[i], x.steps[i]
            nd += 1
    i = 0
    while i < nd:
        first, start, old, new = i, j, dims[i], 1
        i += 1
        while new != old:
            if new < old:
                new *= out.dims[j]
                j += 1
            else:
                old *= dims[i]
                i += 1
        for k in range(first, i - 1):
            if steps[k] != dims[k + 1] * steps[k + 1]:
                return False
        old = steps[i - 1]
        for k in range(j - 1, start - 1, -1):
            out.steps[k] = old
            old *= out.dims[k]
    for k in range(j, out.nd):              # only axes of size 1 are left
        out.steps[k] = 1
    return True


def permute(Array x not None, axes):
    """Axes in another order: always a view."""
    cdef Array out = alias(x)
    cdef bint[MAX_NDIM] seen
    cdef Py_ssize_t axis
    cdef int i = 0
    memset(seen, 0, sizeof(seen))
    if not isinstance(axes, (tuple, list)) or len(axes) != x.nd:
        raise ValueError(f"[permute] needs each of the {x.nd} axes once; got {short(axes)} for shape {x.shape}")
    for given in axes:
        axis = read_axis("permute", given, x.nd)
        if seen[axis]:
            raise ValueError(f"[permute] needs each of the {x.nd} axes once; got {tuple(axes)} for shape {x.shape}")
        seen[axis] = True
        out.dims[i], out.steps[i] = x.dims[axis], x.steps[axis]
        i += 1
    return out


def expand(Array x not None, shape):
    """Broadcast axes of size 1 (and new leading axes) to `shape` with stride 0: a view. -1 keeps a size."""
    cdef Py_ssize_t[MAX_NDIM] dims
    cdef int nd = read_shape("expand", shape, dims), lead = nd - x.nd, i
    cdef Array out = alias(x)
    cdef bint fits = lead >= 0
    out.nd, out.length = nd, 1
    for i in range(nd):
        if i < lead:
            fits &= dims[i] >= 0
            out.dims[i], out.steps[i] = dims[i], 0
        elif fits and (dims[i] == x.dims[i - lead] or dims[i] == -1):
            out.dims[i], out.steps[i] = x.dims[i - lead], x.steps[i - lead]
        elif fits and x.dims[i - lead] == 1:
            out.dims[i], out.steps[i] = dims[i], 0
        else:
            fits = False
        if not fits:
            break
        if out.dims[i] and out.length > PY_SSIZE_T_MAX // 8 // out.dims[i]:
            raise ValueError(f"[expand] too many elements; got {x.shape} -> {tuple(shape)}")
        out.length *= out.dims[i]
    if not fits:
        wanted = tuple(shape) if isinstance(shape, (tuple, list)) else (shape,)
        raise ValueError(f"[expand] only axes of size 1 and new leading axes can grow; got {x.shape} -> {wanted}")
    return out


def index_view(Array x not None, index):
    """x[index] for ints, slices, None and ...: always a view."""
    cdef Array out = alias(x)
    cdef Py_ssize_t start, stop, step, count, i
    cdef int axis = 0, nd = 0, used = 0
    cdef bint dots = False
    items = index if isinstance(index, tuple) else (index,)
    for item in items:
        if item is Ellipsis:
            if dots:
                raise IndexError(f"[index] only one ... is allowed; got {short(index)}")
            dots = True
        elif item is not None:
            used += 1
            if type(item) is int or isinstance(item, slice):
                continue
            if (isinstance(item, bool) or not hasattr(item, "__index__")
                    or getattr(item, "ndim", 0)):
                raise TypeError(f"[index] an index is an int, a slice, None or ...; got {type(item).__name__}. "
                                "For rows by id use Embedding, for a mask use where or masked_fill")
    if used > x.nd:
        raise IndexError(f"[index] too many indices; got {used} for shape {x.shape}")
    if not dots:
        items = items + (Ellipsis,)
    for item in items:
        if item is Ellipsis:
            count = x.nd - used
        else:
            count = 1
        for i in range(count):
            if not (isinstance(item, slice) or item is None or item is Ellipsis):
                position = item.__index__()
                if not -x.dims[axis] <= position < x.dims[axis]:
                    raise IndexError(f"[index] out of range; got {short(position)} for axis {axis} of "
                                     f"shape {x.shape}")
                out.data += (position % x.dims[axis]) * x.steps[axis] * KIND_SIZES[x.kind]
                axis += 1
                continue
            if nd == MAX_NDIM:
                raise ValueError(f"[index] at most {MAX_NDIM} axes; got {short(index)} for shape {x.shape}")
            if item is None:
                out.dims[nd], out.steps[nd] = 1, 0
            elif item is Ellipsis:
                out.dims[nd], out.steps[nd] = x.dims[axis], x.steps[axis]
                axis += 1
            else:
                try:
                    start, stop, wide_step = item.indices(x.dims[axis])
                    step = max(min(wide_step, PY_SSIZE_T_MAX), -PY_SSIZE_T_MAX)     # reaches the first element only
                except (TypeError, ValueError) as error:        # a step of 0, a bound that is no int
                    raise type(error)(f"[index] {error}; got {short(item)}") from None
                count_of = len(range(start, stop, step))
                out.dims[nd] = count_of
                out.steps[nd] = x.steps[axis] * step if count_of > 1 else x.steps[axis]
                if count_of:
                    out.data += start * x.steps[axis] * KIND_SIZES[x.kind]
                axis += 1
            nd += 1
    out.nd, out.length = nd, 1
    for i in range(nd):
        out.length *= out.dims[i]
    return out


cdef int fill_buffer(Array x, Py_buffer *buffer, int flags) except -1:
    """Read-only view for the buffer protocol; NumPy reads it without a copy. Who asks for memory in one order, or does
    not ask for strides, is refused where x lies otherwise: it would read other elements, or past the end."""
    cdef bint strided = flags & PyBUF_STRIDES == PyBUF_STRIDES
    cdef char order = 0                 # C, F or A (either of them); 0: any strides will do
    cdef int i
    if flags & PyBUF_WRITABLE:
        raise BufferError("[buffer] the memory of a tensor is read-only from outside")
    cdef Py_ssize_t *byte_steps = <Py_ssize_t *>malloc((x.nd + 1) * sizeof(Py_ssize_t))
    if byte_steps == NULL:
        raise MemoryError("cannot allocate the strides of a buffer")
    for i in range(x.nd):
        byte_steps[i] = x.steps[i] * KIND_SIZES[x.kind]
    buffer.buf, buffer.len, buffer.readonly = x.data, x.length * KIND_SIZES[x.kind], 1
    buffer.itemsize, buffer.format = KIND_SIZES[x.kind], NULL
    if flags & PyBUF_FORMAT:
        buffer.format = <char *>KIND_FORMATS + 2 * x.kind
    buffer.ndim, buffer.shape, buffer.strides = x.nd, x.dims, byte_steps
    buffer.suboffsets, buffer.internal = NULL, byte_steps
    if not strided or flags & PyBUF_C_CONTIGUOUS == PyBUF_C_CONTIGUOUS:
        order = c'C'
    elif flags & PyBUF_F_CONTIGUOUS == PyBUF_F_CONTIGUOUS:
        order = c'F'
    elif flags & PyBUF_ANY_CONTIGUOUS == PyBUF_ANY_CONTIGUOUS:
        order = c'A'
    if order and not PyBuffer_IsContiguous(buffer, order):
        free(byte_steps)
        rule = {b"C": "in row-major order", b"F": "in column-major order", b"A": "without gaps"}[bytes([order])]
        raise BufferError(f"[buffer] this reader needs memory {rule}; got strides {x.strides}; call contiguous() first")
    if not strided:
        buffer.strides = NULL
    if not flags & PyBUF_ND:  # flat bytes
        buffer.ndim, buffer.shape = 1, NULL
    buffer.obj = x
    return 0
