"""The loop of a run: steps, log, validation, checkpoints, and its endings."""

import argparse
import collections
import dataclasses
import time
from collections.abc import Callable

import jax

from lm.checkpoint import CheckpointError, Checkpoints
from lm.errors import RunError
from lm.metrics import Log
from lm.processes import alike
from lm.stopping import StopRequest
from lm.training import TrainState, value


@dataclasses.dataclass
class Loop:
    """Everything that a run does between its first step and its last."""

    args: argparse.Namespace
    start: int  # steps done before
    train_step: Callable  # (state, batch) -> (state, StepReport)
    val_loss: Callable  # (params, batch) -> loss
    batch: Callable[[int], jax.Array]  # of a step, from 1
    val_batch: Callable[[int], jax.Array]  # of a validation batch, from 0
    checkpoints: Checkpoints
    log: Log | None  # on process 0

    def run(self, state: TrainState) -> int:
        """Trains to the last step, or until asked to stop; returns the exit status."""
        try:
            return self._run(state)
        except OSError:  # of the log: a checkpoint on its way is not lost with it
            self._settle()
            raise
        finally:
            if self.log:
                self.log.close()

    def _run(self, state: TrainState) -> int:
        args, stop = self.args, StopRequest(jax.process_count())
        # Where devices run beside the host, the next step is handed to them before the
        # last one's loss is read, so that they never wait.
        ahead = 0 if jax.default_backend() == "cpu" else 1
        unread = collections.deque()
        self._clock = time.perf_counter()
        for step in range(self.start + 1, args.steps + 1):
            state, report = self.train_step(state, self.batch(step))
            unread.append((step, report))
            stopping, last = stop.after(step), step == args.steps
            validating = last or step % args.val_every == 0
            saving = last or stopping or step % args.checkpoint_every == 0
            while len(unread) > (0 if validating or saving else ahead):
                number, report = unread.popleft()
                validated = validating and number == step
                self._record(number, report, state.params if validated else None)
            if saving:
                self._save(step, state, last or stopping)
            if stopping and not last:
                self._say(f"stopped after step {step}, saved: go on with --resume")
                return 128 + stop.signal
        if self.start >= args.steps:
            done = "1 step is" if self.start == 1 else f"{self.start} steps are"
            self._say(f"nothing to do: {done} done, --steps is {args.steps}")
        elif self.log:
            self.log.finish()
        return 0

    def _record(self, step: int, report, params) -> None:
        loss = value(report.loss)
        now = time.perf_counter()
        tokens = self.args.batch_size * self.args.seq_len
        speed = tokens / (now - self._clock)
        val_loss = None if params is None else self._validate(params)
        if self.log:
            rate = value(report.learning_rate)
            stats = None
            if self.args.log_stats and step % self.args.log_stats == 0:
                stats = jax.tree.map(value, report.stats)
            self.log.step(step, step * tokens, loss, val_loss, rate, speed, stats)
        self._clock = time.perf_counter()  # validation is not counted
        bad = int(value(report.bad_steps))
        if bad >= self.args.max_bad_steps:
            self._settle()
            with alike():
                raise RunError(
                    f"stopped after step {step}: the gradient was not finite {bad} "
                    f"steps in a row (loss {loss}). Those steps changed nothing; a "
                    f"lower --lr may help"
                )

    def _validate(self, params) -> float:
        count = self.args.val_batches
        losses = [self.val_loss(params, self.val_batch(i)) for i in range(count)]
        return sum(float(value(loss)) for loss in losses) / count

    def _save(self, step: int, state: TrainState, finally_: bool) -> None:
        """Starts a checkpoint; failing is a warning, at the end of a run its error."""
        self._settle()  # what went wrong in the one before is not this one's
        try:
            if self.log:
                self.log.sync()  # the rows up to this step come before its checkpoint
            self.checkpoints.save(step, state)
            if finally_:
                self.checkpoints.wait()
        except CheckpointError as error:
            if finally_:
                raise RunError(f"{error}. Older checkpoints are whole") from None
            self._warn(error)
        self._clock = time.perf_counter()

    def _settle(self) -> None:
        try:
            self.checkpoints.wait()
        except CheckpointError as error:
            self._warn(error)

    def _warn(self, error) -> None:
        self._say(f"warning: {error}. Training goes on; older checkpoints are whole")

    def _say(self, line: str) -> None:
        if self.log:
            self.log.say(line)
