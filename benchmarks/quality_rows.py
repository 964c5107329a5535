"""The two CSV files of the quality study: a row a run, and the runs' curves."""

import csv
import fcntl
import os
from collections.abc import Sequence
from pathlib import Path

from quality_settings import Run

KEY = ("model", "setting", "learning_rate", "seed", "steps")
RUNS = (*KEY, "fraction", "tokens", "validation_loss", "seconds")
CURVES = (*KEY, "tokens", "training_loss", "validation_loss")


def key(run: Run) -> dict[str, str]:
    """The cells that tell a run from all others."""
    values = (run.model, run.setting, run.rate, run.seed, run.steps)
    return dict(zip(KEY, map(str, values), strict=True))


def run_of(row: dict[str, str]) -> Run:
    """The run of a row."""
    model, setting, rate, seed, steps = (row[name] for name in KEY)
    return Run(model, setting, float(rate), int(seed), int(steps))


class BadRow(Exception):
    """A line that is no row of its table: edited, merged or torn."""


def read(path: Path, columns: Sequence[str]) -> list[dict[str, str]]:
    """All rows; none if there is no such file.

    Raises:
        BadRow: a line has other cells, or none that tell a run and a loss.
    """
    if not path.exists():
        return []
    rows = []
    with open(path, newline="") as file:
        reader = csv.reader(file)
        for cells in reader:
            try:
                if reader.line_num == 1:
                    if tuple(cells) != tuple(columns):
                        raise ValueError
                elif cells:
                    row = dict(zip(columns, cells, strict=True))
                    run_of(row)
                    if row["validation_loss"] or columns is RUNS:
                        float(row["validation_loss"])
                    rows.append(row)
            except ValueError:
                raise BadRow(
                    f"{path}, line {reader.line_num}: expected {','.join(columns)}, "
                    f"found {','.join(cells)}: mend the line or take it out"
                ) from None
    return rows


def finished(path: Path) -> dict[Run, float]:
    """The final validation loss of every run in runs.csv; NaN of a diverged one."""
    return {run_of(row): float(row["validation_loss"]) for row in read(path, RUNS)}


def put(path: Path, columns: Sequence[str], run: Run, rows: list[dict]) -> None:
    """Adds the rows of one run, in place of any it has already.

    A kill leaves the old file or the new one; processes that write to the same folder
    wait for each other.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        kept = [row for row in read(path, columns) if run_of(row) != run]
        beside = path.with_suffix(".csv.tmp")
        with open(beside, "w", newline="") as file:
            writer = csv.DictWriter(file, columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows(kept + [key(run) | row for row in rows])
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    finally:
        os.close(folder)  # and with it the lock
