"""SIGINT, SIGTERM, SIGHUP: the first asks the loop to stop after its step, a second one ends the process at once.

A closed terminal may send SIGHUP twice, from the shell and from the kernel: that is one wish, so the second is ignored.
"""

import signal
import threading

HANGUP = getattr(signal, "SIGHUP", None)  # not on Windows


def stop_signals():
    """The signals that ask for an end; not SIGHUP where nohup has it ignored."""
    numbers = [signal.SIGINT, signal.SIGTERM]
    return numbers if HANGUP is None or signal.getsignal(HANGUP) == signal.SIG_IGN else [*numbers, HANGUP]


class StopRequest:
    """with StopRequest() as stop: ... `if stop.number: break`; number is the signal that came, else None."""

    number = None

    def __enter__(self):
        self._before = {}
        if threading.current_thread() is threading.main_thread():  # Python allows handlers only there
            self._before = {number: signal.signal(number, self._ask) for number in stop_signals()}
        return self

    def _ask(self, number, frame):
        self.number = number
        self._restore()
        if number == HANGUP:
            signal.signal(HANGUP, signal.SIG_IGN)

    def _restore(self):
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def __exit__(self, *_):
        self._restore()
