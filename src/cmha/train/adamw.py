"""AdamW (Loshchilov & Hutter 2019): decay apart from the gradient, and before the step.

    p <- p (1 - lr wd)
    m <- beta1 m + (1 - beta1) g,    v <- beta2 v + (1 - beta2) g^2
    p <- p - lr (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)

t counts the updates of a parameter: one that got its first gradient late is corrected like a new one.
"""

import math

import numpy as np

from cmha import _core
from cmha.errors import check_number, listed, message, quote
from cmha.tensor import Tensor


class AdamW:
    """params: tensors, or groups {"params": tensors, "weight_decay": number}; each tensor once, and all decay."""

    def __init__(self, params, lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        self.lr = lr
        at_least_0 = (lambda x: x >= 0, "a number of at least 0")
        share = (lambda x: 0 <= x < 1, "at least 0 and below 1")
        self._betas = tuple(check_number("AdamW", f"betas[{i}]", beta, *share) for i, beta in enumerate(_pair(betas)))
        self._eps = check_number("AdamW", "eps", eps, *at_least_0)
        self._params, self._decays = [], []
        for group in _groups(params, weight_decay):
            decay = check_number("AdamW", "weight_decay", group["weight_decay"], *at_least_0)
            tensors = list(group["params"])
            self._params += tensors
            self._decays += [decay] * len(tensors)
        _check_parameters(self._params)
        self._m = [_core.full(p.shape, 0.0, "float32") for p in self._params]
        self._v = [_core.full(p.shape, 0.0, "float32") for p in self._params]
        self._steps = [0] * len(self._params)

    @property
    def params(self):
        """Every parameter, in the order of the state's lists."""
        return list(self._params)

    @property
    def lr(self):
        return self._lr

    @lr.setter
    def lr(self, value):
        self._lr = check_number("AdamW", "lr", value, lambda x: x >= 0, "a number of at least 0")

    def zero_grad(self):
        for parameter in self._params:
            parameter.grad = None

    def step(self, grad_scale=1.0):
        """One update from the gradients times grad_scale; a parameter without a gradient stays as it is."""
        ready = [i for i, parameter in enumerate(self._params) if parameter.grad is not None]
        for i in ready:
            if self._params[i].grad.shape != self._params[i].shape:
                got = f"grad {self._params[i].grad.shape} of a parameter {self._params[i].shape} at place {i}"
                raise ValueError(message("AdamW", "a gradient must have the shape of its parameter", got))
        calls = {}  # parameters with equal decay and equal count go to the core together
        for i in ready:
            calls.setdefault((self._decays[i], self._steps[i] + 1), []).append(i)
        for (decay, step), chosen in calls.items():
            _core.adamw(
                [self._params[i].data for i in chosen],
                [self._m[i] for i in chosen],
                [self._v[i] for i in chosen],
                [self._params[i].grad.data for i in chosen],
                self._lr,
                *self._betas,
                self._eps,
                decay,
                step,
                grad_scale,
            )
            for i in chosen:
                self._steps[i] = step

    def state_dict(self):
        """{"lr": number, "steps": [t], "m": [array], "v": [array]}, one entry per parameter, as copies."""
        moments = {"m": self._m, "v": self._v}
        copies = {key: [np.array(a, np.float32) for a in arrays] for key, arrays in moments.items()}
        return {"lr": self._lr, "steps": list(self._steps), **copies}

    def load_state_dict(self, state):
        """Takes over what state_dict gave; whatever does not fit is refused before anything changes."""
        shapes = [tuple(p.shape) for p in self._params]
        if set(state) != {"lr", "steps", "m", "v"}:
            raise ValueError(message("AdamW", "state must have the keys lr, steps, m, v", quote(sorted(state))))
        for key in ("m", "v"):
            got = [np.shape(a) for a in state[key]]
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
        for key, arrays in (("m", self._m), ("v", self._v)):
            for array, value in zip(arrays, state[key], strict=True):
                _core.assign(array, _core.from_buffer(np.array(value, np.float32)))


def _pair(betas):
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise ValueError(message("AdamW", "betas must be two numbers", quote(betas)))
    return betas


def _groups(params, weight_decay):
    if isinstance(params, Tensor):
        raise TypeError(message("AdamW", "params must be a list of tensors or of groups", "one Tensor"))
    params = list(params)
    if not any(isinstance(group, dict) for group in params):
        return [{"params": params, "weight_decay": weight_decay}]
    groups = []
    for group in params:
        if not isinstance(group, dict) or "params" not in group or not set(group) <= {"params", "weight_decay"}:
            got = sorted(group) if isinstance(group, dict) else group
            raise ValueError(message("AdamW", "a group must have the keys params and weight_decay", quote(got)))
        groups.append({"weight_decay": weight_decay, **group})
    return groups


def _check_parameters(params):
    if not params:
        raise ValueError(message("AdamW", "params must hold at least one tensor", "none"))
    for i, parameter in enumerate(params):
        if not isinstance(parameter, Tensor):
            raise TypeError(message("AdamW", "params must be tensors", f"{quote(parameter)} at place {i}"))
        if not parameter.requires_grad:
            raise ValueError(message("AdamW", "params must need gradients", f"shape {parameter.shape} at place {i}"))
    if len({id(parameter) for parameter in params}) < len(params):
        raise ValueError(message("AdamW", "each parameter must stand once", f"one of {len(params)} twice"))


def parameter_groups(model, weight_decay):
    """Matrices decay, vectors (biases, gains) do not; told apart by their axes, each parameter in one group."""
    params = model.parameters()
    return [
        {"params": [p for p in params if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
    ]


def grad_norm(named):
    """(norm, None): the Euclidean norm of all gradients of (name, tensor) pairs, squares summed in double, in order.

    (norm, name) where it is not finite: the first parameter whose gradient holds NaN or infinity.
    """
    named = [(name, parameter.grad.data) for name, parameter in named if parameter.grad is not None]
    total = 0.0
    for (name, _), squares in zip(named, _core.sums_of_squares([grad for _, grad in named]), strict=True):
        if not math.isfinite(squares):
            return squares, name
        total += squares
    return math.sqrt(total), None


def clip_factor(norm, max_norm):
    """What gradients of this norm are multiplied by so that it is at most max_norm."""
    return 1.0 if norm <= max_norm else max_norm / norm


def clip_grad_norm_(params, max_norm):
    """Scales all gradients so that their common norm is at most max_norm; returns the norm they had.

    A norm that is not finite is an error that names the first such parameter; no gradient changes.
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
