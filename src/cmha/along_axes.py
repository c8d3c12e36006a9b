"""What a tensor does along its axes: sums, extremes, softmax."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, SupportsIndex

from cmha import ops
from cmha.errors import check_flag, quote
from cmha.foreign import one_of, read_axes

if TYPE_CHECKING:
    from cmha.tensor import Tensor
    from cmha.types import Axes, Flag, Op, Shape


class AlongAxes:
    """The part of Tensor that reduces; `axis` and `keepdims` may be called `dim` and `keepdim`, as in PyTorch."""

    __slots__ = ()

    if TYPE_CHECKING:  # what Tensor brings

        @property
        def shape(self) -> Shape: ...
        @property
        def ndim(self) -> int: ...
        def float(self) -> Tensor: ...
        def _as_float(self, op: Op, **options: Any) -> Tensor: ...

    def sum(self, axis: Axes = None, keepdims: Flag = None, *, dim: Axes = None, keepdim: Flag = None) -> Tensor:
        """The sum over one axis, a tuple of axes, or all (the default); keepdims leaves them with size 1.

        int64 and bool are summed as float32; 0 over an empty axis.
        """
        return self._reduce("sum", ops.sum, axis, keepdims, dim, keepdim)

    def mean(self, axis: Axes = None, keepdims: Flag = None, *, dim: Axes = None, keepdim: Flag = None) -> Tensor:
        """The mean over one axis, a tuple of axes, or all (the default); NaN over an empty axis."""
        return self._reduce("mean", ops.mean, axis, keepdims, dim, keepdim)

    def var(self, axis: Axes = None, keepdims: Flag = None, *, dim: Axes = None, keepdim: Flag = None) -> Tensor:
        """The variance, mean((x - mean(x))^2), over one axis, a tuple of axes, or all (the default): divides by N.

        NaN over an empty axis.
        """
        return self._reduce("var", ops.var, axis, keepdims, dim, keepdim)

    def max(self, axis: Axes = None, keepdims: Flag = None, *, dim: Axes = None, keepdim: Flag = None) -> Tensor:
        """The largest value along one axis, or of all elements (the default); NaN if there is one.

        The first of equal ones gets the gradient. ValueError: several axes, an empty one.
        """
        return self._reduce("max", ops.max, axis, keepdims, dim, keepdim, one_axis=True)

    def min(self, axis: Axes = None, keepdims: Flag = None, *, dim: Axes = None, keepdim: Flag = None) -> Tensor:
        """The smallest value along one axis, or of all elements (the default); NaN if there is one.

        The first of equal ones gets the gradient. ValueError: several axes, an empty one.
        """
        return self._reduce("min", ops.min, axis, keepdims, dim, keepdim, one_axis=True)

    def _reduce(
        self, name: str, op: Op, axis: Axes, keepdims: Flag, dim: Axes, keepdim: Flag, one_axis: bool = False
    ) -> Tensor:
        axes, keepdims = self._reduced(name, axis, keepdims, dim, keepdim, one_axis)
        if one_axis and self.ndim == 0:
            return self.float()
        return self._kept(self._as_float(op, axes=axes), axes, keepdims)

    def _reduced(
        self, name: str, axis: Axes, keepdims: Flag, dim: Axes, keepdim: Flag, one_axis: bool
    ) -> tuple[tuple[int, ...], bool]:
        """The axes to reduce, ascending, and whether they stay with size 1."""
        keepdims = one_of(name, "keepdims", keepdims, "keepdim", keepdim, False)
        axis = one_of(name, "axis", axis, "dim", dim, None)
        axes = read_axes(name, axis, self.ndim)
        if one_axis and axis is not None and len(axes) != 1:
            raise ValueError(f"[{name}] one axis, or none for all; got axis={quote(axis)}")
        return axes, check_flag(name, "keepdims", keepdims)

    def _kept(self, y: Tensor, axes: tuple[int, ...], keepdims: bool) -> Tensor:
        return y.reshape([1 if i in axes else n for i, n in enumerate(self.shape)]) if keepdims else y

    def softmax(self, axis: SupportsIndex | None = None, *, dim: SupportsIndex | None = None) -> Tensor:
        """exp(x_j - m) / sum_k exp(x_k - m) along an axis (the last by default), m the largest x.

        A row of -inf only gives zeros, and no gradient.
        """
        return self._as_float(ops.softmax, axis=one_of("softmax", "axis", axis, "dim", dim, -1))

    def softmax_last_dim(self) -> Tensor:
        """The lesson's name for softmax(-1)."""
        return self.softmax(-1)

    def log_softmax(self, axis: SupportsIndex | None = None, *, dim: SupportsIndex | None = None) -> Tensor:
        """x_j - m - log sum_k exp(x_k - m) along an axis (the last by default), m the largest x.

        A row of -inf only stays -inf, and gets no gradient.
        """
        return self._as_float(ops.log_softmax, axis=one_of("log_softmax", "axis", axis, "dim", dim, -1))
