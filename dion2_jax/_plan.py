"""What travels together: leaves -> groups -> exchanges, in pure Python on shapes.

Leaves with the same local matrix shape, layout and dtype form one group: their scores
and selected slices are stacked. Groups whose selected submatrices have the same shape
on the same devices share one exchange: two all-to-alls. Its matrices are dealt out in
slots: in one slot every device, or every team of devices, gets one matrix.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from dion2_jax._layout import Layout, Names
from dion2_jax._options import Options
from dion2_jax._selection import slice_count

# One v5e chip: operations and interconnect bytes a second. Only their ratio decides.
OPERATIONS_PER_SECOND = 197e12
BYTES_PER_SECOND = 100e9


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

    def first(self, member: Member) -> int:
        """Where a member's slices begin among those of all devices."""
        return member.start if self.whole > self.n else 0

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
    """Everything that is known of one step of the leaves of one mesh before it runs.

    layouts: of every leaf; of a fused one, of every block.
    """

    layouts: tuple[tuple[Layout, ...], ...]
    groups: tuple[Group, ...]
    exchanges: tuple[Exchange, ...]

    def layout(self, member: Member) -> Layout:
        """Of a member's leaf, or block of it."""
        return self.layouts[member.leaf][member.block]


def make_plan(
    layouts: Sequence[tuple[Layout, ...]],
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
    for leaf, (blocks, dtype) in enumerate(zip(layouts, dtypes, strict=True)):
        if math.prod(blocks[0].shape) == 0:
            continue
        for i, layout in enumerate(blocks):
            fields = _fields(layout, fraction, selection)
            key = fields, str(dtype), layout.replicas
            count = math.prod(layout.local_sizes(layout.batch))
            start = layout.block[0] if layout.block else 0
            members.setdefault(key, []).append(Member(leaf, i, count, start))
    groups: list[Group] = []
    classes: dict[tuple, list[int]] = {}
    for (fields, _, replicas), parts in members.items():
        group = Group(tuple(parts), *fields, k=0)
        group = replace(group, k=_sent(group, fraction))
        mesh = layouts[parts[0].leaf][0].mesh
        over = {*group.select_mesh, *group.other_mesh}
        axes = tuple(a for a in (mesh.shape if mesh else ()) if a in over)
        shared = replicas if share_replicas else ()
        piece = group.k * group.c_local
        shape = tuple(sorted(group.shape))
        classes.setdefault((axes, shared, shape, piece), []).append(len(groups))
        groups.append(group)
    exchanges = []
    for (axes, shared, shape, piece), indices in classes.items():
        mesh = layouts[groups[indices[0]].members[0].leaf][0].mesh
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


def _fields(layout: Layout, fraction: float, selection: str) -> tuple:
    """The fields of a layout's group, without members and k."""
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
    return (
        *(n, c, n_local, c_local, select_mesh, other_mesh, shards),
        *(compact, sets, order, joint and not layout.select_is_output),
    )


def _sent(group: Group, fraction: float) -> int:
    """Slices of one matrix that one device sends: the most that any may hold."""
    if group.compact is None:
        return slice_count(fraction, group.n_local)
    part, each = group.n // group.sets, group.compact // group.sets
    most = 0
    for start in {group.first(m) for m in group.members}:
        for first in range(0, group.whole, group.n_local):
            held = 0
            for low in range(start, start + group.n, part):
                inside = min(low + part, first + group.n_local) - max(low, first)
                held += max(0, min(inside, each))
            most = max(most, held)
    return most


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
