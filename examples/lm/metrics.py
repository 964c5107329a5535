"""metrics.csv, loss.png and the progress bar of a run."""

import csv
import pathlib
import sys
from collections.abc import Callable, Sequence

from tqdm import tqdm

from lm import stats as stats_file
from lm.files import StepFile, number, save_figure

COLUMNS = ("step", "tokens", "loss", "val_loss", "learning_rate", "tokens_per_second")


class MetricsFile(StepFile):
    """metrics.csv: one row a step."""

    def __init__(self, path: pathlib.Path, resumed_step: int):
        super().__init__(path, COLUMNS, resumed_step)

    def write(self, step, tokens, loss, val_loss, learning_rate, tokens_per_second):
        row = (loss, val_loss, learning_rate, tokens_per_second)
        self.write_rows([(step, tokens, *map(number, row))])


def plot(csv_path: pathlib.Path, png_path: pathlib.Path, unigram: float, title: str):
    """loss.png: training and validation loss against tokens."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with open(csv_path, newline="") as file:
        rows = list(csv.DictReader(file))
    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    tokens = [float(row["tokens"]) for row in rows]
    axes.plot(tokens, [float(row["loss"]) for row in rows], color="0.6", lw=1,
              label="training, one batch")  # fmt: skip
    seen = [row for row in rows if row["val_loss"]]
    axes.plot(
        [float(row["tokens"]) for row in seen],
        [float(row["val_loss"]) for row in seen],
        "o-", color="C0", label="validation",
    )  # fmt: skip
    axes.axhline(unigram, color="C3", ls="--", lw=1, label="unigram entropy")
    axes.set(xlabel="tokens", ylabel="loss (nats per token)", title=title)
    axes.legend()
    save_figure(figure, png_path)


def _bar(start: int, steps: int) -> tqdm:
    """A bar on stderr with the time left."""
    live = sys.stderr.isatty()
    return tqdm(
        total=steps,
        initial=start,
        unit="step",
        dynamic_ncols=live,
        mininterval=0.2 if live else 10.0,  # a log file gets a line now and then
    )


class Log:
    """The log of a run, kept by process 0: a bar on stderr, metrics.csv, loss.png."""

    def __init__(
        self,
        out: pathlib.Path,
        start: int,
        steps: int,
        facts: dict,
        begin: Callable[[], MetricsFile],  # called once the first step is finished
        openers: Sequence[Callable] = (),  # of other loggers, called after `begin`
    ):
        self._out, self._facts = out, facts
        self._begin, self._openers = begin, openers
        self._others: list = []  # with log(step, numbers) and close()
        self._stats: StepFile | None = None
        self._rows: MetricsFile | None = None
        self._range = (start, steps)
        self._bar: tqdm | None = None  # from the first step on
        self._val_loss: float | None = None

    def step(self, step, tokens, loss, val_loss, learning_rate, speed, stats=None):
        """One row of metrics.csv; val_loss None: not validated after this step.

        stats: as `dion2_jax.stats` reports it, or None.
        """
        if self._rows is None:
            self._rows = self._begin()
            self._others = [opener() for opener in self._openers]
            if self._rows.kept < self._range[0]:
                self.say(
                    f"warning: metrics.csv had {self._rows.kept} of the "
                    f"{self._range[0]} steps before: the others are lost"
                )
        self._rows.write(step, tokens, loss, val_loss, learning_rate, round(speed))
        row = (tokens, loss, val_loss, learning_rate, speed)
        numbers = zip(COLUMNS[1:], row, strict=True)
        self._tell(step, {name: float(x) for name, x in numbers if x is not None})
        if stats is not None:
            self._write_stats(step, stats)
        shown = {"loss": f"{loss:.3f}", "tok/s": f"{speed:,.0f}"}
        if val_loss is not None:
            self._val_loss = val_loss
            self._plot()
        if self._val_loss is not None:
            shown["val"] = f"{self._val_loss:.3f}"
        if self._bar is None:
            self._bar = _bar(*self._range)
        self._bar.set_postfix(shown, refresh=False)
        self._bar.update()

    def _write_stats(self, step: int, report: dict):
        rows = stats_file.flat(report)
        if self._stats is None:
            path = self._out / "stats.csv"
            self._stats = stats_file.StatsFile(path, self._range[0])
        self._stats.write(step, rows)
        for of, numbers in rows.items():
            of = of.replace("#", "group")
            self._tell(step, {f"{name}/{of}": float(x) for name, x in numbers.items()})

    def _tell(self, step: int, numbers: dict[str, float]):
        for other in self._others:
            other.log(step, numbers)

    def say(self, line: str):
        """Prints a line above the bar."""
        if self._bar is None:
            print(line, flush=True)
        else:
            self._bar.write(line, file=sys.stdout)
            sys.stdout.flush()

    def sync(self):
        for file in filter(None, (self._rows, self._stats)):
            file.sync()

    def finish(self):
        """Says how it went: validation loss beside the unigram entropy."""
        self.close()
        unigram = self._facts["unigram_entropy"]
        side = "below" if self._val_loss <= unigram else "above"
        print(
            f"validation loss {self._val_loss:.3f} nats per token, "
            f"{abs(unigram - self._val_loss):.3f} {side} the unigram entropy "
            f"{unigram:.3f}; metrics.csv, loss.png and checkpoints are in {self._out}"
        )

    def close(self):
        """Ends the bar and the file; safe to call twice."""
        if self._bar is not None:
            self._bar.close()
        for file in (self._rows, self._stats, *self._others):
            if file is not None:
                file.close()
        self._others = []

    def _plot(self):
        name, unigram = self._facts["name"], self._facts["unigram_entropy"]
        try:
            plot(self._out / "metrics.csv", self._out / "loss.png", unigram, name)
            if self._stats is not None:
                png = self._out / "slice_norms.png"
                stats_file.plot(self._out / "stats.csv", png, name)
        except Exception as error:  # a picture is not worth a run
            self.say(f"warning: a picture could not be written: {error}")
