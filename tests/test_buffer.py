"""The buffer protocol, asked as C code asks: what is granted is what NumPy grants for the same view."""

import ctypes
import hashlib

import pytest

import cmha

from .checking import counting


class Buffer(ctypes.Structure):
    """Py_buffer."""

    _fields_ = [
        ("buf", ctypes.c_void_p), ("obj", ctypes.py_object), ("len", ctypes.c_ssize_t), ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int), ("ndim", ctypes.c_int), ("format", ctypes.c_char_p),
        ("shape", ctypes.POINTER(ctypes.c_ssize_t)), ("strides", ctypes.POINTER(ctypes.c_ssize_t)),
        ("suboffsets", ctypes.c_void_p), ("internal", ctypes.c_void_p),
    ]  # fmt: skip


FORMAT, ND, STRIDES = 0x4, 0x8, 0x18
REQUESTS = {"C": 0x20 | STRIDES, "F": 0x40 | STRIDES, "any": 0x80 | STRIDES, "strides": STRIDES, "shape": ND, "flat": 0}
VIEWS = {
    "whole": lambda x: x, "transposed": lambda x: x.T, "a column": lambda x: x[:, 1:2],
    "every second": lambda x: x[:, ::2],
    "backwards": lambda x: x[::-1], "expanded": lambda x: x[:1].expand(50, 4), "one": lambda x: x[0, 0],
    "nothing": lambda x: x[:0, ::2], "a row": lambda x: x[1],
}  # fmt: skip


def granted(source, flags):
    """What a reader in C is given, or None; released again."""
    buffer = Buffer()
    try:
        ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(source), ctypes.byref(buffer), flags)
    except (BufferError, ValueError):  # the second is NumPy's
        return None
    lists = [list(numbers[: buffer.ndim]) if numbers else None for numbers in (buffer.shape, buffer.strides)]
    found = buffer.buf, buffer.len, buffer.itemsize, buffer.format, *lists
    ctypes.pythonapi.PyBuffer_Release(ctypes.byref(buffer))
    return found


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("request_of", REQUESTS)
def test_a_reader_gets_what_numpy_grants(request_of, name):
    """A reader of flat memory, as MPI is, would else read other elements, or past the end."""
    x = VIEWS[name](cmha.tensor(counting(3, 4)))
    for flags in (REQUESTS[request_of], REQUESTS[request_of] | FORMAT):
        ours, numpys = granted(x, flags), granted(x.numpy(), flags)
        assert (ours is None) == (numpys is None)
        if ours is not None and x.size > 1:
            assert ours == numpys


def test_flat_readers_read_the_bytes():
    x = cmha.tensor(counting(2, 3))
    assert hashlib.sha256(x).digest() == hashlib.sha256(counting(2, 3)).digest()
    with pytest.raises(BufferError, match=r"row-major order; got strides \(1, 3\); call contiguous\(\) first"):
        hashlib.sha256(x.T)
    assert granted(x, 0x1) is None  # writable
