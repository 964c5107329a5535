"""Tables and pictures that a kill leaves whole."""

import csv
import os
import pathlib
from collections.abc import Iterable, Sequence


def number(x) -> str:
    """A float32 in the fewest digits that give the same float32 back."""
    return "" if x is None else str(x)


class StepFile:
    """A table in CSV whose first column is the step, no step twice.

    A row outlives this process once `write_rows` returns; `sync` makes it outlive the
    machine too, and is called before a checkpoint is begun.
    """

    def __init__(self, path: pathlib.Path, columns: Sequence[str], resumed_step: int):
        """Opens `path`, cut back to the rows of steps 1 to `resumed_step`."""
        rows = _rows(path, len(columns), resumed_step)
        self.kept = len(rows)
        beside = path.with_suffix(".csv.tmp")
        with open(beside, "w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([columns, *rows])
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)  # a kill leaves the old file or the new one
        self._file = open(path, "a", newline="")
        self._writer = csv.writer(self._file, lineterminator="\n")

    def write_rows(self, rows: Iterable[Sequence]) -> None:
        self._writer.writerows(rows)
        self._file.flush()

    def sync(self):
        os.fsync(self._file.fileno())

    def close(self):
        self._file.close()


def _rows(path: pathlib.Path, columns: int, last_step: int) -> list[list[str]]:
    """Whole rows of `path` up to `last_step`; a row cut short by a kill is dropped."""
    if not last_step or not path.exists():
        return []
    with open(path, newline="", errors="replace") as file:  # what a crash left
        lines = file.read().split("\n")[1:-1]  # after the last newline: a torn row
    rows = [line.split(",") for line in lines]
    whole = [row for row in rows if len(row) == columns and row[0].isdigit()]
    return [row for row in whole if int(row[0]) <= last_step]


def save_figure(figure, png_path: pathlib.Path) -> None:
    """Writes and closes a figure: whole, or not at all."""
    from matplotlib import pyplot

    beside = png_path.with_suffix(".tmp.png")
    figure.savefig(beside, dpi=120)
    pyplot.close(figure)
    os.replace(beside, png_path)
