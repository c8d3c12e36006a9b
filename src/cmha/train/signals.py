"""SIGINT and SIGTERM: the first asks the loop to stop after its step, a second one ends the process at once."""

import signal
import threading

NUMBERS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """with StopRequest() as stop: ... `if stop.number: break`; number is the signal that came, else None."""

    number = None

    def __enter__(self):
        self._before = {}
        if threading.current_thread() is threading.main_thread():  # Python allows handlers only there
            self._before = {number: signal.signal(number, self._ask) for number in NUMBERS}
        return self

    def _ask(self, number, frame):
        self.number = number
        self._restore()

    def _restore(self):
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def __exit__(self, *_):
        self._restore()
