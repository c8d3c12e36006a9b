"""How a tensor leaves: as a view for NumPy, PyTorch and JAX, as Python numbers, through pickle and copy.

A tensor that needs gradients leaves only after detach(): no other library would take its history along.
"""

from __future__ import annotations

import copy as copying
import copyreg
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from cmha import _core
from cmha.errors import check_flag, quote
from cmha.foreign import numpy_array

if TYPE_CHECKING:
    from numpy.typing import DTypeLike
    from typing_extensions import CapsuleType

    from cmha._core import Array
    from cmha.autograd import Node
    from cmha.tensor import Tensor
    from cmha.types import NumPyArray

CPU = (1, 0)  # kDLCPU, device 0
FLAGS = np.lib.NumpyVersion(np.__version__) >= "2.1.0"  # whether NumPy's capsules can say that memory is read-only


class Interchange(_core.Buffered):
    """The half of Tensor that other libraries see."""

    __slots__ = ()
    _data: Array
    _grad: Tensor | None
    _node: Node | None  # the op that made it
    _requires_grad: bool
    requires_grad: bool
    __array_ufunc__ = None  # a NumPy array on the left hands the operation to us

    def _readable(self, op: str, error: type[Exception]) -> Array:
        """The array, for one who does not know of gradients."""
        if self._requires_grad:
            raise error(f"[{op}] the tensor needs gradients, which would be lost; got requires_grad=True, expected "
                        "detach() first")  # fmt: skip
        return self._data

    def numpy(self) -> NumPyArray:
        """A read-only NumPy view on the same memory. RuntimeError for a tensor that needs gradients: detach() first."""
        return np.asarray(self._readable("numpy", RuntimeError))

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NumPyArray:
        """What np.asarray(x, dtype, copy=copy) means: copy=False is a ValueError where another dtype needs a copy."""
        a = np.asarray(self._readable("array", RuntimeError))
        if copy is False and dtype is not None and np.dtype(dtype) != a.dtype:
            got = f"copy=False, dtype {np.dtype(dtype)} of {a.dtype}"
            raise ValueError(f"[array] another dtype needs a copy; got {got}")
        return np.array(a, dtype) if copy else np.asarray(a, dtype)

    def __dlpack_device__(self) -> tuple[int, int]:
        """(1, 0): the CPU."""
        return CPU

    def __dlpack__(
        self, *, stream: None = None, max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None, copy: bool | None = None,
    ) -> CapsuleType:  # fmt: skip
        """The tensor's own memory as a DLPack capsule (https://dmlc.github.io/dlpack/latest/python_spec.html), flagged
        as read-only where the capsule can say so: max_version of at least (1, 0), and NumPy 2.1.

        Consumers may ignore the flag (PyTorch does): until the last of them lets go the memory counts as one that
        others write, so that ops copy what they save for backward, and a backward pass over values that were saved
        before is an error if they changed. copy=True gives memory that nobody shares, and so does a view that runs
        backwards, as negative strides end the process in PyTorch. BufferError: the tensor needs gradients, another
        device or a stream is asked for, or read-only memory from outside meets an old capsule.
        """
        array = self._readable("dlpack", BufferError)
        if stream is not None:
            raise BufferError(f"[dlpack] the CPU has no streams; got stream={quote(stream)}, expected None")
        if dl_device is not None and tuple(dl_device) != CPU:
            raise BufferError(f"[dlpack] tensors live on the CPU; got dl_device={quote(dl_device)}, expected {CPU}")
        options: dict[str, Any] = {"max_version": max_version} if FLAGS and max_version is not None else {}
        backwards = min(array.strides, default=0) < 0
        if backwards and copy is False:
            raise BufferError("[dlpack] a view that runs backwards leaves only as a copy; got copy=False")
        if backwards or (copy is not None and check_flag("dlpack", "copy", copy)):
            return np.array(array, order="C").__dlpack__(**options)
        view = np.asarray(_core.lend(array))
        if options and tuple(options["max_version"]) >= (1, 0):
            view.flags.writeable = False
        return view.__dlpack__(**options)

    def __jax_array__(self) -> Any:
        """What jnp.asarray(x) asks for: JAX cannot read a dtype that is a word."""
        import jax.numpy

        return jax.numpy.from_dlpack(self)

    def item(self) -> float:
        """The one element as a Python number. ValueError where there are more, or none."""
        return self._data.item()

    def tolist(self) -> Any:
        """Nested lists of Python numbers; of a tensor without axes, the number."""
        return np.asarray(self._data).tolist()

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __bool__(self) -> bool:
        return bool(self.item())

    # ------------------------------------------------------------------------------------------ pickle and copy
    def __reduce__(self) -> tuple[Any, ...]:
        """Values, requires_grad and grad, in row-major order; out of band (protocol 5) without a copy."""
        self._check_leaf("pickle")
        return _restored, (type(self), np.asarray(self._data.contiguous()), self._requires_grad, self._grad)

    def __copy__(self) -> Self:
        """Another tensor on the same memory, made by the same op."""
        return self._twin(self._data, self._grad, self._node)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A leaf on memory of its own, with a copy of grad."""
        self._check_leaf("deepcopy")
        return self._twin(_core.copy(self._data), copying.deepcopy(self._grad, memo), None)

    def _check_leaf(self, op: str) -> None:
        if self._node is not None:
            raise RuntimeError(f"[{op}] the history of a computed tensor cannot be copied; got a result of "
                               f"{self._node.name}, expected detach() first")  # fmt: skip

    def _twin(self, data: Array, grad: Tensor | None, node: Node | None) -> Self:
        twin = type(self).__new__(type(self))
        twin._data, twin._requires_grad, twin._grad, twin._node = data, self._requires_grad, grad, node
        return twin


def _restored(cls: type[Tensor], array: NumPyArray, requires_grad: bool, grad: Tensor | None) -> Tensor:
    """A tensor from a pickle: on the buffer that was given apart from it, else on memory of its own.

    A leaf that needs gradients always owns its memory, as optimisers write into it.
    """
    owner: Any = array
    while isinstance(owner, np.ndarray):
        owner = owner.base
    apart = not isinstance(owner, bytes | bytearray | None)
    data = _core.from_buffer(numpy_array(array, "pickle"))
    tensor = cls(data if apart and not requires_grad else _core.copy(data), requires_grad)
    tensor._grad = grad
    return tensor


def _restored_array(array: NumPyArray) -> Array:
    return _core.copy(_core.from_buffer(numpy_array(array, "pickle")))


copyreg.pickle(_core.Array, lambda x: (_restored_array, (np.asarray(x.contiguous()),)))
