"""What travels together, from shapes alone: groups, slots, teams and rounds."""

import math

import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType

from dion2_jax._layout import Layout
from dion2_jax._orthogonalize import newton_schulz_table, ns_flops
from dion2_jax._plan import Segment, Slot
from dion2_jax._step import Options
from dion2_jax._transform import plan_of

BF16 = jnp.dtype("bfloat16")
ROWS, COLUMNS = (("x",), ()), ((), ("x",))


def matrix(shape, names, batch=(), **mesh_sizes):
    """A leaf `[*batch, n, c]` on a mesh without devices, rows selected."""
    sizes, axes = tuple(mesh_sizes.values()), tuple(mesh_sizes)
    mesh = AbstractMesh(sizes, axes, axis_types=(AxisType.Auto,) * len(axes))
    lead = len(batch)
    names = ((),) * lead + names
    stack = tuple(range(lead))
    return Layout("w", (*batch, *shape), names, mesh, stack, (lead,), (lead + 1,), True)


def plan(leaves, fraction=1.0, dtypes=None, newton_schulz_fn=None, **options):
    table, scale = newton_schulz_table("polar_express", 5)
    step = Options(
        *("l1", 0, table, scale, "direct", BF16, newton_schulz_fn), per_shard=True
    )
    arguments = {"selection": "local", "share_replicas": True}
    arguments |= {"max_exchange_bytes": 2**28, "fraction": fraction, **options}
    return plan_of(leaves, dtypes or [jnp.float32] * len(leaves), step, **arguments)


def only(items):
    (item,) = items
    return item


def check_every_matrix_is_owned_once(plan):
    """Every matrix of every group lies in one segment, and every slot has room."""
    dealt = []
    for exchange in plan.exchanges:
        for slot in exchange.slots:
            dealt += [
                (s.group, s.first + i) for s in slot.segments for i in range(s.count)
            ]
            matrices = sum(s.count for s in slot.segments)
            assert matrices <= slot.repeat * exchange.owners // slot.team
    expected = [
        (g, i) for g, group in enumerate(plan.groups) for i in range(group.size)
    ]
    assert sorted(dealt) == expected


# --- groups --------------------------------------------------------------------------


def test_leaves_of_one_shape_layout_and_dtype_form_one_group():
    a, b = matrix((64, 128), ROWS, x=8), matrix((64, 128), ROWS, (3,), x=8)
    other = matrix((64, 128), COLUMNS, x=8)
    made = plan([a, b, other, a, a], dtypes=["float32"] * 4 + ["bfloat16"])
    assert [g.leaves for g in made.groups] == [(0, 1, 3), (2,), (4,)]
    assert made.groups[0].counts == (1, 3, 1) and made.groups[0].size == 5
    check_every_matrix_is_owned_once(made)


def test_groups_that_assemble_to_one_shape_share_an_exchange():
    # [16, 128] pieces of rows, [128, 16] of columns: both [128, 128] when whole.
    made = plan([matrix((128, 128), ROWS, x=8), matrix((128, 128), COLUMNS, x=8)])
    assert len(made.groups) == 2
    exchange = only(made.exchanges)
    assert exchange.shape == (128, 128) and exchange.piece == 16 * 128
    # Tall and wide are the same work.
    made = plan([matrix((64, 128), ROWS, x=8), matrix((128, 64), COLUMNS, x=8)])
    assert only(made.exchanges).shape == (64, 128)


def test_a_batch_axis_that_is_sharded_counts_its_local_matrices():
    leaf = matrix((64, 128), ROWS, (6,), e=2, x=4)
    sharded = Layout(
        "w", leaf.shape, (("e",), ("x",), ()), leaf.mesh, (0,), (1,), (2,), True
    )
    made = plan([sharded])
    assert only(made.groups).size == 3
    exchange = only(made.exchanges)
    assert exchange.axes == ("x",) and exchange.replicas == () and exchange.owners == 4


def test_no_matrices_no_group():
    made = plan([matrix((64, 128), ROWS, (0,), x=8)])
    assert made.groups == () and made.exchanges == ()


SLICES = [
    # n_local of 8 shards, fraction, k: max(1, ceil(fraction n_local))
    (16, 0.25, 4),
    (10, 0.25, 3),
    (2, 0.01, 1),
    (1, 0.25, 1),
    (16, 1.0, 16),
]


@pytest.mark.parametrize("n_local, fraction, k", SLICES)
def test_every_shard_sends_its_share_of_slices(n_local, fraction, k):
    group = only(plan([matrix((8 * n_local, 128), ROWS, x=8)], fraction).groups)
    assert (group.n_local, group.k, group.compact) == (n_local, k, None)
    assert group.shape == (8 * k, 128)


def test_exact_selection_over_shards_sends_what_any_shard_may_hold():
    leaf = matrix((80, 128), ROWS, x=8)
    group = only(plan([leaf], 0.25, selection="global").groups)
    assert (group.k, group.compact, group.shape) == (10, 20, (20, 128))
    group = only(plan([leaf], 0.05, selection="global").groups)
    assert (group.k, group.compact) == (4, 4)
    # Without shards of the select axis it is the local selection.
    local = matrix((80, 128), COLUMNS, x=8)
    made = [plan([local], 0.25, selection=s) for s in ("global", "local")]
    assert made[0] == made[1] and only(made[0].groups).compact is None


def test_select_axes_of_several_shards_are_ordered_as_in_the_array():
    # [4@x, 6@y] selected as one axis: shard (i, j) holds rows 2i..2i+1 of 3j..3j+2.
    mesh = matrix((4, 6), ((), ()), x=2, y=2).mesh
    leaf = Layout("w", (4, 6, 32), (("x",), ("y",), ()), mesh, (), (0, 1), (2,), True)
    group = only(plan([leaf], 0.5, selection="global").groups)
    assert group.order == ((4, 2), (6, 2)) and group.n == 24
    first = [6 * row + column for row in (0, 1) for column in (0, 1, 2)]
    assert group.true_order()[:6].tolist() == first
    assert sorted(group.true_order()) == list(range(24))


# --- slots and teams -----------------------------------------------------------------


def test_whole_matrices_first_and_teams_for_the_rest():
    made = plan([matrix((512, 8192), ROWS, (24,), x=16)])
    assert only(made.exchanges).slots == (
        Slot((Segment(0, 0, 16),), team=1, repeat=1),
        Slot((Segment(0, 16, 8),), team=2, repeat=1),
    )
    check_every_matrix_is_owned_once(made)


def test_a_lone_matrix_is_shared_by_all_devices():
    exchange = only(plan([matrix((512, 8192), ROWS, x=8)]).exchanges)
    assert only(exchange.slots) == Slot((Segment(0, 0, 1),), team=8, repeat=1)
    # Padding would send eight matrices' worth and cost the operations of a whole one.
    assert exchange.buffer == 8 * exchange.piece // 8 == 64 * 8192
    flops = [
        ns_flops(*exchange.shape, steps=5, method="direct", dtype=BF16, team=t)
        for t in (1, 8)
    ]
    assert flops[0] / flops[1] == pytest.approx(6.6, rel=1e-12)


def test_small_matrices_are_padded_rather_than_shared():
    exchange = only(plan([matrix((128, 256), ROWS, x=8)]).exchanges)
    assert only(exchange.slots) == Slot((Segment(0, 0, 1),), team=1, repeat=1)
    assert exchange.buffer == 8 * exchange.piece


def test_a_team_divides_the_long_side_of_a_piece():
    # 8 does not divide 4100, 4 does.
    exchange = only(plan([matrix((512, 4100), ROWS, x=8)]).exchanges)
    assert only(exchange.slots).team == 4
    # Nor does any team divide the odd one.
    exchange = only(plan([matrix((512, 8191), ROWS, x=8)]).exchanges)
    assert only(exchange.slots).team == 1


def test_no_team_works_on_a_function_of_whole_matrices():
    made = plan([matrix((512, 8192), ROWS, x=8)], newton_schulz_fn=lambda x: x)
    assert only(only(made.exchanges).slots).team == 1


def test_remainders_of_several_groups_share_slots():
    leaves = [matrix((1024, 1024), ROWS, (9,), x=8)]
    leaves += [matrix((1024, 1024), COLUMNS, (10,), x=8)]
    made = plan(leaves, 0.5)
    assert only(made.exchanges).slots == (
        Slot((Segment(0, 0, 8),), 1, 1),
        Slot((Segment(1, 0, 8),), 1, 1),
        Slot((Segment(0, 8, 1), Segment(1, 8, 2)), 1, 1),
    )
    check_every_matrix_is_owned_once(made)


def test_remainders_that_fill_a_slot_leave_no_padding():
    leaves = [matrix((1024, 1024), ROWS, (13,), x=8)]
    leaves += [matrix((1024, 1024), COLUMNS, (14,), x=8)]
    made = plan(leaves, 0.5)
    assert only(made.exchanges).slots[2:] == (
        Slot((Segment(0, 8, 5), Segment(1, 8, 3)), 1, 1),
        Slot((Segment(1, 11, 3),), 1, 1),
    )
    check_every_matrix_is_owned_once(made)


def test_replicas_own_matrices_too():
    leaf = matrix((64, 128), ROWS, (8,), r=2, x=4)
    exchange = only(plan([leaf]).exchanges)
    assert exchange.replicas == ("r",) and exchange.owners == 8
    assert only(exchange.slots).repeat == 1
    alone = only(plan([leaf], share_replicas=False).exchanges)
    assert alone.replicas == () and alone.owners == 4
    assert only(alone.slots).repeat == 2


def test_both_axes_sharded_exchange_over_both():
    leaf = matrix((64, 128), (("x",), ("y",)), x=2, y=4)
    exchange = only(plan([leaf], 0.25).exchanges)
    assert exchange.axes == ("x", "y") and exchange.sizes == (2, 4)
    assert exchange.shape == (16, 128) and exchange.piece == 8 * 32


# --- rounds --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mebibytes, rounds", [(100, 1), (24, 1), (16, 2), (8, 3), (1, 3)]
)
def test_rounds_keep_to_the_largest_buffer(mebibytes, rounds):
    # 24 matrices of [512, 8192] bfloat16 over 8: 1 MiB a device and matrix, 8 a slot.
    leaf = matrix((512, 8192), ROWS, (24,), x=8)
    made = plan([leaf], max_exchange_bytes=mebibytes * 2**20)
    check_every_matrix_is_owned_once(made)
    assert len(made.exchanges) == rounds
    largest = max(e.buffer for e in made.exchanges) * BF16.itemsize
    # One slot is the least that can travel.
    assert largest <= max(mebibytes, 8) * 2**20
    assert math.fsum(e.buffer for e in made.exchanges) == 24 * 64 * 8192
