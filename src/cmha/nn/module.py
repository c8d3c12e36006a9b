"""Module: a thing with parameters. They are found by walking attributes; nothing is registered."""

from collections.abc import Mapping

from cmha import _core
from cmha.errors import check_flag
from cmha.tensor import Tensor, to_tensor


class HookHandle:
    """What registering a hook returns; remove() takes the hook away, also a second time."""

    def __init__(self, hooks, hook):
        self._hooks = hooks
        hooks[self] = hook

    def remove(self):
        self._hooks.pop(self, None)


class Module:
    """Parameters are the attributes that are leaf Tensors needing gradients, those of attributes that are Modules, and
    of lists of Modules, in the order of assignment. Calling a module calls its forward."""

    training = True
    _hooks = None  # (before forward, after it), two dicts, once there has been a hook

    def __call__(self, *args, **kwargs):
        if self._hooks is not None:
            return self._call_with_hooks(args, kwargs)
        return self.forward(*args, **kwargs)

    def _call_with_hooks(self, args, kwargs):
        """forward between the hooks. They see the module's own output: a residual is added, a GELU taken, behind them,
        with the same bits as inside the product."""
        before, after = self._hooks
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

    def register_forward_hook(self, hook):
        """hook(module, args, output) runs after each forward; what it returns, if not None, is the output instead.

        Returns a handle whose remove() ends it. Name and order are PyTorch's: hooks run as they were registered.
        """
        return self._register(1, hook)

    def register_forward_pre_hook(self, hook):
        """hook(module, args, kwargs) runs before each forward; None, or the (args, kwargs) to go on with.

        As PyTorch's with with_kwargs=True. Returns a handle whose remove() ends it.
        """
        return self._register(0, hook)

    def _register(self, which, hook):
        if not callable(hook):
            raise TypeError(f"[hook] a hook must be callable; got {type(hook).__name__}")
        hooks = vars(self).setdefault("_hooks", ({}, {}))  # in one step: another thread may register one, too
        return HookHandle(hooks[which], hook)

    def _children(self):
        """(name, value) of Tensors and Modules, lists opened."""
        for name, value in vars(self).items():
            if isinstance(value, list | tuple):
                yield from ((f"{name}.{i}", item) for i, item in enumerate(value) if isinstance(item, Module))
            elif isinstance(value, Module | Tensor):
                yield name, value

    def named_modules(self, prefix=""):
        yield prefix, self
        for name, child in self._children():
            if isinstance(child, Module):
                yield from child.named_modules(f"{prefix}.{name}" if prefix else name)

    def named_parameters(self):
        """(name, Tensor) pairs; a parameter used in two places appears once, under its first name."""
        seen = set()
        for prefix, module in self.named_modules():
            for name, value in module._children():
                if isinstance(value, Tensor) and value.requires_grad and value._node is None and id(value) not in seen:
                    seen.add(id(value))
                    yield f"{prefix}.{name}" if prefix else name, value

    def parameters(self):
        return [p for _, p in self.named_parameters()]

    def num_parameters(self):
        """Number of trained numbers, tied ones once."""
        return sum(p.size for p in self.parameters())

    def state_dict(self):
        """Name -> tensor on the parameter's own memory, without gradient."""
        return {name: p.detach() for name, p in self.named_parameters()}

    def load_state_dict(self, state):
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

    def train(self, mode=True):
        mode = check_flag("train", "mode", mode)
        for _, module in self.named_modules():
            module.training = mode
        return self

    def eval(self):
        return self.train(False)

    def zero_grad(self):
        for p in self.parameters():
            p.grad = None

    def describe(self):
        """What stands between the brackets of repr."""
        return ""

    def __repr__(self):
        lines = []
        for name, child in self._children():
            text = repr(child) if isinstance(child, Module) else f"{child.shape}"
            lines.append(f"  {name}: " + text.replace("\n", "\n  "))
        head = f"{type(self).__name__}({self.describe()})"
        return head + ("\n" + "\n".join(lines) if lines else "")
