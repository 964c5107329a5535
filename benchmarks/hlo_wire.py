"""Interconnect bytes of collectives: their results, an all-reduce twice."""

from hlo_text import Array, Computation, Instruction

WIRE_PASSES = {
    "all-to-all": 1,
    "ragged-all-to-all": 1,
    "all-gather": 1,
    "all-reduce": 2,
    "reduce-scatter": 1,
    "collective-permute": 1,
    "collective-broadcast": 1,
}


def kind_of(one: Instruction) -> str:
    """Of a collective or the start of one; empty for all else."""
    kind = one.opcode.removesuffix("-start")
    return kind if kind in WIRE_PASSES else ""


def results(one: Instruction) -> tuple[Array, ...]:
    """Of a collective; a start's own result lists its operands before them."""
    if one.opcode == "collective-permute-start":
        return one.arrays[1:2]
    if one.opcode.endswith("-start") and one.opcode != "all-reduce-start":
        return one.arrays[len(one.operands) : 2 * len(one.operands)]
    return one.arrays


def wire_bytes(one: Instruction) -> int:
    return sum(a.bytes for a in results(one)) * WIRE_PASSES[kind_of(one)]


def of_fused(body: Computation, one: Instruction) -> tuple[str, int]:
    """Kind and bytes of a collective in a fusion: XLA fuses a reduce-scatter."""
    sliced = [u for u in body.users(one.name) if u.opcode == "dynamic-slice"]
    if one.opcode == "all-reduce" and sliced:
        return "reduce-scatter", sliced[0].arrays[0].bytes
    return one.opcode, wire_bytes(one)
