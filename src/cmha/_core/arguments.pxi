# Reading arguments: sizes, axes, dtypes, and the checks that every op shares.

cdef str short(object value):
    """A value from outside on one line of at most 80 characters."""
    return " ".join(str(value).split())[:80]


cdef Kind kind_of(object dtype) except *:
    if dtype not in KIND_NAMES:
        raise TypeError(f"[dtype] a tensor is float32, int64 or bool; got {short(dtype)!r}")
    return <Kind>(<object>KIND_NAMES).index(dtype)


cdef int read_shape(str op, object shape, Py_ssize_t *dims) except -1:
    """A tuple or list of sizes (or one int) into dims; -1 is left to the caller. Returns the number of axes."""
    cdef int nd = 0
    if not isinstance(shape, (tuple, list)):
        shape = (shape,)
    if len(shape) > MAX_NDIM:
        raise ValueError(f"[{op}] at most {MAX_NDIM} axes; got {len(shape)}")
    for n in shape:
        if type(n) is not int and (isinstance(n, bool) or not hasattr(n, "__index__")):
            raise TypeError(f"[{op}] sizes must be ints; got {short(n)!r} in {short(shape)}")
        try:
            dims[nd] = n
        except OverflowError:
            dims[nd] = -2
        except TypeError:                   # an array of several elements has an __index__ that fails
            raise TypeError(f"[{op}] sizes must be ints; got {short(n)!r} in {short(shape)}") from None
        if dims[nd] < -1:
            raise ValueError(f"[{op}] sizes must be 0 .. 2**63 - 1; got {short(n)} in {short(shape)}")
        nd += 1
    return nd


cdef Py_ssize_t read_axis(str op, object axis, int nd) except -1:
    cdef Py_ssize_t number
    if type(axis) is not int and (isinstance(axis, bool) or not hasattr(axis, "__index__")):
        raise TypeError(f"[{op}] an axis must be an int; got {short(axis)!r}")
    try:
        number = axis
    except OverflowError:
        number = PY_SSIZE_T_MAX
    except TypeError:                       # as above
        raise TypeError(f"[{op}] an axis must be an int; got {short(axis)!r}") from None
    if not -nd <= number < nd:
        raise ValueError(f"[{op}] axis out of range; got axis {short(axis)}, expected -{nd} .. {nd - 1}"
                         if nd else f"[{op}] an array without axes has no axis; got axis {short(axis)}")
    return number + nd if number < 0 else number


cdef int need(str op, str name, Array x, Kind kind, int nd=-1) except -1:
    """Kind and, when given, number of axes."""
    if x is None:
        raise TypeError(f"[{op}] {name} must be an array; got None")
    if x.kind != kind:
        raise TypeError(f"[{op}] {name} must be {KIND_NAMES[kind]}; got {KIND_NAMES[x.kind]}")
    if nd >= 0 and x.nd != nd:
        raise ValueError(f"[{op}] {name} must have {nd} axes; got shape {dims_tuple(x)}")
    return 0


cdef inline bint same_shape(Array a, Array b) noexcept:
    return a.nd == b.nd and memcmp(a.dims, b.dims, a.nd * sizeof(Py_ssize_t)) == 0


cdef int need_same_shape(str op, str a_name, Array a, str b_name, Array b) except -1:
    if not same_shape(a, b):
        raise ValueError(f"[{op}] shapes must be equal; got {a_name} {dims_tuple(a)}, {b_name} {dims_tuple(b)}")
    return 0
