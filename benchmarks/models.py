"""Parameter shapes of the benchmarked models, and how a mesh shards them.

Matrices only: they are what a matrix optimizer moves; embeddings and norms cost every
optimizer the same. Shapes are (input, output), as in Flax.
"""

import math
from dataclasses import dataclass

import jax
from jax.sharding import NamedSharding, PartitionSpec

DATA_AXES = ("dp", "data", "replica")  # replicate parameters


@dataclass(frozen=True)
class Model:
    layers: int
    leaves: dict[str, tuple[int, ...]]  # one layer's; the last two axes the matrix
    outputs_local: tuple[str, ...]  # tensor-parallel over their input axis

    def __str__(self) -> str:
        per_layer = sum(math.prod(shape) for shape in self.leaves.values())
        number = self.layers * len(self.leaves)
        return f"{number} matrices, {self.layers * per_layer / 1e9:.2f}e9 parameters"


def _attention(width: int) -> dict[str, tuple[int, ...]]:
    return dict.fromkeys(("q", "k", "v", "o"), (width, width))


MODELS = {
    # docs/performance.md: the model all its figures are about.
    "1b": Model(
        24,
        {**_attention(2048), "up": (2048, 8192), "down": (8192, 2048)},
        ("o", "down"),
    ),
    # As Llama 2 7B: https://arxiv.org/abs/2307.09288
    "7b": Model(
        32,
        {
            **_attention(4096),
            **{"gate": (4096, 11008), "up": (4096, 11008), "down": (11008, 4096)},
        },
        ("o", "down"),
    ),
    # As OLMoE 1B-7B, 64 experts a layer: https://arxiv.org/abs/2409.02060
    "moe": Model(
        16,
        {
            **_attention(2048),
            **{"gate": (64, 2048, 1024), "up": (64, 2048, 1024)},
            "down": (64, 1024, 2048),
        },
        ("o", "down"),
    ),
}


def abstract_params(model: Model, mesh, *, layers=0, stacked=False, dtype="float32"):
    """Parameters as `ShapeDtypeStruct` with shardings: {layer: {name: leaf}}.

    Args:
        model: one of `MODELS`.
        mesh: axes `fsdp`, `tp`, `ep` (experts) shard, those in `DATA_AXES` replicate.
        layers: how many; 0: the model's own number.
        stacked: one leaf a name, `[layers, ...]`, as under `scan` over layers.
        dtype: of the parameters.

    Raises:
        ValueError: an axis of the mesh has another name, or nothing divides by it.
    """
    unknown = set(mesh.axis_names) - {"fsdp", "tp", "ep", *DATA_AXES}
    if unknown:
        raise ValueError(
            f"mesh axis {sorted(unknown)} is not known: name axes fsdp, tp, ep, or one "
            f"of {', '.join(DATA_AXES)}"
        )
    layers = layers or model.layers
    front = (layers,) if stacked else ()

    def leaf(name: str, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
        entries = _spec(name, shape, dict(mesh.shape), name in model.outputs_local)
        spec = PartitionSpec(*[None] * len(front), *entries)
        return jax.ShapeDtypeStruct(
            (*front, *shape), dtype, sharding=NamedSharding(mesh, spec)
        )

    one = {name: leaf(name, shape) for name, shape in model.leaves.items()}
    if stacked:
        return {"layers": one}
    return {f"layer_{i:02}": dict(one) for i in range(layers)}


def _spec(name, shape, sizes, outputs_local: bool) -> list:
    """fsdp on one axis of the matrix, tp on the other, ep on the experts."""
    *batch, rows, columns = shape
    split = {axis: sizes[axis] for axis in ("fsdp", "tp") if sizes.get(axis, 1) > 1}
    axes = ("fsdp", "tp")
    if outputs_local and "tp" in split:
        axes = axes[::-1]
    for pair in (axes, axes[::-1]):
        sharded = [axis if axis in split else None for axis in pair]
        if rows % split.get(pair[0], 1) == 0 and columns % split.get(pair[1], 1) == 0:
            experts = ["ep" if sizes.get("ep", 1) > 1 else None] * len(batch)
            return [*experts, *sharded]
    raise ValueError(f"{name} {shape} divides over {split} along neither axis")


def state_shardings(params, state):
    """Shardings of an optimizer's state: a leaf that lies under a parameter's path
    lies as that parameter does, axes of another size whole; all else is replicated."""
    mesh = jax.tree.leaves(params)[0].sharding.mesh
    known = {
        tuple(map(str, path)): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }
    depth = len(next(iter(known)))

    def sharding(path, leaf):
        param = known.get(tuple(map(str, path[-depth:])))
        if param is None or len(param.shape) != len(leaf.shape):
            return NamedSharding(mesh, PartitionSpec())
        entries = [
            entry if size == whole else None
            for entry, size, whole in zip(
                param.sharding.spec, leaf.shape, param.shape, strict=True
            )
        ]
        return NamedSharding(mesh, PartitionSpec(*entries))

    return jax.tree_util.tree_map_with_path(sharding, state)
