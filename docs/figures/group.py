"""Draws group.svg, one step of a group of matrices: python docs/figures/group.py"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import Rectangle

P, N, SLICES, K = 4, 4, 8, 2  # devices, matrices, slices a shard, slices selected
SELECTED = (
    ((1, 5), (0, 4), (2, 3), (1, 6)),  # device 0: of matrices 0, 1, 2, 3
    ((0, 6), (2, 7), (4, 6), (3, 5)),
    ((3, 4), (1, 2), (0, 7), (2, 6)),
    ((2, 7), (5, 6), (1, 4), (0, 3)),
)
SHADES = ("#1b3a57", "#2f6f9f", "#7fb2d6", "#c9dff0")  # one a device
HEIGHT, PITCH, TOP = 0.22, 2.2, 8.7


def draw_slices(ax, x, device, colors, hatch=None):
    """One matrix on one device: a rectangle for each slice."""
    for i, color in enumerate(colors):
        low = TOP - PITCH * device - (i + 1) * HEIGHT
        box = Rectangle((x, low), 0.5, HEIGHT, hatch=hatch)
        box.set(facecolor=color, edgecolor="#666666", linewidth=0.5)
        ax.add_patch(box)


def write_title(ax, x, title, shape):
    ax.text(x, 9.55, title, ha="center", size=9, weight="bold")
    ax.text(x, 9.1, shape, ha="center", size=8.5, family="monospace")


def draw_shards(ax, x, title):
    """The shards of all matrices, selected slices in the shade of their device."""
    write_title(ax, x + 1.15, title, "N x [n/p, c]")
    for device, of_matrices in enumerate(SELECTED):
        for matrix, picked in enumerate(of_matrices):
            shade = SHADES[device]
            colors = [shade if i in picked else "white" for i in range(SLICES)]
            draw_slices(ax, x + 0.6 * matrix, device, colors)


def draw_owners(ax, x, title, hatch=None):
    """Device d holds the whole selected submatrix of matrix d."""
    write_title(ax, x + 0.25, title, "[N/p, p k, c]")
    for device in range(P):
        draw_slices(ax, x, device, [SHADES[i // K] for i in range(P * K)], hatch)
        y = TOP - PITCH * device + 0.08
        ax.text(x + 0.25, y, f"matrix {device}", ha="center", size=7)


def draw_arrows(ax, x, width, pairs, label):
    middle = [TOP - PITCH * device - SLICES * HEIGHT / 2 for device in range(P)]
    for start, end in pairs:
        style = dict(arrowstyle="->", linewidth=0.8, color="#444444")
        ax.annotate("", (x + width, middle[end]), (x, middle[start]), arrowprops=style)
    ax.text(x + width / 2, 0.0, label, ha="center", va="top", size=9)


def main():
    plt.rcParams["svg.hashsalt"] = "group"  # the same file at every run
    fig, ax = plt.subplots(figsize=(10.5, 5.0))
    for device in range(P):
        y = TOP - PITCH * device - SLICES * HEIGHT / 2
        ax.text(-0.2, y, f"device {device}", ha="right", va="center", size=9)
    all_pairs = [(i, j) for i in range(P) for j in range(P)]
    own_pairs = [(i, i) for i in range(P)]
    draw_shards(ax, 0.0, "momentum, top k a shard")
    draw_arrows(ax, 2.45, 1.6, all_pairs, "all-to-all\n[N, k, c]")
    draw_owners(ax, 4.3, "whole submatrices")
    draw_arrows(ax, 5.0, 1.2, own_pairs, "Newton-Schulz\nlocal")
    draw_owners(ax, 6.4, "orthogonal", "////")
    draw_arrows(ax, 7.1, 1.6, all_pairs, "all-to-all\n[N, k, c]")
    draw_shards(ax, 8.9, "update, zero elsewhere")
    ax.set(xlim=(-1.4, 11.4), ylim=(-1.0, 10.0))
    ax.axis("off")
    out = Path(__file__).with_suffix(".svg")
    fig.savefig(out, bbox_inches="tight", metadata={"Date": None})


if __name__ == "__main__":
    main()
