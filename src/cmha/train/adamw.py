"""AdamW (Loshchilov & Hutter 2019): decay apart from the gradient, and before the step.

    p <- p (1 - lr wd)
    m <- beta1 m + (1 - beta1) g,    v <- beta2 v + (1 - beta2) g^2
    p <- p - lr (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)

t counts the updates of a parameter: one that got its first gradient late is corrected like a new one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Required, TypeAlias, TypedDict

import numpy as np

from cmha import _core
from cmha.errors import check_number, listed, message, quote
from cmha.tensor import Tensor

if TYPE_CHECKING:
    from cmha.nn import Module
    from cmha.types import FloatArray


class Group(TypedDict, total=False):
    """Parameters that decay alike, at the optimiser's weight_decay if they have none of their own."""

    params: Required[Iterable[Tensor]]
    weight_decay: float


Parameters: TypeAlias = Iterable[Tensor | Group]  # all of one kind


class AdamWState(TypedDict):
    """What state_dict gives: one entry per parameter in each list."""

    lr: float
    steps: list[int]
    m: list[FloatArray]
    v: list[FloatArray]


class AdamW:
    """AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101), t the updates of a parameter, g its gradient::

        p <- p (1 - lr weight_decay)
        m <- beta1 m + (1 - beta1) g,    v <- beta2 v + (1 - beta2) g^2
        p <- p - lr (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)

    params: tensors, each once, which all decay; or groups {"params": tensors, "weight_decay": number}, as
    `cmha.train.parameter_groups` makes them. TypeError, ValueError: no tensor, one twice or without gradients, a rate
    below 0.
    """

    def __init__(
        self, params: Parameters, lr: float, betas: Sequence[float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:  # fmt: skip
        self.lr = lr
        at_least_0 = (lambda x: x >= 0, "a number of at least 0")
        share = (lambda x: 0 <= x < 1, "at least 0 and below 1")
        beta1, beta2 = (check_number("AdamW", f"betas[{i}]", beta, *share) for i, beta in enumerate(_pair(betas)))
        self._betas = beta1, beta2
        self._eps = check_number("AdamW", "eps", eps, *at_least_0)
        self._params: list[Tensor] = []
        self._decays: list[float] = []
        for group, wanted in _groups(params, weight_decay):
            decay = check_number("AdamW", "weight_decay", wanted, *at_least_0)
            tensors = list(group)
            self._params += tensors
            self._decays += [decay] * len(tensors)
        _check_parameters(self._params)
        self._m = [_core.full(p.shape, 0.0, "float32") for p in self._params]
        self._v = [_core.full(p.shape, 0.0, "float32") for p in self._params]
        self._steps = [0] * len(self._params)

    @property
    def params(self) -> list[Tensor]:
        """Every parameter, in the order of the state's lists."""
        return list(self._params)

    @property
    def lr(self) -> float:
        """The learning rate, at least 0; settable."""
        return self._lr

    @lr.setter
    def lr(self, value: float) -> None:
        self._lr = check_number("AdamW", "lr", value, lambda x: x >= 0, "a number of at least 0")

    def zero_grad(self) -> None:
        """Set .grad of every parameter to None."""
        for parameter in self._params:
            parameter.grad = None

    def step(self, grad_scale: float = 1.0) -> None:
        """One update from the gradients times grad_scale; a parameter without a gradient stays as it is.

        ValueError: a gradient of another shape than its parameter; then nothing changes.
        """
        grads = {i: parameter.grad for i, parameter in enumerate(self._params) if parameter.grad is not None}
        for i, grad in grads.items():
            if grad.shape != self._params[i].shape:
                got = f"grad {grad.shape} of a parameter {self._params[i].shape} at place {i}"
                raise ValueError(message("AdamW", "a gradient must have the shape of its parameter", got))
        # Parameters with equal decay and equal count go to the core together.
        calls: dict[tuple[float, int], list[int]] = {}
        for i in grads:
            calls.setdefault((self._decays[i], self._steps[i] + 1), []).append(i)
        for (decay, step), chosen in calls.items():
            _core.adamw(
                [self._params[i].data for i in chosen],
                [self._m[i] for i in chosen],
                [self._v[i] for i in chosen],
                [grads[i].data for i in chosen],
                self._lr,
                *self._betas,
                self._eps,
                decay,
                step,
                grad_scale,
            )
            for i in chosen:
                self._steps[i] = step

    def state_dict(self) -> AdamWState:
        """{"lr": number, "steps": [t], "m": [array], "v": [array]}, one entry per parameter, as copies."""
        m, v = ([np.array(a, np.float32) for a in arrays] for arrays in (self._m, self._v))
        return {"lr": self._lr, "steps": list(self._steps), "m": m, "v": v}

    def load_state_dict(self, state: AdamWState) -> None:
        """Takes over what state_dict gave; whatever does not fit is refused before anything changes."""
        shapes = [tuple(p.shape) for p in self._params]
        if set(state) != {"lr", "steps", "m", "v"}:
            raise ValueError(message("AdamW", "state must have the keys lr, steps, m, v", quote(sorted(state))))
        moments = {"m": (self._m, state["m"]), "v": (self._v, state["v"])}
        for key, (_, values) in moments.items():
            got = [np.shape(a) for a in values]
            if got != shapes:
                wrong = [f"{i}: {a} for {b}" for i, (a, b) in enumerate(zip(got, shapes, strict=False)) if a != b]
                rule = f"{key} must fit the {len(shapes)} parameters"
                raise ValueError(message("AdamW", rule, f"{len(got)} arrays" + (f", {listed(wrong)}" if wrong else "")))
        steps = list(state["steps"])
        if len(steps) != len(shapes) or not all(type(t) is int and t >= 0 for t in steps):
            rule = f"steps must be {len(shapes)} integers of at least 0"
            raise ValueError(message("AdamW", rule, quote(steps)))
        self.lr = state["lr"]
        self._steps = steps
        for arrays, values in moments.values():
            for array, value in zip(arrays, values, strict=True):
                _core.assign(array, _core.from_buffer(np.array(value, np.float32)))


def _pair(betas: Sequence[float]) -> Sequence[float]:
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise ValueError(message("AdamW", "betas must be two numbers", quote(betas)))
    return betas


def _groups(params: Parameters, weight_decay: float) -> list[tuple[Iterable[Tensor], float]]:
    if isinstance(params, Tensor):
        raise TypeError(message("AdamW", "params must be a list of tensors or of groups", "one Tensor"))
    given: list[Any] = list(params)  # tensors or groups, told apart here
    if not any(isinstance(group, dict) for group in given):
        return [(given, weight_decay)]
    groups = []
    for group in given:
        if not isinstance(group, dict) or "params" not in group or not set(group) <= {"params", "weight_decay"}:
            got = sorted(group) if isinstance(group, dict) else group
            raise ValueError(message("AdamW", "a group must have the keys params and weight_decay", quote(got)))
        groups.append((group["params"], group.get("weight_decay", weight_decay)))
    return groups


def _check_parameters(params: list[Tensor]) -> None:
    if not params:
        raise ValueError(message("AdamW", "params must hold at least one tensor", "none"))
    for i, parameter in enumerate(params):
        if not isinstance(parameter, Tensor):
            raise TypeError(message("AdamW", "params must be tensors", f"{quote(parameter)} at place {i}"))
        if not parameter.requires_grad:
            raise ValueError(message("AdamW", "params must need gradients", f"shape {parameter.shape} at place {i}"))
    if len({id(parameter) for parameter in params}) < len(params):
        raise ValueError(message("AdamW", "each parameter must stand once", f"one of {len(params)} twice"))


def parameter_groups(model: Module, weight_decay: float) -> list[Group]:
    """Groups for AdamW: matrices decay, vectors (biases, gains) do not; told apart by their axes, each parameter in
    one.
    """
    params = model.parameters()
    return [
        {"params": [p for p in params if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
    ]


def grad_norm(named: Iterable[tuple[str, Tensor]]) -> tuple[float, str | None]:
    """(norm, None): the Euclidean norm of all gradients of (name, tensor) pairs, squares summed in double, in order.

    (norm, name) where it is not finite: the first parameter whose gradient holds NaN or infinity.
    """
    grads = [(name, parameter.grad.data) for name, parameter in named if parameter.grad is not None]
    total = 0.0
    for (name, _), squares in zip(grads, _core.sums_of_squares([grad for _, grad in grads]), strict=True):
        if not math.isfinite(squares):
            return squares, name
        total += squares
    return math.sqrt(total), None


def clip_factor(norm: float, max_norm: float) -> float:
    """What gradients of this norm are multiplied by so that it is at most max_norm."""
    return 1.0 if norm <= max_norm else max_norm / norm


def clip_grad_norm_(params: Tensor | Iterable[Tensor], max_norm: float) -> float:
    """Scales all gradients so that their common Euclidean norm is at most max_norm (Pascanu et al. 2013); returns the
    norm they had, a float.

    Squares are summed in double. ValueError: a norm that is not finite, with the first such parameter; no gradient
    changes.
    """
    max_norm = check_number("clip_grad_norm_", "max_norm", max_norm, lambda x: x > 0, "a finite number above 0")
    params = [params] if isinstance(params, Tensor) else list(params)
    norm, bad = grad_norm((f"parameter {i} of shape {p.shape}", p) for i, p in enumerate(params))
    if bad is not None:
        raise ValueError(message("clip_grad_norm_", "gradients must be finite", f"a norm of {norm} for {bad}"))
    factor = clip_factor(norm, max_norm)
    if factor != 1.0:
        scale = _core.full((), factor, "float32")
        for parameter in params:
            if parameter.grad is not None:  # a new array: two parameters may hold the same one as their gradient
                parameter.grad = Tensor(_core.multiply(parameter.grad.data, scale))
    return norm
