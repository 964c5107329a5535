"""The default rule: which leaves are matrices, by rank and by path."""

import jax
import jax.numpy as jnp
from optax.contrib import MuonDimensionNumbers

from dion2_jax._arguments import shown
from dion2_jax._trees import Path, leaf_paths, name_of

# A table of vectors, or the head that reads them out: orthogonalizing trains badly
# (Jordan et al., Muon, 2024; the reference keeps both in its AdamW group).
VECTOR_TABLES = (
    *("embed", "embedding", "embeddings", "embedder", "token_embedder", "wte", "wpe"),
    *("lm_head", "head", "logits", "logits_dense", "unembed", "unembedding", "vocab"),
    *("output_projection", "pos_embedding", "position_embedding", "readout"),
)
# Stacked or per head, biases and the scales of norms have rank 2 and are no matrices.
VECTORS = ("bias", "scale")


def matrix_dimension_numbers(params):
    """`MuonDimensionNumbers` for every matrix of `params`, None for other leaves.

    A leaf is taken for a matrix `[reduction, output]` if it is floating, of rank 2,
    no part of its path names an embedding table, an output head or a norm, and it is
    not called bias or scale; also a kernel
    of rank 3 or more whose sibling bias proves the axes before its last two to be a
    stack: kernel `[L, m, n]` beside bias `[L, n]`, with L different from m. What cannot
    be told by shape (attention kernels, convolutions, stacks without bias) is None and
    goes to AdamW: name its axes in `weight_dimension_numbers`.

    Args:
        params: tree of arrays, or of `jax.ShapeDtypeStruct`.

    Returns:
        The tree with `optax.contrib.MuonDimensionNumbers` or None for every leaf.

    Raises:
        TypeError: a leaf is no array.

    Examples:
        >>> params = {"w": jnp.zeros((4, 6)), "embed": jnp.zeros((9, 4))}
        >>> matrix_dimension_numbers(params)
        {'embed': None, 'w': MuonDimensionNumbers(reduction_axis=0, output_axis=1)}
    """
    paths, leaves, treedef = leaf_paths(params)
    shapes = {
        path: getattr(x, "shape", None) for path, x in zip(paths, leaves, strict=True)
    }
    rule = [matrix_rule(p, x, shapes)[0] for p, x in zip(paths, leaves, strict=True)]
    return jax.tree_util.tree_unflatten(treedef, rule)


def matrix_rule(path: Path, x, shapes: dict) -> tuple[MuonDimensionNumbers | None, str]:
    """The entry of one leaf, and why."""
    if not hasattr(x, "shape") or not hasattr(x, "dtype"):
        raise TypeError(
            f"parameter {name_of(path)!r} is no array but {type(x).__name__}: "
            f"{shown(x)}"
        )
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return None, f"{x.dtype} is not floating"
    if len(x.shape) < 2:
        return None, f"rank {len(x.shape)}"
    table = next((p for p in path if p.lower() in VECTOR_TABLES), None)
    if table is not None:
        return None, f"{table!r} names a table of vectors"
    vector = next((p for p in path[-2:] if p.lower() in VECTORS), None)
    vector = vector or next((p for p in path if "norm" in p.lower()), None)
    if vector is not None:
        return None, f"{vector!r} names a vector"
    if len(x.shape) == 2:
        return MuonDimensionNumbers(0, 1), "rank 2"
    if is_stack(path, x.shape, shapes):
        return MuonDimensionNumbers(-2, -1), "stack, by its bias"
    return None, f"rank {len(x.shape)}: name its axes in weight_dimension_numbers"


def is_stack(path: Path, shape, shapes: dict) -> bool:
    """Whether a sibling bias proves `shape` to be a stack of kernels."""
    at = next((i for i in (-1, -2) if path[i:][:1] == ("kernel",)), None)
    if at is None:
        return False
    bias = shapes.get((*path[:at], "bias", *path[len(path) + at + 1 :]))
    return bias == (*shape[:-2], shape[-1]) and bias != tuple(shape[1:])
