"""metrics.csv, loss.png and the progress bar of a run."""

import csv
import os
import pathlib
import sys
from collections.abc import Callable

from tqdm import tqdm

COLUMNS = ("step", "tokens", "loss", "val_loss", "learning_rate", "tokens_per_second")


def number(x) -> str:
    """A float32 in the fewest digits that give the same float32 back."""
    return "" if x is None else str(x)


class MetricsFile:
    """metrics.csv: one row a step, no step twice.

    A row outlives this process once `write` returns; `sync` makes it outlive the
    machine too, and is called before a checkpoint is begun.
    """

    def __init__(self, path: pathlib.Path, resumed_step: int):
        """Opens `path`, cut back to the rows of steps 1 to `resumed_step`."""
        rows = _rows(path, resumed_step)
        beside = path.with_suffix(".csv.tmp")
        with open(beside, "w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([COLUMNS, *rows])
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)  # a kill leaves the old file or the new one
        self._file = open(path, "a", newline="")
        self._writer = csv.writer(self._file, lineterminator="\n")

    def write(self, step, tokens, loss, val_loss, learning_rate, tokens_per_second):
        row = (loss, val_loss, learning_rate, tokens_per_second)
        self._writer.writerow((step, tokens, *map(number, row)))
        self._file.flush()

    def sync(self):
        os.fsync(self._file.fileno())

    def close(self):
        self._file.close()


def _rows(path: pathlib.Path, last_step: int) -> list[list[str]]:
    """Whole rows of `path` up to `last_step`; a row cut short by a kill is dropped."""
    if not last_step or not path.exists():
        return []
    with open(path, newline="") as file:
        lines = file.read().split("\n")[1:-1]  # after the last newline: a torn row
    rows = [line.split(",") for line in lines]
    whole = [row for row in rows if len(row) == len(COLUMNS) and row[0].isdigit()]
    return [row for row in whole if int(row[0]) <= last_step]


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
    beside = png_path.with_suffix(".tmp.png")
    figure.savefig(beside, dpi=120)
    pyplot.close(figure)
    os.replace(beside, png_path)


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
    ):
        self._out, self._facts = out, facts
        self._begin = begin
        self._rows: MetricsFile | None = None
        self._range = (start, steps)
        self._bar: tqdm | None = None  # from the first step on
        self._val_loss: float | None = None

    def step(self, step, tokens, loss, val_loss, learning_rate, speed):
        """One row of metrics.csv; val_loss None: not validated after this step."""
        if self._rows is None:
            self._rows = self._begin()
        self._rows.write(step, tokens, loss, val_loss, learning_rate, round(speed))
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

    def say(self, line: str):
        """Prints a line above the bar."""
        if self._bar is None:
            print(line, flush=True)
        else:
            self._bar.write(line, file=sys.stdout)
            sys.stdout.flush()

    def sync(self):
        self._rows.sync()

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
        if self._rows is not None:
            self._rows.close()

    def _plot(self):
        try:
            plot(
                self._out / "metrics.csv",
                self._out / "loss.png",
                self._facts["unigram_entropy"],
                self._facts["name"],
            )
        except OSError as error:  # a picture is not worth a run
            self.say(f"warning: loss.png could not be written: {error}")
