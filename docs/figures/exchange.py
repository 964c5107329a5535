"""Draws exchange.png: python docs/figures/exchange.py"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import FancyArrowPatch, Rectangle

DEVICES, SLICES = 4, 6
SELECTED = [(1, 4), (0, 3), (2, 5), (1, 2)]
SHADES = ("#1b3a57", "#2f6f9f", "#7fb2d6", "#c9dff0")


def shards(ax, x, title, note, color_all):
    ax.text(x + 0.6, 7.25, title, ha="center", fontsize=10, weight="bold")
    ax.text(x + 0.6, 6.9, note, ha="center", fontsize=8.5, family="monospace")
    for device in range(DEVICES):
        y = 5.3 - 1.6 * device
        for i in range(SLICES):
            chosen = i in SELECTED[device]
            color = SHADES[device] if chosen else color_all
            box = Rectangle((x, y + 0.2 * (SLICES - 1 - i)), 1.2, 0.2)
            box.set(facecolor=color, edgecolor="#666666", linewidth=0.6)
            ax.add_patch(box)
        ax.text(x - 0.1, y + 0.6, f"device {device}", ha="right", va="center", size=8)


def arrow(ax, start, end):
    style = dict(arrowstyle="-|>", mutation_scale=12, color="#444444", linewidth=1.3)
    ax.add_patch(FancyArrowPatch(start, end, **style))


def main():
    fig, ax = plt.subplots(figsize=(9.5, 4.6))
    shards(ax, 1.0, "momentum", "[N, m@fsdp, n]", "white")
    shards(ax, 8.6, "update", "[N, m@fsdp, n]", "white")
    ax.text(5.1, 7.25, "one owner a matrix", ha="center", fontsize=10, weight="bold")
    ax.text(5.1, 6.9, "[N/p, p k, n]", ha="center", fontsize=8.5, family="monospace")
    for device in range(DEVICES):
        for i in range(2):
            box = Rectangle((4.5, 3.6 - 0.4 * device - 0.2 * i), 1.2, 0.2)
            box.set(facecolor=SHADES[device], edgecolor="#666666", linewidth=0.6)
            ax.add_patch(box)
        arrow(ax, (2.3, 5.9 - 1.6 * device), (4.4, 3.6 - 0.4 * device))
        arrow(ax, (5.8, 3.6 - 0.4 * device), (7.75, 5.9 - 1.6 * device))
    ax.text(5.1, 1.75, "Newton-Schulz\non whole submatrices", ha="center", fontsize=9)
    for x in (3.35, 6.8):
        ax.text(
            x, 6.3, "all-to-all of the\ntop k slices a shard", ha="center", size=8.5
        )
    ax.set(xlim=(0, 10), ylim=(0.2, 7.7))
    ax.axis("off")
    fig.tight_layout()
    fig.savefig(Path(__file__).with_suffix(".png"), dpi=150)


if __name__ == "__main__":
    main()
