"""Draws how a step's cost grows: growth_<model>.svg and interconnect.svg.

    python docs/figures/growth.py docs/figures/growth.csv

The CSV holds rows of `python benchmarks/pod.py --csv docs/figures/growth.csv ...`, all
layers compiled, parameters sharded over all chips of one kind.
"""

import argparse
import csv
import sys
from collections import defaultdict
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from models import MODELS  # noqa: E402

# Dark to light with the fraction, so that greyscale keeps the order.
SHADES = {1.0: "#08306b", 0.5: "#2171b5", 0.25: "#6baed6", 0.125: "#9ecae1"}


def read(path) -> list[dict]:
    """Rows with numbers as numbers.

    Raises:
        ValueError: a row is not of what the figures say they show.
    """
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        whole = MODELS[row["model"]].layers
        if int(row["layers"]) != whole:
            raise ValueError(
                f"{path}: a row of {row['model']} with {row['layers']} of {whole} "
                "layers: teams and padding do not grow in proportion; compile all"
            )
        if row["mesh"] != f"fsdp={row['chips']}" or row["optimizer"] == "dion3":
            raise ValueError(
                f"{path}: a row of {row['optimizer']} on {row['mesh']}: only Dion2, "
                f"Muon and AdamW on fsdp={row['chips']} are drawn"
            )
        for column, kind in (
            ("chips", int),
            ("fraction", lambda text: float(text or 0)),
            ("modelled_seconds", float),
            ("wire_bytes", float),
        ):
            row[column] = kind(row[column])
    kinds = {row["topology"].split(":")[0] for row in rows}
    if len(kinds) > 1:
        raise ValueError(f"{path}: rows of several kinds of chips: {sorted(kinds)}")
    return rows


def style(name: str, fraction: float) -> dict:
    """How a curve is drawn: shade and marker by optimizer and fraction."""
    if name == "muon":
        return {"color": "#a63603", "marker": "s", "linestyle": "--", "label": "Muon"}
    if name == "adamw":
        return {"color": "black", "marker": "^", "linestyle": ":", "label": "AdamW"}
    label = f"Dion2, fraction {fraction:g}"
    return {"color": SHADES.get(fraction, "grey"), "marker": "o", "label": label}


def draw_time(model: str, rows: list[dict], folder: Path):
    """Modelled milliseconds a step against chips, one curve an optimizer."""
    curves = defaultdict(list)
    for row in rows:
        if row["model"] == model:
            point = (row["chips"], row["modelled_seconds"] * 1e3)
            curves[row["optimizer"], row["fraction"]].append(point)
    for (name, fraction), points in curves.items():
        chips = [point[0] for point in points]
        if len(set(chips)) < len(chips):
            raise ValueError(
                f"{model}, {name}, fraction {fraction:g}: two rows for one number of "
                f"chips among {sorted(chips)}; keep one layout and one select_axis"
            )
    figure, axes = plt.subplots(figsize=(6, 4))
    for (name, fraction), points in sorted(curves.items(), reverse=True):
        axes.plot(*zip(*sorted(points), strict=True), **style(name, fraction))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = sorted({row["chips"] for row in rows if row["model"] == model})
    axes.set_xticks(ticks, map(str, ticks))
    axes.set_xlabel("chips, parameters sharded over all")
    axes.set_ylabel("modelled time of a step, ms per chip")
    axes.set_title(f"{model}: {MODELS[model]}", fontsize=10)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(folder / f"growth_{model}.svg", metadata={"Date": None})
    plt.close(figure)


def draw_interconnect(rows: list[dict], folder: Path):
    """Interconnect bytes against the fraction, one curve a model and chip count."""
    curves = defaultdict(list)
    for row in rows:
        if row["optimizer"] == "dion2":
            point = (row["fraction"], row["wire_bytes"] / 1e6)
            curves[row["model"], row["chips"]].append(point)
    figure, axes = plt.subplots(figsize=(6, 4))
    for (model, chips), points in sorted(curves.items()):
        if len(points) > 2:
            axes.plot(
                *zip(*sorted(points), strict=True), "o-", label=f"{model}, {chips}"
            )
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("fraction of slices selected")
    axes.set_ylabel("interconnect bytes per chip and step, MB")
    axes.legend(title="model, chips", fontsize=8)
    figure.tight_layout()
    figure.savefig(folder / "interconnect.svg", metadata={"Date": None})
    plt.close(figure)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("csv", type=Path, help="rows written by pod.py --csv")
    args = parser.parse_args(argv)
    matplotlib.rcParams["svg.hashsalt"] = "dion2_jax"  # the same file at every run
    rows = read(args.csv)
    for model in sorted({row["model"] for row in rows}):
        draw_time(model, rows, args.csv.parent)
    draw_interconnect(rows, args.csv.parent)


if __name__ == "__main__":
    main()
