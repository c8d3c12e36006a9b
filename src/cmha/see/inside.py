"""What holds inside of a `with`, and nothing of it outside."""

from __future__ import annotations

from contextlib import ExitStack
from typing import NoReturn, Self, SupportsIndex

from cmha.errors import message


class Inside:
    """A context that is entered once at a time. What it sets up are handles of its own, so that several may end in any
    order, and each is taken away also after an error."""

    op = ""  # how errors call it
    _stack: ExitStack | None = None

    def __enter__(self) -> Self:
        if self._stack is not None:
            hint = f"Nest another one: cmha.{self.op}(...)"
            raise RuntimeError(message(self.op, "one `with` at a time", "a second inside the first", hint=hint))
        with ExitStack() as stack:
            self._set_up(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        stack, self._stack = self._stack, None
        if stack is not None:
            stack.close()
            self._end(failed=kind is not None)

    def _set_up(self, stack: ExitStack) -> None:
        """Puts what takes each thing away again on the stack."""
        raise NotImplementedError

    def _end(self, failed: bool) -> None:
        """After everything was taken away; failed: an error is on its way."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError(message(self.op, "what belongs to a `with` and its model can be neither copied nor pickled"))
