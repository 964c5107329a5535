"""The two all-to-alls: selected slices to the matrices' owners, and the results home.

Inside shard_map. A group's stack is `[N, k, c/q]`: k slices a device of N matrices
whose other axis lies on q devices. An owner sees whole submatrices `[repeat, p k, c]`;
in a team of t, an equal block of the long side.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax

from dion2_jax._groups import Group
from dion2_jax._plan import Exchange, Segment, Slot

LANES = 128  # along the minor axis of a TPU's tiles


def send(exchange: Exchange, groups, stacks) -> list[dict[int, jax.Array]]:
    """What this device owns, for every slot and group of the slot.

    Where a slot mixes groups, each group's entry reads the device's piece as one of
    that group; `select_owned` picks the one that is meant.
    """
    columns = []
    for slot in exchange.slots:
        dealt = [
            _to_owners(stacks[s.group], groups[s.group], s, slot, exchange)
            for s in slot.segments
        ]
        width = _piece(exchange, slot, groups)[-1]
        rows = jnp.concatenate([_narrowed(part, width) for part in dealt])
        columns.append(_pad(rows, exchange.owners))
    buffer = _join(columns)
    if exchange.owners > exchange.devices:
        shape = (-1, exchange.devices, *buffer.shape[1:])
        replica = lax.axis_index(exchange.replicas)
        buffer = lax.dynamic_index_in_dim(buffer.reshape(shape), replica, 0, False)
    buffer = _all_to_all(buffer, exchange)
    pieces = _cut(buffer, [_piece(exchange, slot, groups) for slot in exchange.slots])
    return [
        {
            s.group: _assemble(piece, groups[s.group], slot, exchange)
            for s in slot.segments
        }
        for slot, piece in zip(exchange.slots, pieces, strict=True)
    ]


def bring_home(exchange: Exchange, groups, owned) -> list[tuple[Segment, jax.Array]]:
    """Every segment's results `[count, k, c/q]`, from what the owners made of them."""
    shapes = [_piece(exchange, slot, groups) for slot in exchange.slots]
    columns = [
        select_owned(
            exchange,
            slot,
            [
                _narrowed(
                    _disassemble(made[s.group], groups[s.group], slot, exchange),
                    shape[-1],
                )
                for s in slot.segments
            ],
        )
        for slot, made, shape in zip(exchange.slots, owned, shapes, strict=True)
    ]
    buffer = _all_to_all(_join(columns), exchange)
    if exchange.owners > exchange.devices:
        buffer = lax.all_gather(buffer, exchange.replicas, tiled=True)
    home = []
    for slot, rows in zip(exchange.slots, _cut(buffer, shapes), strict=True):
        row = 0
        for s in slot.segments:
            used = _positions(s, slot) * slot.team
            part = lax.slice_in_dim(rows, row, row + used)
            part = _widened(part, *_block(groups[s.group], slot))
            home.append((s, _from_owners(part, groups[s.group], s, slot)))
            row += used
    return home


def select_owned(exchange: Exchange, slot: Slot, choices: list):
    """Of one array for every segment of a slot, the one this device owns."""
    chosen, start = choices[0], 0
    for before, choice in zip(slot.segments, choices[1:], strict=False):
        start += _positions(before, slot)
        chosen = jnp.where(_position(exchange, slot) >= start, choice, chosen)
    return chosen


def owned_rows(exchange: Exchange, slot: Slot, tables: list[jax.Array]) -> jax.Array:
    """`[repeat, k]`: rows of the tables `[N, k]` for the matrices this device owns."""
    dealt = []
    for segment, table in zip(slot.segments, tables, strict=True):
        part = lax.slice_in_dim(table, segment.first, segment.first + segment.count)
        part = _pad(part, _positions(segment, slot) * slot.repeat)
        dealt.append(part.reshape(-1, slot.repeat, table.shape[1]))
    rows = _pad(jnp.concatenate(dealt), exchange.owners // slot.team)
    return lax.dynamic_index_in_dim(rows, _position(exchange, slot), 0, False)


def team_groups(exchange: Exchange, slot: Slot) -> list[list[int]]:
    """Devices of every team, as `axis_index_groups` over replicas and exchange axes."""
    t = slot.team
    return [[*range(i, i + t)] for i in range(0, exchange.owners, t)]


def _positions(segment: Segment, slot: Slot) -> int:
    return -(-segment.count // slot.repeat)


def _position(exchange: Exchange, slot: Slot):
    """Which of the slot's owners (devices or teams) this device belongs to."""
    axes = exchange.replicas + exchange.axes
    return lax.axis_index(axes) // slot.team if axes else 0


def _all_to_all(buffer: jax.Array, exchange: Exchange) -> jax.Array:
    if exchange.devices == 1:
        return buffer
    return lax.all_to_all(buffer, exchange.axes, 0, 0, tiled=True)


def _piece(exchange: Exchange, slot: Slot, groups) -> tuple[int, int, int]:
    """What goes between two devices for a slot: `[repeat, rows, width]`.

    k and c where all its groups agree in them.
    """
    width = _width([_block(groups[s.group], slot) for s in slot.segments])
    return slot.repeat, exchange.piece // slot.team // width, width


def _width(shapes: list[tuple[int, int]]) -> int:
    """The number of columns that pieces `(k, c)` are all brought to."""
    columns = {c for _, c in shapes}
    width = math.gcd(*columns)
    # Blocks narrower than a tile would be padded to one: then row after row, as long
    # rows as divide all pieces.
    by_columns = len(columns) == 1 or width % LANES == 0
    return width if by_columns else math.gcd(*(k * c for k, c in shapes))


def _join(pieces: list[jax.Array]) -> jax.Array:
    """Pieces `[devices, repeat, k, c]` of all slots as one `[devices, rows, width]`.

    A single one stays as it is.
    """
    if len(pieces) == 1:
        return pieces[0]
    width = _width([(x.shape[-2], x.shape[-1]) for x in pieces])
    sheets = [_narrowed(x, width) for x in pieces]
    return jnp.concatenate([x.reshape(len(x), -1, width) for x in sheets], axis=1)


def _cut(buffer: jax.Array, shapes: list[tuple[int, int, int]]) -> list[jax.Array]:
    """The inverse of `_join`, for pieces of these shapes `(repeat, k, c)`."""
    if len(shapes) == 1:
        return [buffer]
    width, start, pieces = buffer.shape[-1], 0, []
    for n, k, c in shapes:
        rows = n * k * c // width
        part = lax.slice_in_dim(buffer, start, start + rows, axis=1)
        start += rows
        pieces.append(_widened(part.reshape(len(part), n, -1, width), k, c))
    return pieces


def _narrowed(x: jax.Array, width: int) -> jax.Array:
    """`[..., k, c]` as `[..., k c / width, width]`.

    Blocks of columns below each other where they fit, which moves a TPU's tiles whole;
    else row after row.
    """
    *lead, k, c = x.shape
    if c == width or c % width:
        return x.reshape(*lead, -1, width)
    x = x.reshape(*lead, k, c // width, width).swapaxes(-3, -2)
    return x.reshape(*lead, -1, width)


def _widened(x: jax.Array, k: int, c: int) -> jax.Array:
    """The inverse of `_narrowed`: `[..., k, c]`."""
    *lead, _, width = x.shape
    if c == width or c % width:
        return x.reshape(*lead, k, c)
    x = x.reshape(*lead, c // width, k, width).swapaxes(-3, -2)
    return x.reshape(*lead, k, c)


def _pad(x: jax.Array, size: int) -> jax.Array:
    """Zero rows up to `size`: zero matrices cost nothing in accuracy."""
    widths = [(0, size - x.shape[0], 0), *((0, 0, 0) for _ in x.shape[1:])]
    return lax.pad(x, jnp.zeros((), x.dtype), widths) if x.shape[0] < size else x


def _to_owners(stack, group: Group, segment: Segment, slot: Slot, exchange: Exchange):
    """`[owners of the segment, repeat, k, c]`, k/t or c/t in a team: what each gets."""
    part = lax.slice_in_dim(stack, segment.first, segment.first + segment.count)
    positions, t, n = _positions(segment, slot), slot.team, slot.repeat
    part = _pad(part, positions * n)
    k, c = part.shape[1:]
    if group.splits_rows():
        part = part.reshape(positions, n, t, k // t, c).transpose(0, 2, 1, 3, 4)
    else:
        part = part.reshape(positions, n, k, t, c // t).transpose(0, 3, 1, 2, 4)
    return part.reshape(positions * t, *part.shape[2:])


def _from_owners(rows, group: Group, segment: Segment, slot: Slot):
    """The inverse of `_to_owners`, without the padding."""
    positions, t, n = _positions(segment, slot), slot.team, slot.repeat
    k, c = group.k, group.c_local
    if group.splits_rows():
        part = rows.reshape(positions, t, n, k // t, c).transpose(0, 2, 1, 3, 4)
    else:
        part = rows.reshape(positions, t, n, k, c // t).transpose(0, 2, 3, 1, 4)
    return lax.slice_in_dim(part.reshape(positions * n, k, c), 0, segment.count)


def _block(group: Group, slot: Slot) -> tuple[int, int]:
    """Local piece of one matrix for one member of a team."""
    if group.splits_rows():
        return group.k // slot.team, group.c_local
    return group.k, group.c_local // slot.team


def _device_axes(group: Group, exchange: Exchange) -> tuple[list[int], list[int]]:
    """Positions of the group's two sets of mesh axes in those of the exchange."""
    at = exchange.axes.index
    return [at(a) for a in group.select_mesh], [at(a) for a in group.other_mesh]


def _assemble(piece, group: Group, slot: Slot, exchange: Exchange):
    """`[repeat, p k, c]` from pieces `[devices, ...]`: slices join, columns join."""
    k, c = _block(group, slot)
    rows, cols = _device_axes(group, exchange)
    d = len(exchange.sizes)
    x = _widened(piece, k, c).reshape(*exchange.sizes, slot.repeat, k, c)
    x = x.transpose(d, *rows, d + 1, *cols, d + 2)
    p, q = (math.prod(exchange.sizes[i] for i in axes) for axes in (rows, cols))
    return x.reshape(slot.repeat, p * k, q * c)


def _disassemble(x, group: Group, slot: Slot, exchange: Exchange):
    """The inverse of `_assemble`."""
    k, c = _block(group, slot)
    rows, cols = _device_axes(group, exchange)
    order = [len(exchange.sizes), *rows, len(exchange.sizes) + 1, *cols]
    order.append(len(exchange.sizes) + 2)
    sizes = (
        *(slot.repeat, *(exchange.sizes[i] for i in rows), k),
        *(*(exchange.sizes[i] for i in cols), c),
    )
    x = x.reshape(sizes).transpose([order.index(i) for i in range(len(order))])
    return x.reshape(exchange.devices, slot.repeat, k, c)
