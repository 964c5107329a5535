"""One optimizer step compiled for a topology, and its costs per chip."""

import math
import time
from dataclasses import dataclass

import jax
import optax
from hlo_cost import Cost, count
from hlo_overlap import exchanges
from models import state_shardings
from pod_chips import Chip


@dataclass(frozen=True)
class Measured:
    """Of one compiled step, per chip."""

    cost: Cost
    temp_bytes: int
    compile_cpu_seconds: float
    xla_flops: float
    xla_bytes: float
    text: str

    def seconds(self, chip: Chip) -> float:
        return (
            self.cost.flops / chip.flops
            + self.cost.hbm_bytes / chip.hbm
            + self.cost.wire_bytes / chip.wire
        )

    def hidden_seconds(self, chip: Chip) -> float:
        """Of the interconnect's time, what other work runs beside.

        At most: the chip computes on while links and HBM serve the exchange.
        """
        hidden = 0.0
        for one in exchanges(self.text):
            flops = sum(line.flops for line in one.beside)
            hbm = sum(line.hbm_bytes for line in one.beside)
            beside = flops / chip.flops + hbm / chip.hbm
            hidden += min(one.wire_bytes / chip.wire, beside)
        return hidden

    def row(self, chip: Chip) -> dict:
        return {
            "flops": self.cost.flops,
            "hbm_bytes": self.cost.hbm_bytes,
            "xla_bytes_accessed": self.xla_bytes,
            "xla_flops": self.xla_flops,
            "wire_bytes": self.cost.wire_bytes,
            "collectives": self.cost.collectives,
            "temp_bytes": self.temp_bytes,
            "compile_cpu_seconds": round(self.compile_cpu_seconds, 2),
            "modelled_seconds": self.seconds(chip),
            "hidden_seconds": self.hidden_seconds(chip),
            "unknown": list(self.cost.unknown),
        }


def optimizer(name: str, params, *, fraction: float, select_axis: str, ns_method: str):
    """The transformation called `name`, told how `params` lie where it asks."""
    if name == "adamw":
        return optax.adamw(1e-3)
    if name == "muon":
        return optax.contrib.muon(1e-3, muon_weight_dimension_numbers=matrices(params))
    import dion2_jax  # only here: the peers must be measurable without it

    return getattr(dion2_jax, name)(
        1e-3,
        fraction,
        select_axis=select_axis,
        ns_method=ns_method,
        weight_dimension_numbers=matrices(params),
        param_shardings=jax.tree.map(lambda p: p.sharding, params),
    )


def matrices(params):
    """The last two axes of every leaf: (input, output)."""
    return jax.tree.map(
        lambda p: optax.contrib.MuonDimensionNumbers(
            reduction_axis=len(p.shape) - 2, output_axis=len(p.shape) - 1
        ),
        params,
    )


def measure(transformation, params, compiler_options=()) -> Measured:
    """Compiles one step for the topology that `params` lie on, and counts it."""
    state = jax.eval_shape(transformation.init, params)
    state = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=sharding
        ),
        state,
        state_shardings(params, state),
    )
    placed = jax.tree.map(lambda leaf: leaf.sharding, (params, state))

    def step(params, grads, state):
        updates, state = transformation.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    jitted = jax.jit(step, donate_argnums=(0, 2), out_shardings=placed)
    before = time.process_time()
    lowered = jitted.lower(params, params, state)
    compiled = lowered.compile(compiler_options=dict(compiler_options))
    spent = time.process_time() - before
    text = compiled.as_text()
    totals = compiled.cost_analysis() or {}
    return Measured(
        cost=count(text),
        temp_bytes=compiled.memory_analysis().temp_size_in_bytes,
        compile_cpu_seconds=spent,
        xla_flops=totals.get("flops", math.nan),
        xla_bytes=totals.get("bytes accessed", math.nan),
        text=text,
    )
