"""Collectives in the compiled step of every layout: python benchmarks/collectives.py

Prints the table of docs/design.md: 16 matrices [64, 128] (where not said otherwise) on
eight emulated devices, fraction 0.25, result elements of every collective.
"""

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import math  # noqa: E402
import re  # noqa: E402

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from jax.sharding import AxisType, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402
from optax.contrib import MuonDimensionNumbers  # noqa: E402

from dion2_jax import scale_by_dion2, shardings_of  # noqa: E402

STACK = MuonDimensionNumbers(-2, -1)
ROUNDS = 16 * 2 * 128  # bytes: half of the buffer of 16 x 2 x 128 bfloat16 numbers
# Words, mesh x and y, partition, arguments, number of matrices, batch axes.
ROWS = (
    ("one device", (1, 1), P(), {}, 16, ()),
    ("reduction axis over x", (8, 1), P("x", None), {}, 16, ()),
    ("output axis over x", (8, 1), P(None, "x"), {}, 16, ()),
    ("one axis over x and y", (4, 2), P(("x", "y"), None), {}, 16, ()),
    ("both axes", (4, 2), P("x", "y"), {}, 16, ()),
    ("over x, select the other axis", (8, 1), P("x"), dict(select_axis="output"),
     16, ()),
    ("batch axis over x", (8, 1), P("x"), {}, 2, (8,)),
    ("over x, replicas along y", (4, 2), P("x"), {}, 16, ()),
    ("replicated", (8, 1), P(), {}, 16, ()),
    ("replicated, share_replicas=False", (8, 1), P(), dict(share_replicas=False),
     16, ()),
    ("over x, global", (8, 1), P("x"), dict(selection="global"), 16, ()),
    ("neurons, output over x", (8, 1), P(None, "x"), dict(neuron_beta2=0.95), 16, ()),
    ("neurons, reduction over x", (8, 1), P("x"), dict(neuron_beta2=0.95), 16, ()),
    ("one matrix, a team of 8", (8, 1), P("x"), {}, 1, ()),
    ("two rounds", (8, 1), P("x"), dict(max_exchange_bytes=ROUNDS), 16, ()),
)  # fmt: skip


def count_collectives(sizes, spec, arguments, count, batch) -> str:
    """Names and result elements of the collectives in the compiled text."""
    mesh = jax.make_mesh(sizes, ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    where = NamedSharding(mesh, spec)
    params = {
        f"w{i}": jax.device_put(jnp.ones((*batch, 64, 128)), where)
        for i in range(count)
    }
    tx = scale_by_dion2(
        param_shardings=shardings_of(params),
        weight_dimension_numbers=STACK,
        **arguments,
    )
    state = tx.init(params)
    text = jax.jit(tx.update).lower(params, state, params).compile().as_text()
    found: dict[str, list[int]] = {}
    kinds = "all-to-all|all-reduce|all-gather|reduce-scatter|collective-permute"
    for result, kind in re.findall(rf" = (.*?) ({kinds})(?:-start)?\(", text):
        shapes = re.findall(r"\w\d+\[([\d,]*)\]", result)
        elements = sum(math.prod(map(int, filter(None, s.split(",")))) for s in shapes)
        found.setdefault(kind, []).append(elements)
    return "; ".join(f"{k} {', '.join(map(str, v))}" for k, v in found.items())


def main():
    print("| layout | collectives: result elements |\n|---|---|")
    for words, *row in ROWS:
        print(f"| {words} | {count_collectives(*row) or 'none'} |", flush=True)


if __name__ == "__main__":
    main()
