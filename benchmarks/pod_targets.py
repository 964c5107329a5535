"""What a Dion2 step should cost a chip: what it cannot go below, and what is wanted."""

import math

import jax

# (flops, HBM bytes, interconnect bytes, temp bytes, modelled seconds) that Dion2 at
# fraction 0.25 on 1b must not exceed: docs/performance.md.
TARGETS = {
    (16, "sharded"): (6e11, 2.3e9, 1.25e8, 200e6, 6.9e-3),
    (16, "shorter"): (2.4e11, 2.3e9, 8.2e7, 200e6, 4.6e-3),
    (256, "sharded"): (1.3e11, 1.1e8, 5.5e7, 30e6, 1.25e-3),
    (256, "shorter"): (2.4e10, 1.0e8, 1.5e7, 30e6, 0.36e-3),
}


def floors(params, fraction: float, select_axis: str) -> dict[str, float]:
    """What no Dion2 step can go below: perfect shares, no padding, no teams.

    Operations: five direct Newton-Schulz iterations of every selected submatrix, of the
    symmetric products one half, spread evenly (`select_axis` "output" and "reduction"
    as "shorter"). HBM: the gradient read, momentum and
    parameters read and written. Wire: the selected slices in bfloat16, there and back.
    """
    flops = hbm = wire = 0.0
    for leaf in jax.tree.leaves(params):
        mesh = leaf.sharding.mesh
        *batch, rows, columns = leaf.shape
        spec = list(leaf.sharding.spec) + [None] * len(leaf.shape)
        shards = [_shards(mesh, spec[len(batch) + axis]) for axis in (0, 1)]
        along_rows = rows <= columns
        if select_axis == "sharded" and shards[0] != shards[1]:
            along_rows = shards[0] > shards[1]
        selected = (
            (rows * fraction, columns) if along_rows else (rows, columns * fraction)
        )
        r, c = min(selected), max(selected)
        held = math.prod(
            n / _shards(mesh, s) for n, s in zip(leaf.shape, spec, strict=False)
        )
        flops += math.prod(batch) * (15 * r * r * c + 5 * r**3) / mesh.size
        hbm += 5 * held * leaf.dtype.itemsize
        wire += 2 * fraction * held * 2 * (max(shards) > 1)
    return {"flops": flops, "hbm_bytes": hbm, "wire_bytes": wire}


def _shards(mesh, entry) -> int:
    names = entry if isinstance(entry, tuple) else (entry,)
    return math.prod(mesh.shape[name] for name in names if name is not None)
