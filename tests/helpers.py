"""What several tests share: meshes, placed arrays, distances and tolerances."""

import contextlib
import math
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from dion2_jax import ScaleByDion2State, shardings_of

KINDS = ("auto", "explicit")

# Momentum is one addition and one product a step, each within 2**-24 = 6e-8.
MOMENTUM = 1e-6
# Five float32 iterations amplify the rounding of a product as they do small singular
# values: the recorded trajectories allow 1e-4 for a float32 orthogonalizer.
UPDATE = 1e-4


def make_mesh(sizes, kind, names=("a", "b", "c")):
    """A mesh of the first devices with axes a, b, c, all Auto or all Explicit."""
    count = math.prod(sizes)
    return jax.make_mesh(
        tuple(sizes),
        names[: len(sizes)],
        axis_types=({"auto": AxisType.Auto, "explicit": AxisType.Explicit}[kind],)
        * len(sizes),
        devices=jax.devices()[:count],
    )


def place(x, mesh, spec=(), dtype=None):
    """The array on the mesh, partitioned by the entries of `spec`."""
    x = jnp.asarray(x, dtype)
    return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))


def random_leaves(count, shape, seed=0):
    """{name: float32[*shape]} of `count` random matrices."""
    rng = np.random.default_rng(seed)
    return {f"w{i:02}": rng.normal(size=shape).astype(np.float32) for i in range(count)}


def normal(shape, seed=0):
    """float32[*shape] of Gaussian numbers."""
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def as_it_is(x):
    """In place of Newton-Schulz, where the numbers of that do not matter."""
    return x


def needed_shardings(params, kind):
    """What `param_shardings` must say: everything on Auto axes, nothing on Explicit."""
    return shardings_of(params) if kind == "auto" else None


def maybe_set_mesh(mesh, wanted):
    """`jax.set_mesh(mesh)` or nothing."""
    return jax.set_mesh(mesh) if wanted else contextlib.nullcontext()


def dion2_state(state):
    """The one `ScaleByDion2State` inside an optimizer's state."""
    is_ours = lambda x: isinstance(x, ScaleByDion2State)  # noqa: E731
    (found,) = filter(is_ours, jax.tree.leaves(state, is_leaf=is_ours))
    return found


def with_dion2_state(state, **fields):
    """The optimizer's state with fields of its `ScaleByDion2State` replaced."""
    is_ours = lambda x: isinstance(x, ScaleByDion2State)  # noqa: E731
    return jax.tree.map(
        lambda x: x._replace(**fields) if is_ours(x) else x, state, is_leaf=is_ours
    )


def float64(x):
    """The values as NumPy float64."""
    return np.asarray(x).astype(np.float64)


def assert_copies_agree(x):
    """Devices that hold the same part of an array hold the same bits."""
    seen: dict[str, bytes] = {}
    for shard in x.addressable_shards:
        data = np.asarray(shard.data).tobytes()
        assert seen.setdefault(str(shard.index), data) == data, shard


def relative(found, expected):
    """Largest difference relative to the largest expected entry."""
    return abs(found - expected).max() / max(abs(expected).max(), 1e-30)


def frobenius(found, expected):
    """Norm of the difference relative to that of what is expected."""
    return np.linalg.norm(found - expected) / max(np.linalg.norm(expected), 1e-30)


def cosine(x, y):
    """Of the angle between two arrays."""
    return np.vdot(x, y) / (np.linalg.norm(x) * np.linalg.norm(y))


COLLECTIVE = re.compile(
    r"= \(?(f32\[.*?) (all-to-all|all-gather|all-reduce|reduce-scatter"
    r"|collective-permute)\("
)


def collectives_in(text, iterations=5):
    """Number and result bytes of every kind of collective in compiled float32 text.

    The one loop is that of Newton-Schulz: what is outside of the entry computation is
    in its body, and runs `iterations` times.
    """
    number, size = Counter(), Counter()
    bodies, _, entry = text.partition("\nENTRY ")
    for part, times in ((bodies, iterations), (entry, 1)):
        for results, name in COLLECTIVE.findall(part):
            number[name] += 1
            for dims in re.findall(r"f32\[([\d,]*)\]", results):
                count = math.prod(int(d) for d in dims.split(",") if d)
                size[name] += 4 * count * times
    return number, size


def assert_costs(size, total):
    """The bytes found in compiled text are those that `describe` tells."""
    assert size == {
        name: count
        for name, count in (
            ("all-to-all", total.all_to_all),
            ("all-reduce", total.all_reduce),
            ("all-gather", total.all_gather),
        )
        if count
    }
