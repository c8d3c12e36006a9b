"""How a tensor leaves: as a NumPy view, as Python numbers, through pickle."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

    from cmha._core import Array
    from cmha.types import NumPyArray


class Interchange:
    """The half of Tensor that other libraries see."""

    __slots__ = ()
    _data: Array
    requires_grad: bool
    __array_ufunc__ = None  # a NumPy array on the left hands the operation to us

    def numpy(self) -> NumPyArray:
        """A read-only NumPy view on the same memory. RuntimeError for a tensor that needs gradients: detach() first."""
        if self.requires_grad:
            raise RuntimeError("[numpy] the tensor needs gradients, which NumPy would lose; call detach() first")
        return np.asarray(self._data)

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NumPyArray:
        a = self.numpy()
        return a.astype(dtype) if dtype is not None and dtype != a.dtype else a.copy() if copy else a

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

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (np.array(self._data), self.requires_grad)
