"""Stopping early without losing work: SIGTERM (preemption) and Ctrl-C save first."""

import signal


class StopRequest:
    """Whether this step is the one after which to save and end.

    Many processes stop after the same step: JAX's preemption service agrees on it, and
    catches SIGTERM by itself.
    """

    def __init__(self, processes: int):
        self._many = processes > 1
        self.signal: int | None = None
        if not self._many:
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, self._asked)

    def _asked(self, number, frame):
        self.signal = number
        signal.signal(number, signal.SIG_DFL)  # a second one ends it at once

    def after(self, step: int) -> bool:
        """To be called once a step, on every process."""
        if self._many:
            from jax.experimental import multihost_utils

            if multihost_utils.reached_preemption_sync_point(step):
                self.signal = signal.SIGTERM
        return self.signal is not None
