"""Which matrices are selected and packed together, and how much of them travels.

Leaves, or blocks of fused ones, with the same local matrix shape, layout and dtype form
one group: their scores and selected slices are stacked. Pure Python on shapes.
"""

import math
from dataclasses import dataclass

import numpy as np

from dion2_jax._layout import Layout
from dion2_jax._selection import slice_count
from dion2_jax._sharding import Names


@dataclass(frozen=True)
class Member:
    """The matrices of one leaf in a group, or those of one block of a fused leaf.

    count: matrices on one device. start: where the block begins along the output.
    """

    leaf: int
    block: int
    count: int
    start: int


@dataclass(frozen=True)
class Group:
    """Matrices that are selected, packed and unpacked together.

    n, c: sizes of the select axis and of the other, whole; n_local, c_local: of what a
    device holds of them, other blocks of a fused leaf included where the output is
    sharded. select_mesh, other_mesh: mesh axes that shard them; shards: devices along
    select_mesh. compact: None, or how many of the slices sent are selected where
    devices send different numbers: the same number out of each of `sets` equal parts.
    order: for compact groups, sizes and shards of every axis of the select group.
    cut: owners cut the columns of a fused leaf's other blocks away. k: slices of one
    matrix that one device sends.
    """

    members: tuple[Member, ...]
    n: int
    c: int
    n_local: int
    c_local: int
    select_mesh: Names
    other_mesh: Names
    shards: int
    compact: int | None
    sets: int
    order: tuple[tuple[int, int], ...]
    cut: bool
    k: int

    @property
    def size(self) -> int:
        """Number of matrices, N."""
        return sum(m.count for m in self.members)

    @property
    def whole(self) -> int:
        """Slices of all devices; n, or all of a fused leaf's."""
        return self.n_local * self.shards

    @property
    def fused(self) -> bool:
        """Whether devices hold slices of other blocks among those of the members."""
        return self.whole > self.n

    def first(self, member: Member) -> int:
        """Where a member's slices begin among those of all devices."""
        return member.start if self.fused else 0

    @property
    def ranked(self) -> tuple[Member, ...]:
        """The members whose scores are summed: of blocks of one leaf the first."""
        if not self.fused:
            return self.members
        return tuple({m.leaf: m for m in reversed(self.members)}.values())[::-1]

    @property
    def shape(self) -> tuple[int, int]:
        """Selected submatrix, rows along the select axis."""
        return self.compact or self.k * self.shards, self.c

    @property
    def takes_all(self) -> bool:
        """Whether all slices are selected, so that nothing needs to be ranked."""
        if self.compact is None:
            return self.k == self.n_local
        return self.compact == self.n

    def splits_rows(self) -> bool:
        """Whether a team splits the select axis of a piece, else the other axis."""
        return self.shape[0] > self.shape[1]

    def can_split(self, team: int) -> bool:
        """Whether `team` devices can each take an equal block of the long side."""
        if team == 1:
            return True
        if not self.splits_rows():
            return not self.cut and self.c_local % team == 0
        # Devices send different numbers of selected slices: they cannot be cut evenly.
        return self.compact is None and self.k % team == 0

    def true_order(self) -> np.ndarray:
        """int[whole]: flat index along the select group of every shard-major slice."""
        fine = [s for size, parts in self.order for s in (parts, size // parts)]
        axes = [*range(0, len(fine), 2), *range(1, len(fine), 2)]
        return np.arange(self.whole).reshape(fine).transpose(axes).reshape(-1)


def empty_group(layout: Layout, fraction: float, selection: str) -> Group:
    """The group of a layout, still without members, and with k = 0."""
    n, c = (
        math.prod(layout.shape[a] for a in axes)
        for axes in (layout.select, layout.other)
    )
    n_local, c_local = (
        math.prod(layout.local_sizes(axes)) for axes in (layout.select, layout.other)
    )
    select_mesh, other_mesh = (
        layout.mesh_axes(axes) for axes in (layout.select, layout.other)
    )
    shards = math.prod(layout.mesh.shape[a] for a in select_mesh)
    if layout.block and layout.select_is_output:
        n = layout.block[1]
        n_local = n if layout.apart else n_local
    elif layout.block:
        c = layout.block[1]
        c_local = c if layout.apart else c_local
    joint = layout.block is not None and not layout.apart
    compact: int | None = None
    sets = 1
    order: tuple[tuple[int, int], ...] = ()
    if shards > 1 and (selection == "global" or (joint and layout.select_is_output)):
        sets = shards if selection == "local" else 1
        compact = sets * slice_count(fraction, n // sets)
        order = tuple(
            (layout.shape[a], layout.shape[a] // layout.local_sizes([a])[0])
            for a in layout.select
        )
    cut = joint and not layout.select_is_output
    return Group(
        *((), n, c, n_local, c_local, select_mesh, other_mesh, shards),
        *(compact, sets, order, cut, 0),
    )


def slices_sent(group: Group, fraction: float) -> int:
    """Slices of one matrix that one device sends: the most that any may hold."""
    if group.compact is None:
        return slice_count(fraction, group.n_local)
    part, each = group.n // group.sets, group.compact // group.sets
    most = 0
    for start in {group.first(m) for m in group.members}:
        for first in range(0, group.whole, group.n_local):
            low = max(first, start) - start
            high = min(first + group.n_local, start + group.n) - start
            held = 0
            while low < high:  # one set after the other
                end = min(high, low // part * part + part)
                held += min(end - low, each)
                low = end
            most = max(most, held)
    return most
