"""A checkpoint of one process restored by two, and saved by them: one of the two.

python tests/two_processes.py FOLDER PORT PROCESS
"""

import argparse
import os
import pathlib
import sys

ROOT = pathlib.Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

import numpy as np  # noqa: E402

SPECS = {"w": ("fsdp", None), "v": (None, "fsdp"), "b": ()}
SHAPES = {"w": (16, 24), "v": (8, 16), "b": (24,)}


def numbers(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {k: rng.normal(size=s).astype(np.float32) for k, s in SHAPES.items()}


def tree(count: int, seed: int):
    """Parameters and state with momentum, on a mesh of the first `count` devices."""
    import jax
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    from dion2_jax import ScaleByDion2State

    mesh = jax.make_mesh(
        (count,), ("fsdp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:count]
    )

    def place(x, spec=()):
        return jax.make_array_from_callback(
            x.shape, NamedSharding(mesh, PartitionSpec(*spec)), lambda index: x[index]
        )

    params, mu = (
        {k: place(x, SPECS[k]) for k, x in numbers(s).items()}
        for s in (seed, seed + 100)
    )
    return params, ScaleByDion2State(place(np.int32(seed)), mu)


def assert_same_bits(found, wanted) -> None:
    """Every shard that this process has."""
    import jax

    for a, b in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        assert a.dtype == b.dtype and a.sharding == b.sharding
        for x, y in zip(a.addressable_shards, b.addressable_shards, strict=True):
            np.testing.assert_array_equal(x.data, y.data)


def main(folder: pathlib.Path, port: str, process: str) -> None:
    from lm import processes

    os.environ["XLA_FLAGS"] = ""
    processes.emulate(4)
    processes.join(
        argparse.Namespace(
            distributed=True,
            coordinator=f"127.0.0.1:{port}",
            num_processes=2,
            process_id=int(process),
        )
    )
    from lm.checkpoint import Checkpoints

    one, two = (Checkpoints(folder / name, keep=1) for name in ("one", "two"))
    assert_same_bits(one.restore(1, tree(8, seed=0)), tree(8, seed=1))
    two.save(2, tree(8, seed=2))
    two.wait()


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), *sys.argv[2:])
