"""Per-leaf arguments: a tree, a prefix, one entry for all, or a callable.

Entries are found by path, in both directions: an entry may stand above its leaves (a
prefix) or one level below a leaf, as an nnx `Param` keeps its array under "value".
"""

from collections.abc import Callable, Iterator

import jax

from dion2_jax._arguments import call, shown

Path = tuple[str, ...]

EXPECTED = {
    "param_shardings": "a jax.sharding.NamedSharding or PartitionSpec",
    "weight_dimension_numbers": "an optax.contrib.MuonDimensionNumbers",
    "weight_decay_mask": "True or False",
    "weight_splits": "a tuple of ints, the sizes of its blocks along the output",
}


def leaf_paths(tree) -> tuple[list[Path], list, jax.tree_util.PyTreeDef]:
    """Path and value of every leaf, and the tree's structure."""
    leaves, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_used_up)
    return [_plain(path) for path, _ in leaves], [x for _, x in leaves], treedef


def name_of(path: Path) -> str:
    """A path as messages show it."""
    return "/".join(path) or "the parameter"


def resolve_entries(argument: str, given, tree, is_entry: Callable) -> list:
    """The entry of every leaf of `tree`; None where the argument is None.

    Args:
        argument: name of the argument, for messages.
        given: its value.
        tree: parameters, or momentum of the same structure.
        is_entry: whether an object is one entry.

    Raises:
        ValueError: a leaf without an entry, or with several.
        TypeError: an entry of the wrong type.
    """
    paths, _, _ = leaf_paths(tree)
    if callable(given) and not is_entry(given) and jax.tree_util.all_leaves([given]):
        given = call(argument, given, tree)
    if given is None or is_entry(given):
        return [given] * len(paths)
    entries = {
        _plain(path): entry
        for path, entry in jax.tree_util.tree_flatten_with_path(
            given, is_leaf=lambda x: x is None or is_entry(x) or _used_up(x)
        )[0]
    }
    return [_entry(argument, path, entries, is_entry) for path in paths]


def _entry(argument: str, path: Path, entries: dict, is_entry):
    ends = (path[:i] for i in range(len(path), -1, -1))
    above = next((start for start in ends if start in entries), None)
    below = [p for p in entries if p[: len(path)] == path] if above is None else []
    if above is None and len(below) != 1:
        found = "several entries" if below else "no entry"
        raise ValueError(
            f"{argument} has {found} for the parameter {name_of(path)!r}: give a tree "
            f"of the parameters' structure, a prefix of it, or one entry for all; an "
            f"entry is {EXPECTED[argument]}. It has entries for: "
            f"{', '.join(map(name_of, list(entries)[:5]))}"
        )
    entry = entries[below[0] if above is None else above]
    if entry is not None and not is_entry(entry):
        raise TypeError(
            f"{argument} has for the parameter {name_of(path)!r} an entry of type "
            f"{type(entry).__name__}: {shown(entry)}. Give {EXPECTED[argument]}, or "
            f"None"
        )
    return entry


def _used_up(x) -> bool:
    """Whether `x` is a generator or the like: a leaf, of which JAX would warn."""
    return isinstance(x, Iterator)


def _plain(path) -> Path:
    return tuple(
        str(next((getattr(k, a) for a in ("key", "name", "idx") if hasattr(k, a)), k))
        for k in path
    )
