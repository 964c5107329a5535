"""What travels together: leaves -> groups -> exchanges, in pure Python on shapes.

Leaves with the same local matrix shape, layout and dtype form one group: their scores
and selected slices are stacked. Groups whose selected submatrices have the same shape
on the same devices share one exchange: two all-to-alls. Its matrices are dealt out in
slots: in one slot every device, or every team of devices, gets one matrix.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dion2_jax._layout import Layout, Names
from dion2_jax._options import Options
from dion2_jax._selection import slice_count

# One v5e chip: operations and interconnect bytes a second. Only their ratio decides.
OPERATIONS_PER_SECOND = 197e12
BYTES_PER_SECOND = 100e9


@dataclass(frozen=True)
class Group:
    """Matrices that are selected, packed and unpacked together.

    leaves: positions of the leaves; counts: matrices each has on one device.
    n, c: sizes of the select axis and of the other, whole; n_local, c_local: on one
    device. select_mesh, other_mesh: mesh axes that shard them. k: slices of one matrix
    that one device sends. compact: None, or how many of the slices sent are selected
    where devices send different numbers (exact global selection over shards).
    order: for compact groups, sizes and shards of every axis of the select group.
    """

    leaves: tuple[int, ...]
    counts: tuple[int, ...]
    n: int
    c: int
    n_local: int
    c_local: int
    select_mesh: Names
    other_mesh: Names
    k: int
    compact: int | None
    order: tuple[tuple[int, int], ...]

    @property
    def size(self) -> int:
        """Number of matrices, N."""
        return sum(self.counts)

    @property
    def shape(self) -> tuple[int, int]:
        """Selected submatrix, rows along the select axis."""
        return self.compact or self.k * (self.n // self.n_local), self.c

    def splits_rows(self) -> bool:
        """Whether a team splits the select axis of a piece, else the other axis."""
        return self.shape[0] > self.shape[1]

    def can_split(self, team: int) -> bool:
        """Whether `team` devices can each take an equal block of the long side."""
        if not self.splits_rows():
            return self.c_local % team == 0
        # Devices send different numbers of selected slices: they cannot be cut evenly.
        return team == 1 or (self.compact is None and self.k % team == 0)

    def true_order(self) -> np.ndarray:
        """int[n]: flat index along the select group of every shard-major position."""
        fine = [s for size, parts in self.order for s in (parts, size // parts)]
        axes = [*range(0, len(fine), 2), *range(1, len(fine), 2)]
        return np.arange(self.n).reshape(fine).transpose(axes).reshape(-1)


@dataclass(frozen=True)
class Segment:
    """Matrices [first, first + count) of one group."""

    group: int
    first: int
    count: int


@dataclass(frozen=True)
class Slot:
    """`repeat` matrices for every team of `team` devices, dealt out in order."""

    segments: tuple[Segment, ...]
    team: int
    repeat: int


@dataclass(frozen=True)
class Exchange:
    """Two all-to-alls over the mesh axes `axes`, and what is orthogonalized between.

    replicas: mesh axes whose devices share the work. sizes, replica_sizes: of those
    axes. shape: the matrices orthogonalized, short side first. piece: elements that a
    device sends of one whole matrix.
    """

    axes: Names
    sizes: tuple[int, ...]
    replicas: Names
    replica_sizes: tuple[int, ...]
    shape: tuple[int, int]
    piece: int
    slots: tuple[Slot, ...]

    @property
    def devices(self) -> int:
        """Devices that take part in one all-to-all."""
        return math.prod(self.sizes)

    @property
    def owners(self) -> int:
        """Devices among which the matrices are dealt out, replicas included."""
        return self.devices * math.prod(self.replica_sizes)

    @property
    def buffer(self) -> int:
        """Elements of one all-to-all's buffer on one device."""
        return sum(self.devices * s.repeat * self.piece // s.team for s in self.slots)


@dataclass(frozen=True)
class Plan:
    """Everything that is known of one step of the leaves of one mesh before it runs."""

    layouts: tuple[Layout, ...]
    groups: tuple[Group, ...]
    exchanges: tuple[Exchange, ...]


def make_plan(
    layouts: Sequence[Layout],
    dtypes: Sequence,
    options: Options,
    *,
    fraction: float,
    selection: str,
    share_replicas: bool,
    max_exchange_bytes: int,
) -> Plan:
    """The plan for leaves of one mesh.

    Args:
        layouts, dtypes: of the leaves' momentum.
        options: static arguments of the step; they tell what a matrix costs.
        fraction, selection, share_replicas, max_exchange_bytes: as in
            `scale_by_dion2`.
    """
    itemsize = options.dtype.itemsize
    teams = options.newton_schulz_fn is None
    members: dict = {}
    for leaf, (layout, dtype) in enumerate(zip(layouts, dtypes, strict=True)):
        key = _group_key(layout, dtype, fraction, selection)
        members.setdefault(key, []).append(leaf)
    groups: list[Group] = []
    classes: dict[tuple, list[int]] = {}
    for key, leaves in members.items():
        fields, _, replicas = key
        counts = tuple(
            math.prod(layouts[i].local_sizes(layouts[i].batch)) for i in leaves
        )
        group = Group(tuple(leaves), counts, *fields)
        if group.size == 0:
            continue
        mesh = layouts[leaves[0]].mesh
        over = {*group.select_mesh, *group.other_mesh}
        axes = tuple(a for a in (mesh.shape if mesh else ()) if a in over)
        shared = replicas if share_replicas else ()
        piece = group.k * group.c_local
        shape = tuple(sorted(group.shape))
        classes.setdefault((axes, shared, shape, piece), []).append(len(groups))
        groups.append(group)
    exchanges = []
    for (axes, shared, shape, piece), indices in classes.items():
        mesh = layouts[groups[indices[0]].leaves[0]].mesh
        sizes = tuple(mesh.shape[a] for a in axes)
        copies = tuple(mesh.shape[a] for a in shared)
        owners = math.prod(sizes) * math.prod(copies)

        def cost(team, shape=shape, piece=piece, devices=math.prod(sizes)):
            moved = 2 * devices * piece * itemsize / team * (devices > 1)
            reduced = 2 * options.reduced_bytes(shape, team)  # an all-reduce: twice
            return (
                options.operations(shape, team) / OPERATIONS_PER_SECOND
                + (moved + reduced) / BYTES_PER_SECOND
            )

        slots = _deal(indices, groups, owners, cost, teams)
        slot_bytes = math.prod(sizes) * piece * itemsize
        for chunk in _rounds(slots, owners, slot_bytes, max_exchange_bytes):
            exchanges.append(Exchange(axes, sizes, shared, copies, shape, piece, chunk))
    return Plan(tuple(layouts), tuple(groups), tuple(exchanges))


def _group_key(layout: Layout, dtype, fraction: float, selection: str) -> tuple:
    n, c = (
        math.prod(layout.shape[a] for a in axes)
        for axes in (layout.select, layout.other)
    )
    n_local = math.prod(layout.local_sizes(layout.select))
    c_local = math.prod(layout.local_sizes(layout.other))
    k = slice_count(fraction, n_local)
    compact: int | None = None
    order: tuple[tuple[int, int], ...] = ()
    if selection == "global" and n_local < n:
        compact = slice_count(fraction, n)
        # Any shard may hold all that is selected.
        k = min(n_local, compact)
        order = tuple(
            (layout.shape[a], layout.shape[a] // layout.local_sizes([a])[0])
            for a in layout.select
        )
    fields = (
        *(n, c, n_local, c_local),
        *(layout.mesh_axes(layout.select), layout.mesh_axes(layout.other)),
        *(k, compact, order),
    )
    return fields, str(dtype), layout.replicas


def _deal(indices, groups, owners: int, cost, teams: bool) -> list[Slot]:
    """Slots for all matrices of some groups: whole ones first, then the remainder."""
    slots, rest = [], []
    for g in indices:
        full, left = divmod(groups[g].size, owners)
        if full:
            slots.append(Slot((Segment(g, 0, full * owners),), 1, full))
        if left:
            rest.append(Segment(g, full * owners, left))
    while sum(s.count for s in rest) >= owners:
        taken, room = [], owners
        while room:
            segment = rest.pop(0)
            count = min(room, segment.count)
            taken.append(Segment(segment.group, segment.first, count))
            room -= count
            if count < segment.count:
                left = segment.count - count
                rest.insert(0, Segment(segment.group, segment.first + count, left))
        slots.append(Slot(tuple(taken), 1, 1))
    if rest:
        left = sum(s.count for s in rest)
        sizes = [
            t
            for t in range(1, owners // left + 1 if teams else 2)
            if owners % t == 0 and all(groups[s.group].can_split(t) for s in rest)
        ]
        slots.append(Slot(tuple(rest), min(sizes, key=cost), 1))
    return slots


def _rounds(slots, owners: int, slot_bytes: int, most: int) -> list[tuple]:
    """Slots cut into rounds of at most `most` bytes each, one slot at the least."""
    rounds: list[tuple] = []
    current: list[Slot] = []
    room = most
    for slot in slots:
        first, left = slot.segments[0].first, slot.repeat
        each = slot_bytes // slot.team
        while left:
            fits = max(0, min(left, room // each)) if each else left
            if not fits and not current:
                fits = 1
            if not fits:
                rounds.append(tuple(current))
                current, room = [], most
                continue
            segments = slot.segments
            if slot.repeat > 1:
                group = segments[0].group
                segments = (Segment(group, first, fits * owners),)
                first += fits * owners
            current.append(Slot(segments, slot.team, fits))
            room -= fits * each
            left -= fits
    rounds.append(tuple(current))
    return rounds
