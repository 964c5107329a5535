"""The chips whose rates are known, and meshes of them without one at hand."""

import math
from dataclasses import dataclass

import jax
from jax.experimental import topologies


@dataclass(frozen=True)
class Chip:
    """Rates of one chip, per second.

    Published bfloat16 operations and HBM bytes; of the interconnect half the published
    bidirectional bytes, of v5e 1600 Gbps (https://cloud.google.com/tpu/docs/v5e and its
    siblings).
    """

    flops: float
    hbm: float
    wire: float


CHIPS = {
    "v5e": Chip(197e12, 819e9, 100e9),
    "v5p": Chip(459e12, 2765e9, 300e9),
    "v6e": Chip(918e12, 1640e9, 224e9),
}


def chip_of(topology: str) -> Chip:
    """The chip of a topology, such as "v5e:4x4"."""
    generation = topology.split(":")[0]
    if generation not in CHIPS:
        raise ValueError(
            f"--topology {topology}: no rates for {generation!r}, only for "
            f"{', '.join(CHIPS)}"
        )
    return CHIPS[generation]


def make_mesh(topology: str, axes: str):
    """A mesh over all chips of a topology: "v5e:4x4", "fsdp=4,tp=4"."""
    shape = {}
    for pair in axes.split(","):
        name, _, size = pair.partition("=")
        if not size.isdigit():
            raise ValueError(f"--mesh {axes!r}: expected name=size,name=size")
        if name in shape:
            raise ValueError(f"--mesh {axes!r} names {name} twice")
        shape[name] = int(size)
    try:
        description = topologies.get_topology_desc(
            platform="tpu", topology_name=topology
        )
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(
            f"--topology {topology}: libtpu has no such slice ({str(error)[:160]}); "
            f"try v5e:2x2, v5e:4x4, v5e:16x16, v5p:2x2x4 or v6e:8x8"
        ) from error
    chips, asked = len(description.devices), math.prod(shape.values())
    if asked != chips:
        raise ValueError(
            f"--mesh {axes} is {asked} devices and --topology "
            f"{topology} has {chips}: make the product of the axes {chips}"
        )
    return topologies.make_mesh(description, tuple(shape.values()), tuple(shape))
