"""What a Dion2 step cannot go below, and what it must not exceed."""

import math

import jax
from models import MODELS

# (flops, HBM bytes, interconnect bytes, temp bytes, modelled seconds) that Dion2 at
# fraction 0.25 on 1b must not exceed: docs/performance.md.
TARGETS = {
    (16, "sharded"): (6e11, 2.3e9, 1.25e8, 200e6, 6.9e-3),
    (16, "shorter"): (2.4e11, 2.3e9, 8.2e7, 200e6, 4.6e-3),
    (256, "sharded"): (1.3e11, 1.1e8, 5.5e7, 30e6, 1.25e-3),
    (256, "shorter"): (2.4e10, 1.0e8, 1.5e7, 30e6, 0.36e-3),
}


def target(args, chips: int) -> tuple[float, ...] | None:
    """That of the step which `args` ask for, if docs/performance.md has one."""
    step = (args.optimizer, args.model, args.fraction, args.ns_method)
    whole = args.layers in (0, MODELS[args.model].layers)
    v5e = args.topology.startswith("v5e:") and args.mesh == f"fsdp={chips}"
    if step == ("dion2", "1b", 0.25, "direct") and whole and v5e:
        return TARGETS.get((chips, args.select_axis))
    return None


def floors(params, fraction: float, select_axis: str) -> dict[str, float]:
    """What no Dion2 step can go below: perfect shares, no padding, no teams.

    Operations: five direct Newton-Schulz iterations of every selected submatrix, of the
    symmetric products one half, spread evenly (`select_axis` "output" and "reduction"
    as "shorter"). HBM: the gradient read, momentum and parameters read and written.
    Wire: the selected slices in bfloat16, there and back.
    """
    flops = hbm = wire = 0.0
    for leaf in jax.tree.leaves(params):
        *batch, rows, columns = leaf.shape
        shard = leaf.sharding.shard_shape(leaf.shape)
        shards = (rows // shard[-2], columns // shard[-1])
        along_rows = rows <= columns
        if select_axis == "sharded" and shards[0] != shards[1]:
            along_rows = shards[0] > shards[1]
        shares = (fraction, 1) if along_rows else (1, fraction)
        r, c = sorted((rows * shares[0], columns * shares[1]))
        held, chips = math.prod(shard), leaf.sharding.mesh.size
        flops += math.prod(batch) * (15 * r * r * c + 5 * r**3) / chips
        hbm += 5 * held * leaf.dtype.itemsize
        wire += 2 * fraction * held * 2 * (max(shards) > 1)
    return {"flops": flops, "hbm_bytes": hbm, "wire_bytes": wire}
