"""Module: a thing with parameters. They are found by walking attributes; nothing is registered."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from cmha import _core
from cmha.errors import check_flag, message, quote
from cmha.tensor import Tensor, to_tensor

if TYPE_CHECKING:
    from cmha.types import ArrayLike

    Hook = Callable[..., Any]  # hook(module, args, output), or hook(module, args, kwargs) before forward
    Around = Callable[["Module"], AbstractContextManager[Callable[[Any], object]]]
    Inside = Callable[[str, Tensor], Tensor]


class Hooks(NamedTuple):
    """What runs with a module: dicts {handle: hook}, in the order of registering."""

    before: dict[HookHandle, Hook]  # forward: hook(module, args, kwargs)
    after: dict[HookHandle, Hook]  # forward: hook(module, args, output)
    around: dict[HookHandle, Around]  # these: hook(module), a context whose value is called with what leaves them
    inside: dict[HookHandle, Inside]  # an attention, at each named intermediate: hook(name, x) -> x
    seeing: dict[HookHandle, Inside]  # the same, behind them


class HookHandle:
    """What registering a hook returns; remove() takes the hook away, also a second time."""

    def __init__(self, hooks: dict[HookHandle, Any], hook: Hook) -> None:
        self._hooks = hooks
        hooks[self] = hook

    def remove(self) -> None:
        """Takes the hook away; a second time does nothing."""
        self._hooks.pop(self, None)


class Module:
    """What every layer is: a thing with parameters. Calling it calls its forward.

    Parameters are the attributes that are leaf Tensors needing gradients, those of attributes that are Modules, and of
    lists of Modules, in the order of assignment; nothing is registered. `training` says which mode it is in.
    """

    forward: Callable[..., Any]  # each subclass has its own
    training = True
    _hooks: Hooks | None = None  # once there has been one

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._hooks is not None:
            return self._call_with_hooks(self._hooks, args, kwargs)
        return self.forward(*args, **kwargs)

    def _call_with_hooks(self, hooks: Hooks, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """forward between the hooks. They see the module's own output: a residual is added, a GELU taken, behind them,
        with the same bits as inside the product."""
        before, after, around, *_ = hooks
        if not (before or after or around):
            return self.forward(*args, **kwargs)
        residual, gelu = kwargs.pop("residual", None), kwargs.pop("gelu", None)
        with ExitStack() as stack:
            see = [stack.enter_context(hook(self)) for hook in list(around.values())]
            for hook in list(before.values()):
                changed = hook(self, args, kwargs)
                args, kwargs = (args, kwargs) if changed is None else self._checked_input(hook, changed)
            out = self.forward(*args, **kwargs)
            for hook in list(after.values()):
                changed = hook(self, args, out)
                out = out if changed is None else self._checked_output(hook, changed, out)
            for look in see:
                look(out)
        if gelu:
            out = out.gelu()
        if residual is None:
            return out
        y = out[0] if isinstance(out, tuple) else out
        if y.shape != residual.shape:  # it would be broadcast
            rule = f"what leaves the hooks of {self._title()} must have the residual's shape"
            raise ValueError(message("hook", rule, y.shape, residual.shape))
        return (residual + y, *out[1:]) if isinstance(out, tuple) else residual + y

    def _checked_input(self, hook: Hook, changed: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What a pre-hook returned, if it can go into forward."""
        if isinstance(changed, tuple) and len(changed) == 2:
            args, kwargs = changed
            if isinstance(args, tuple | list) and isinstance(kwargs, dict):
                return tuple(args), kwargs
        rule = f"the forward pre-hook {_name(hook)} of {self._title()} must return None or (args, kwargs)"
        raise TypeError(message("hook", rule, quote(changed), "a tuple of a tuple and a dict"))

    def _checked_output(self, hook: Hook, changed: Any, out: Any) -> Any:
        """What a forward hook returned, if it can stand for what a forward returned that gives tensors."""
        several = isinstance(out, tuple) and len(out) > 0
        if not isinstance(out[0] if several else out, Tensor) or isinstance(changed, Tensor):
            return changed
        if several and isinstance(changed, tuple) and len(changed) == len(out) and isinstance(changed[0], Tensor):
            return changed
        expected = f"a Tensor or a tuple of {len(out)} that begins with one" if several else "a Tensor"
        rule = f"the forward hook {_name(hook)} of {self._title()} must return None or an output"
        raise TypeError(message("hook", rule, quote(changed), expected))

    def register_forward_hook(self, hook: Hook) -> HookHandle:
        """hook(module, args, output) runs after each forward; what it returns, if not None, is the output instead:
        a Tensor, or a tuple where forward gives a tuple.

        Returns a handle whose remove() ends it. Name and order are PyTorch's: hooks run as they were registered. A copy
        of the module (copy, pickle) has no hooks.
        """
        return self._register("after", hook)

    def register_forward_pre_hook(self, hook: Hook) -> HookHandle:
        """hook(module, args, kwargs) runs before each forward; None, or the (args, kwargs) to go on with.

        As PyTorch's with with_kwargs=True. Returns a handle whose remove() ends it.
        """
        return self._register("before", hook)

    def _register(self, which: str, hook: Hook) -> HookHandle:
        if not callable(hook):
            raise TypeError(f"[hook] a hook must be callable; got {type(hook).__name__}")
        hooks = vars(self).setdefault("_hooks", Hooks({}, {}, {}, {}, {}))  # in one step: other threads may do the same
        return HookHandle(getattr(hooks, which), hook)

    def __getstate__(self) -> dict[str, Any]:
        """Without hooks: the handles that end them, and a trace that set them, are this module's, not its copy's."""
        return {name: value for name, value in vars(self).items() if name != "_hooks"}

    def _children(self) -> Iterator[tuple[str, Module | Tensor]]:
        """(name, value) of Tensors and Modules, lists opened."""
        for name, value in vars(self).items():
            if isinstance(value, list | tuple):
                yield from ((f"{name}.{i}", item) for i, item in enumerate(value) if isinstance(item, Module))
            elif isinstance(value, Module | Tensor):
                yield name, value

    def named_modules(self, prefix: str = "") -> Iterator[tuple[str, Module]]:
        """(path, Module) pairs of this one and all inside, in the order of assignment; its own path is `prefix`."""
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
        """A list of all parameters, each once, in the order of assignment."""
        return [p for _, p in self.named_parameters()]

    def num_parameters(self) -> int:
        """Number of trained numbers, tied ones once."""
        return sum(p.size for p in self.parameters())

    def state_dict(self) -> dict[str, Tensor]:
        """{name: tensor} on the parameters' own memory, without gradient."""
        return {name: p.detach() for name, p in self.named_parameters()}

    def load_state_dict(self, state: Mapping[str, ArrayLike]) -> None:
        """Copy tensors or arrays into the parameters. Every name and shape must fit.

        ValueError: all that does not, in one message; then nothing is written.
        """
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
        """Training mode (dropout drops) for this and all modules inside; mode=False: eval mode. Returns itself."""
        mode = check_flag("train", "mode", mode)
        for _, module in self.named_modules():
            module.training = mode
        return self

    def eval(self) -> Self:
        """Eval mode: dropout does nothing. Returns itself."""
        return self.train(False)

    def zero_grad(self) -> None:
        """Set .grad of every parameter to None."""
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
        return self._title() + ("\n" + "\n".join(lines) if lines else "")

    def _title(self) -> str:
        return f"{type(self).__name__}({self.describe()})"


def _name(hook: Hook) -> str:
    return getattr(hook, "__qualname__", None) or type(hook).__qualname__


@contextmanager
def evaluating(module: Module) -> Iterator[None]:
    """Inside, a module and all its parts are in eval mode; each of them goes back to the mode it had."""
    modes = [(part, part.training) for _, part in module.named_modules()]
    module.eval()
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training
