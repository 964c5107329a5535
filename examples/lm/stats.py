"""stats.csv and slice_norms.png: what Dion2 selects while it trains."""

import csv
import pathlib

from lm.files import StepFile, number, save_figure

# The quantiles of slice norms, in per cent of the slices.
LEVELS = dict(min=0, p10=10, p25=25, p50=50, p75=75, p90=90, max=100)
NUMBERS = (
    *("selected_mass", "wait_mean", "wait_max"),
    *(f"norm_{level}" for level in LEVELS),
    *("orthogonality_error", "update_to_parameter"),
)


def flat(report: dict) -> dict[str, dict]:
    """The numbers of every matrix and group of a report by `dion2_jax.stats`.

    An nnx Param's array is called "value" below it: that is left out.
    """
    leaves = {
        name.removesuffix("/value"): numbers
        for name, numbers in report["leaves"].items()
    }
    return {**report["groups"], **leaves}


class StatsFile(StepFile):
    """stats.csv: for every step logged a row a group ("#0") and a row a matrix."""

    def __init__(self, path: pathlib.Path, resumed_step: int):
        """Opens `path`, cut back to the rows of steps 1 to `resumed_step`."""
        super().__init__(path, ("step", "of", *NUMBERS), resumed_step)

    def write(self, step: int, report: dict) -> None:
        """The rows of one step; `report` as `flat` gives it."""
        self.write_rows(
            (step, of, *(number(numbers[name]) for name in NUMBERS))
            for of, numbers in report.items()
        )


def plot(csv_path: pathlib.Path, png_path: pathlib.Path, title: str) -> None:
    """slice_norms.png: of every group a heat map of slice norms over steps.

    From the bottom up the slices from the lightest to the heaviest, in per cent of
    them; the colour is the norm over the mean slice's.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.colors import LogNorm

    with open(csv_path, newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["of"].startswith("#")]
    if len({row["step"] for row in rows}) < 2:
        return  # a map needs two columns
    groups = list(dict.fromkeys(row["of"] for row in rows))
    figure, panels = pyplot.subplots(
        *(len(groups), 1),
        figsize=(7, 1 + 1.8 * len(groups)),
        sharex=True,
        squeeze=False,
        layout="constrained",
    )
    for axes, group in zip(panels[:, 0], groups, strict=True):
        own = [row for row in rows if row["of"] == group]
        image = axes.pcolormesh(
            [int(row["step"]) for row in own],
            list(LEVELS.values()),
            [[float(row[f"norm_{level}"]) for row in own] for level in LEVELS],
            shading="nearest",
            cmap="RdBu_r",
            norm=LogNorm(1 / 4, 4),
        )
        axes.set(ylabel=f"{group}: slices (%)", ylim=(0, 100))
    panels[-1, 0].set_xlabel("step")
    bar = figure.colorbar(image, ax=panels[:, 0].tolist(), extend="both")
    bar.set_ticks([1 / 4, 1 / 2, 1, 2, 4], labels=["1/4", "1/2", "1", "2", "4"])
    bar.set_label("L1 norm / mean")
    figure.suptitle(title)
    save_figure(figure, png_path)
