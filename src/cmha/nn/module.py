"""Module: a thing with parameters. They are found by walking attributes; nothing is registered."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Self

from cmha import _core
from cmha.errors import check_flag
from cmha.tensor import Tensor, to_tensor

if TYPE_CHECKING:
    from cmha.types import ArrayLike

    Hook = Callable[..., Any]  # hook(module, args, output), or hook(module, args, kwargs) before forward
    Hooks = dict["HookHandle", Hook]


class HookHandle:
    """What registering a hook returns; remove() takes the hook away, also a second time."""

    def __init__(self, hooks: Hooks, hook: Hook) -> None:
        self._hooks = hooks
        hooks[self] = hook

    def remove(self) -> None:
        self._hooks.pop(self, None)


class Module:
    """Parameters are the attributes that are leaf Tensors needing gradients, those of attributes that are Modules, and
    of lists of Modules, in the order of assignment. Calling a module calls its forward."""

    forward: Callable[..., Any]  # each subclass has its own
    training = True
    _hooks: tuple[Hooks, Hooks] | None = None  # (before forward, after it), two dicts, once there has been a hook

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._hooks is not None:
            return self._call_with_hooks(self._hooks, args, kwargs)
        return self.forward(*args, **kwargs)

    def _call_with_hooks(self, hooks: tuple[Hooks, Hooks], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """forward between the hooks. They see the module's own output: a residual is added, a GELU taken, behind them,
        with the same bits as inside the product."""
        before, after = hooks
        fused = bool(before or after)
        residual, gelu = (kwargs.pop(n, None) if fused else None for n in ("residual", "gelu"))
        for hook in list(before.values()):
            changed = hook(self, args, kwargs)
            args, kwargs = (args, kwargs) if changed is None else changed
        out = self.forward(*args, **kwargs)
        for hook in list(after.values()):
            changed = hook(self, args, out)
            out = out if changed is None else changed
        if gelu:
            out = out.gelu()
        if residual is None:
            return out
        return (residual + out[0], *out[1:]) if isinstance(out, tuple) else residual + out

    def register_forward_hook(self, hook: Hook) -> HookHandle:
        """hook(module, args, output) runs after each forward; what it returns, if not None, is the output instead.

        Returns a handle whose remove() ends it. Name and order are PyTorch's: hooks run as they were registered.
        """
        return self._register(1, hook)

    def register_forward_pre_hook(self, hook: Hook) -> HookHandle:
        """hook(module, args, kwargs) runs before each forward; None, or the (args, kwargs) to go on with.

        As PyTorch's with with_kwargs=True. Returns a handle whose remove() ends it.
        """
        return self._register(0, hook)

    def _register(self, which: int, hook: Hook) -> HookHandle:
        if not callable(hook):
            raise TypeError(f"[hook] a hook must be callable; got {type(hook).__name__}")
        hooks = vars(self).setdefault("_hooks", ({}, {}))  # in one step: another thread may register one, too
        return HookHandle(hooks[which], hook)

    def _children(self) -> Iterator[tuple[str, Module | Tensor]]:
        """(name, value) of Tensors and Modules, lists opened."""
        for name, value in vars(self).items():
            if isinstance(value, list | tuple):
                yield from ((f"{name}.{i}", item) for i, item in enumerate(value) if isinstance(item, Module))
            elif isinstance(value, Module | Tensor):
                yield name, value

    def named_modules(self, prefix: str = "") -> Iterator[tuple[str, Module]]:
        yield prefix, self
        for name, child in self._children():
            if isinstance(child, Module):
                yield from child.named_modules(f"{prefix}.{name}" if prefix else name)

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """(name, Tensor) pairs; a parameter used in two places appears once, under its first name."""
        seen: set[int] = set()
        for prefix, module in self.named_modules():
            for name, value in module._children():
                if isinstance(value, Tensor) and value.requires_grad and value._node is None and id(value) not in seen:
                    seen.add(id(value))
                    yield f"{prefix}.{name}" if prefix else name, value

    def parameters(self) -> list[Tensor]:
        return [p for _, p in self.named_parameters()]

    def num_parameters(self) -> int:
        """Number of trained numbers, tied ones once."""
        return sum(p.size for p in self.parameters())

    def state_dict(self) -> dict[str, Tensor]:
        """Name -> tensor on the parameter's own memory, without gradient."""
        return {name: p.detach() for name, p in self.named_parameters()}

    def load_state_dict(self, state: Mapping[str, ArrayLike]) -> None:
        """Copy tensors or arrays into the parameters. Every name and shape must fit, else nothing is written."""
        if not isinstance(state, Mapping):
            raise TypeError(f"[load_state_dict] needs a dict of names and arrays; got {type(state).__name__}")
        own = dict(self.named_parameters())
        faults = [f"missing {name}" for name in own if name not in state]
        faults += [f"unknown {name}" for name in state if name not in own]
        new = {name: to_tensor(state[name], "load_state_dict").float() for name in own if name in state}
        faults += [
            f"{name} has shape {t.shape}, expected {own[name].shape}"
            for name, t in new.items()
            if t.shape != own[name].shape
        ]
        if faults:
            more = f" and {len(faults) - 10} more" if len(faults) > 10 else ""
            raise ValueError(f"[load_state_dict] names and shapes must fit; got {'; '.join(faults[:10])}{more}")
        for name, t in new.items():
            _core.assign(own[name].data, t.data)

    def train(self, mode: bool = True) -> Self:
        mode = check_flag("train", "mode", mode)
        for _, module in self.named_modules():
            module.training = mode
        return self

    def eval(self) -> Self:
        return self.train(False)

    def zero_grad(self) -> None:
        for p in self.parameters():
            p.grad = None

    def describe(self) -> str:
        """What stands between the brackets of repr."""
        return ""

    def __repr__(self) -> str:
        lines = []
        for name, child in self._children():
            text = repr(child) if isinstance(child, Module) else f"{child.shape}"
            lines.append(f"  {name}: " + text.replace("\n", "\n  "))
        head = f"{type(self).__name__}({self.describe()})"
        return head + ("\n" + "\n".join(lines) if lines else "")
