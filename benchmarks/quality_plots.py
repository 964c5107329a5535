"""Table and figures of the quality study, from its CSV files."""

import functools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import quality_rows
from quality_settings import (
    CONFIRMED,
    SEEDS,
    SETTINGS,
    Run,
    Setting,
    best_rate,
    next_rate,
    tuning,
)

LINES = (  # of quality_loss.png
    Setting("adamw"),
    Setting("muon"),
    Setting("dion2", 1.0),
    Setting("dion2", 0.25),
    Setting("dion2", 0.25, ef_decay=0.8),
    Setting("dion2", 0.125),
    Setting("dion3", 0.25),
)
BANDS = "Each at its best learning rate; band: lowest to highest seed"
VARIANTS = {  # of quality_fraction.png: how the lines over fractions differ
    "Dion2": dict(optimizer="dion2"),
    "Dion2, global": dict(optimizer="dion2", selection="global"),
    "Dion2, shorter axis": dict(optimizer="dion2", select_axis="shorter"),
    "Dion2, random slices": dict(optimizer="dion2", score="random"),
    "Dion2, decay 0.8": dict(optimizer="dion2", ef_decay=0.8),
    "Dion2, decay 0.66": dict(optimizer="dion2", ef_decay=0.66),
    "Dion3": dict(optimizer="dion3"),
}


class Tuned(NamedTuple):
    """A setting at its best rate: final loss by seed, and how far the grid has come.

    whole: no rate is left to be tried. edge: the best is the lowest or highest tried.
    """

    rate: float
    losses: dict[int, float]
    whole: bool
    edge: bool

    @property
    def mean(self) -> float:
        return sum(self.losses.values()) / len(self.losses)

    @property
    def bounds(self) -> tuple[float, float]:
        """Lowest and highest loss; a diverged seed's, NaN, is the highest."""
        order = sorted(self.losses.values(), key=lambda x: (math.isnan(x), x))
        return order[0], order[-1]

    def above(self, other: "Tuned | None") -> float:
        """Mean difference over the seeds of both; NaN if there are none."""
        both = self.losses.keys() & other.losses.keys() if other else ()
        away = [self.losses[seed] - other.losses[seed] for seed in both]
        return sum(away) / len(away) if away else math.nan


def tuned(done: Mapping[Run, float], steps: int) -> dict[Setting, Tuned]:
    """Every setting of which the small model has a run."""
    result = {}
    for setting in SETTINGS:
        grid = tuning(done, setting, steps)
        if not grid:
            continue
        rate = best_rate(grid)
        losses = {
            seed: done[run]
            for seed in SEEDS
            if (run := Run("small", setting.name, rate, seed, steps)) in done
        }
        whole = next_rate(setting.first_rate, grid) is None
        edge = rate in (min(grid), max(grid))
        result[setting] = Tuned(rate, losses, whole, edge)
    return result


def table(done: Mapping[Run, float], steps: int) -> str:
    """Markdown: every setting at its best rate, small model, then the large one.

    Lowest mean first. What is above Muon is the mean over the seeds that both have:
    seeds differ, too.
    """
    rows = tuned(done, steps)
    muon = rows.get(Setting("muon"))
    lines = [
        "| setting | best rate | seeds | final loss, mean (lowest to highest) "
        "| above Muon |",
        "|---|---|---|---|---|",
    ]
    order = sorted(rows, key=lambda x: (math.isnan(rows[x].mean), rows[x].mean))
    for setting in order:
        row = rows[setting]
        low, high = row.bounds
        doubt = ", edge of its grid" if row.edge else ""
        rate = f"{row.rate:g}" + (doubt if row.whole else ", grid not finished")
        lines.append(
            f"| {setting.name} | {rate} | {len(row.losses)} "
            f"| {row.mean:.3f} ({low:.3f} to {high:.3f}) | {row.above(muon):+.3f} |"
        )
    large = {
        setting: {
            run.rate: loss
            for run, loss in done.items()
            if (run.model, run.setting, run.steps) == ("large", setting.name, steps)
        }
        for setting in CONFIRMED
    }
    if any(large.values()):
        lines += ["", "| large model | final loss at each rate |", "|---|---|"]
    for setting, losses in large.items():
        if losses:
            cells = ", ".join(f"{loss:.3f} at {x:g}" for x, loss in losses.items())
            lines.append(f"| {setting.name} | {cells} |")
    return "\n".join(lines)


def report(folder: Path, figures: Path, steps: int) -> str:
    """Draws both figures from the CSV files in `folder`; returns the table.

    The figures show finished grids alone: only these have a best rate.
    """
    done = quality_rows.finished(folder / "runs.csv")
    rows = tuned(done, steps)
    if not rows:
        return f"{folder / 'runs.csv'} has no run of {steps} steps yet"
    rows = {setting: row for setting, row in rows.items() if row.whole}
    if not rows:
        return table(done, steps)
    figures.mkdir(parents=True, exist_ok=True)
    curves: dict[Run, list[tuple[int, float]]] = {}
    for row in quality_rows.read(folder / "curves.csv", quality_rows.CURVES):
        if row["validation_loss"]:
            point = int(row["tokens"]), float(row["validation_loss"])
            curves.setdefault(quality_rows.run_of(row), []).append(point)
    _save(_loss_figure(rows, curves, steps), figures / "quality_loss.png")
    _save(_fraction_figure(rows), figures / "quality_fraction.png")
    return table(done, steps)


def _figure():
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(figsize=(7, 4.5), layout="constrained")


def _save(figure, path: Path) -> None:
    from matplotlib import pyplot

    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _loss_figure(rows: dict[Setting, Tuned], curves, steps: int):
    """Validation loss against tokens at the best rate: mean and band over seeds."""
    figure, axes = _figure()
    for i, setting in enumerate(LINES):
        if setting not in rows:
            continue
        row = rows[setting]
        runs = [
            dict(curves.get(Run("small", setting.name, row.rate, seed, steps), []))
            for seed in row.losses
        ]
        marks = common_marks(runs)
        tokens = [mark / 1e6 for mark in marks]
        losses = list(marks.values())
        mean = [sum(x) / len(x) for x in losses]
        axes.plot(tokens, mean, "o-", ms=3, color=f"C{i}", label=_label(setting, row))
        axes.fill_between(
            tokens, list(map(min, losses)), list(map(max, losses)), alpha=0.25,
            color=f"C{i}", lw=0,
        )  # fmt: skip
    axes.set(xlabel="tokens (millions)", ylabel="validation loss (nats per byte)")
    axes.set_title(BANDS)
    axes.legend()
    return figure


def common_marks(runs: list[dict[int, float]]) -> dict[int, list[float]]:
    """{tokens: losses of all runs} where all have one: to where the first diverged.

    A run that has no curve takes no part.
    """
    runs = [run for run in runs if run]
    return {
        mark: [run[mark] for run in runs]
        for mark in (runs[0] if runs else ())
        if all(mark in run and not math.isnan(run[mark]) for run in runs)
    }


def _fraction_figure(rows: dict[Setting, Tuned]):
    """Final loss against fraction, a line a variant, beside Muon and AdamW."""
    figure, axes = _figure()
    for i, (label, fields) in enumerate(VARIANTS.items()):
        kind = functools.partial(Setting, **fields)
        at = {
            setting.fraction: row
            for setting, row in rows.items()
            if setting.fraction and setting == kind(fraction=setting.fraction)
        }
        if not at:
            continue
        # What differs in what is selected would lie on the line without.
        overlaps = {"selection", "select_axis", "score"} & fields.keys()
        aside = 2 ** (0.06 * i) if overlaps else 1.0
        rows_at = [at[f] for f in sorted(at)]
        x = [f * aside for f in sorted(at)]
        low, high = zip(*(row.bounds for row in rows_at), strict=True)
        axes.plot(x, [row.mean for row in rows_at], "o-", ms=4, c=f"C{i}", label=label)
        axes.fill_between(x, low, high, alpha=0.2, color=f"C{i}", lw=0)
        axes.vlines(x, low, high, color=f"C{i}")  # seen at a lone point, too
    for name, style in (("muon", "--"), ("adamw", ":")):
        row = rows.get(Setting(name))
        if row:
            axes.axhline(row.mean, color="0.3", ls=style, label=name)
            axes.axhspan(*row.bounds, color="0.3", alpha=0.15, lw=0)
    axes.set_xscale("log", base=2)
    ticks = (0.125, 0.25, 0.5, 1.0)
    axes.set_xticks(ticks, [f"{f:g}" for f in ticks])
    axes.set(
        xlabel="fraction of the slices selected",
        ylabel="final validation loss (nats per byte)",
    )
    axes.set_title(BANDS)
    axes.legend()
    return figure


def _label(setting: Setting, row: Tuned) -> str:
    seeds = "" if len(row.losses) == len(SEEDS) else f", seeds: {len(row.losses)}"
    return f"{setting.name}, rate {row.rate:g}, {row.mean:.3f}{seeds}"
