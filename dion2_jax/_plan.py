"""What travels together: leaves -> groups -> exchanges, in pure Python on shapes.

Groups on the same devices whose selected submatrices have the same shape, transposed
or not, and whose pieces have as many elements share one exchange: two all-to-alls. Its
matrices are dealt out in slots: in one slot every device, or every team of devices,
gets the same number of them.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dion2_jax._groups import Group, Member, empty_group, slices_sent
from dion2_jax._layout import Layout
from dion2_jax._options import Options
from dion2_jax._sharding import Names

# One v5e chip: operations, interconnect and HBM bytes a second. Their ratios decide.
OPERATIONS_PER_SECOND = 197e12
BYTES_PER_SECOND = 100e9
HBM_BYTES_PER_SECOND = 819e9


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

    def ranking(self, index: int) -> int:
        """The group whose scores a group reads: fused leaves are scored once."""
        leaves = [m.leaf for m in self.groups[index].ranked]
        for i, group in enumerate(self.groups[:index]):
            if group.fused and not group.takes_all and self.groups[index].fused:
                if [m.leaf for m in group.ranked] == leaves:
                    return i
        return index

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
            key = empty_group(layout, fraction, selection), str(dtype), layout.replicas
            count = math.prod(layout.local_sizes(layout.batch))
            start = layout.block[0] if layout.block else 0
            members.setdefault(key, []).append(Member(leaf, i, count, start))
    groups: list[Group] = []
    classes: dict[tuple, list[int]] = {}
    for (group, _, replicas), parts in members.items():
        group = replace(group, members=tuple(parts))
        group = replace(group, k=slices_sent(group, fraction))
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
            reduced = options.reduced_bytes(shape, team)
            # A collective's operand and result are each written and read once.
            return (
                options.operations(shape, team) / OPERATIONS_PER_SECOND
                + (moved + 2 * reduced) / BYTES_PER_SECOND  # an all-reduce: twice
                + 4 * (moved + reduced) / HBM_BYTES_PER_SECOND
            )

        slots = _deal(indices, groups, owners, cost, teams)
        slot_bytes = math.prod(sizes) * piece * itemsize
        # What does not travel is bounded by no buffer.
        most = max_exchange_bytes if owners > 1 else sys.maxsize
        for chunk in _rounds(slots, owners, slot_bytes, most):
            exchanges.append(Exchange(axes, sizes, shared, copies, shape, piece, chunk))
    return Plan(tuple(layouts), tuple(groups), tuple(exchanges))


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
