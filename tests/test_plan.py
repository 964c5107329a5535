"""Who gets which matrix: slots, teams and rounds, on shapes alone."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers

from dion2_jax import describe
from dion2_jax._layout import resolve_layout
from dion2_jax._options import make_options
from dion2_jax._plan import make_plan
from dion2_jax._selection import slice_count


def plan(count, shape, devices, *, spec=("fsdp",), most=2**28, select_axis="sharded"):
    mesh = AbstractMesh((devices,), ("fsdp",), axis_types=(AxisType.Auto,))
    x = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))
    layouts = [
        resolve_layout(
            *(f"w{i}", x, x.sharding, MuonDimensionNumbers(0, 1), None, select_axis)
        )
        for i in range(count)
    ]
    options = make_options(
        score="l1",
        seed=0,
        ns_coeffs="polar_express",
        ns_steps=5,
        ns_method="direct",
        ns_dtype=jnp.bfloat16,
        newton_schulz_fn=None,
    )
    return make_plan(
        *(layouts, [jnp.float32] * count, options),
        fraction=0.25,
        selection="local",
        share_replicas=True,
        max_exchange_bytes=most,
    )


def slots(made):
    return [(s.team, s.repeat, s.segments[0].count) for s in made.exchanges[0].slots]


@pytest.mark.parametrize(
    "fraction, n, k", [(0.25, 16, 4), (0.07, 100, 8), (0.01, 5, 1), (1, 7, 7)]
)
def test_slice_count(fraction, n, k):
    assert slice_count(fraction, n) == k


def test_remainder_by_teams_of_two():
    assert slots(plan(24, (2048, 8192), 16)) == [(1, 1, 16), (2, 1, 8)]


def test_lone_matrix_by_a_team_of_eight():
    made = plan(1, (2048, 8192), 8)
    assert made.exchanges[0].shape == (512, 8192)
    assert slots(made) == [(8, 1, 1)]
    padded = 8 * made.exchanges[0].piece
    assert made.exchanges[0].buffer == padded // 8


def test_what_a_sum_moves_through_hbm_is_weighed():
    """The last 8 of [2048, 2048] over 16: whole 1.23 ms, in teams of two 1.27."""
    assert slots(plan(24, (8192, 2048), 16)) == [(1, 1, 16), (1, 1, 8)]


def test_small_matrix_is_padded():
    made = plan(1, (512, 256), 8)
    assert made.exchanges[0].shape == (128, 256)
    assert slots(made) == [(1, 1, 1)]


def test_team_saves_what_its_formula_says():
    """[512, 8192] over 8: all bytes at most 1/3.5, operations 1/6.9 of padding.

    Of X X^T and of its square five eighths are computed, their block columns from the
    diagonal down: 3.25 r r c and 1.25 r r r an iteration.
    """
    mesh = AbstractMesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, P("fsdp"))
    x = jax.ShapeDtypeStruct((2048, 8192), jnp.float32, sharding=sharding)
    team = describe({"w": x}).total
    r, c = 512, 8192
    padded_bytes = 2 * 8 * (r // 8) * c * 2
    assert team.all_to_all == padded_bytes / 8
    assert team.bytes <= padded_bytes / 3.5
    assert team.operations == 5 * (3.25 * r * r * c / 8 + 1.25 * r**3)
    padded = 5 * (3.25 * r * r * c + 1.25 * r**3)
    assert padded / team.operations == pytest.approx(6.87, 0.01)


def test_remainders_of_two_groups_share_a_slot():
    mesh = AbstractMesh((16,), ("fsdp",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, P("fsdp"))
    leaf = lambda *shape: jax.ShapeDtypeStruct(  # noqa: E731
        shape, jnp.float32, sharding=sharding
    )
    up = {f"up{i}": leaf(2048, 8192) for i in range(24)}
    down = {f"down{i}": leaf(8192, 2048) for i in range(24)}
    total = describe(up | down, select_axis="shorter").total
    whole = 5 * (3.25 * 512**2 * 8192 + 1.25 * 512**3)
    assert total.operations == 3 * whole


def test_rounds_hold_at_most_what_is_allowed():
    most = 2**18
    made = plan(96, (512, 256), 8, most=most)
    assert len(made.exchanges) == 3
    assert all(2 * e.buffer <= most for e in made.exchanges)
    counts = [s.count for e in made.exchanges for x in e.slots for s in x.segments]
    assert sum(counts) == 96


def test_one_slot_travels_even_above_the_limit():
    made = plan(16, (512, 256), 8, most=2)
    assert [slots_of.repeat for e in made.exchanges for slots_of in e.slots] == [1, 1]


def test_exact_selection_sends_no_more_than_it_selects():
    """4 of 64 rows are selected, and any device may hold all 4 in its 8 rows."""
    mesh = AbstractMesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, P("fsdp"))
    x = jax.ShapeDtypeStruct((64, 32), jnp.float32, sharding=sharding)
    sent = describe([x] * 8, 1 / 16, selection="global").total.all_to_all
    assert sent == 2 * 8 * 4 * 32 * 2
