"""What one run of an XLA executable costs one device, counted from its text.

Three costs, each with its rule in a file of its own: operations (`hlo_operations`), HBM
bytes (`hlo_hbm`), interconnect bytes (`hlo_wire`); `docs/performance.md` says why XLA's
own totals do not do. Bodies of loops count as often as they run; of a conditional, the
dearest branch.
"""

import re
from dataclasses import dataclass, replace

import hlo_text
from hlo_fusion import flat
from hlo_hbm import fusion_bytes, moved, operand_bytes
from hlo_names import fusion_name, why_copied
from hlo_operations import operations
from hlo_text import NOTES, VIEWS, Computation, Instruction, Module
from hlo_trips import trip_count
from hlo_wire import WIRE_PASSES, kind_of, of_fused, results, wire_bytes


@dataclass(frozen=True)
class Line:
    """One instruction's cost, all its runs together."""

    name: str
    opcode: str
    op_name: str
    result: str
    times: int = 1
    flops: float = 0.0
    hbm_bytes: int = 0
    wire_bytes: int = 0

    def repeated(self, times: int) -> "Line":
        return replace(
            self,
            times=self.times * times,
            flops=self.flops * times,
            hbm_bytes=self.hbm_bytes * times,
            wire_bytes=self.wire_bytes * times,
        )


@dataclass(frozen=True)
class Cost:
    lines: tuple[Line, ...]
    unknown: tuple[str, ...]  # what could not be counted, in words

    @property
    def flops(self) -> float:
        return sum(line.flops for line in self.lines)

    @property
    def hbm_bytes(self) -> int:
        return sum(line.hbm_bytes for line in self.lines)

    @property
    def wire_bytes(self) -> int:
        return sum(line.wire_bytes for line in self.lines)

    @property
    def collectives(self) -> dict[str, dict[str, int]]:
        """Kind -> how many run and the bytes they put on the interconnect."""
        found: dict[str, dict[str, int]] = {}
        for line in self.lines:
            if line.opcode in WIRE_PASSES:
                kind = found.setdefault(line.opcode, {"count": 0, "bytes": 0})
                kind["count"] += line.times
                kind["bytes"] += line.wire_bytes
        return found

    def largest(self, count: int) -> list[Line]:
        return sorted(self.lines, key=lambda line: -line.hbm_bytes)[:count]


def count(text: str) -> Cost:
    """Counts one run of the executable with this text."""
    counter = _Counter(hlo_text.parse(text))
    lines = counter.computation(counter.module.entry)
    return Cost(tuple(lines), tuple(counter.unknown))


def by_instruction(module: Module) -> dict[str, list[Line]]:
    """Of each instruction of the program itself, loops with all their runs."""
    counter = _Counter(module)
    return {
        name: counter.instruction(module.entry, one)
        for name, one in module.entry.instructions.items()
    }


class _Counter:
    def __init__(self, module: Module):
        self.module = module
        self.unknown: list[str] = []

    def computation(self, inside: Computation) -> list[Line]:
        """The lines of a computation that runs as a program: entry, body, branch."""
        lines: list[Line] = []
        for one in inside.instructions.values():
            lines += self.instruction(inside, one)
        return lines

    def instruction(self, inside: Computation, one: Instruction) -> list[Line]:
        match one.opcode:
            case "while":
                return self.loop(inside, one)
            case "conditional":
                return self.dearest_branch(one)
            case "call" | "async-start":
                return self.computation(self.module.body(one))
            case "fusion":
                return _fusion(inside, one, flat(self.module, one))
            case opcode if opcode in VIEWS or one.target in NOTES:
                return []
            case opcode if opcode.endswith(("-done", "-update")):
                return []
        if one.target == "tpu_custom_call":
            self.unknown.append(f"{one.name}: operations inside a custom kernel")
        if kind_of(one):
            return [_collective(inside, one)]
        flops, hbm = operations(inside, one), moved(inside, one)
        counted = _line(one, flops=flops, hbm_bytes=hbm)
        if one.opcode.endswith("-start"):
            counted = replace(counted, op_name=why_copied(inside, one))
        return [counted]

    def loop(self, inside: Computation, one: Instruction) -> list[Line]:
        trips = trip_count(self.module, inside, one)
        if trips is None:
            self.unknown.append(f"{one.name}: trip count of a loop, counted once")
            trips = 1
        body = self.module.computations[one.called("body")]
        return [line.repeated(trips) for line in self.computation(body)]

    def dearest_branch(self, one: Instruction) -> list[Line]:
        listed = re.search(r"branch_computations=\{([^}]*)\}", one.attributes)
        names = re.findall(r"%?([\w.-]+)", listed.group(1)) if listed else []
        names += [one.called("true_computation"), one.called("false_computation")]
        branches = [self.module.computations[n] for n in names if n]
        counted = [self.computation(branch) for branch in branches]
        return max(counted, key=lambda lines: sum(x.hbm_bytes for x in lines))


def _line(one: Instruction, **costs) -> Line:
    result = " ".join(str(array) for array in one.arrays[:3])
    result += " ..." if len(one.arrays) > 3 else ""
    return Line(one.name, one.opcode, one.op_name, result, **costs)


def _collective(inside: Computation, one: Instruction) -> Line:
    """A collective, or the start of one: read, write, and bytes on the wire."""
    kind, arrays = kind_of(one), results(one)
    counted = _line(
        one,
        flops=sum(a.size for a in arrays) if "reduce" in kind else 0,
        hbm_bytes=operand_bytes(inside, one) + sum(a.hbm_bytes for a in arrays),
        wire_bytes=wire_bytes(one),
    )
    return replace(counted, opcode=kind)


def _fusion(inside: Computation, one: Instruction, body: Computation) -> list[Line]:
    """A fusion, and a line for each collective that is one with its neighbours."""
    # TPU executables wrap an asynchronous collective in fusions: one that starts it,
    # some that run beside it, one that awaits it. All repeat the collective.
    fused = body.instructions.values()
    targets = {other.target for other in fused}
    collectives = [other for other in fused if kind_of(other)]
    if "AsyncCollectiveDone" in targets:
        return []
    aliases = _output_aliases(one)
    if "AsyncCollectiveStart" in targets:
        hbm = operand_bytes(inside, one)
        hbm += sum(a.hbm_bytes for i, a in enumerate(one.arrays) if i not in aliases)
        wire = wire_bytes(collectives[0])
        started = _line(collectives[0], hbm_bytes=hbm, wire_bytes=wire)
        return [replace(started, name=one.name)]
    chained = any("chain_id=" in other.attributes for other in fused)
    if not chained:
        aliases = {}
    flops = sum((operations(body, other) for other in fused), 0.0)
    hbm = fusion_bytes(inside, one, body, aliases)
    whole = _line(one, flops=flops, hbm_bytes=hbm)
    lines = [replace(whole, op_name=fusion_name(one, body))]
    for other in collectives if not chained else ():
        kind, wire = of_fused(body, other)
        lines.append(replace(_line(other, wire_bytes=wire), name=one.name, opcode=kind))
    return lines


def _output_aliases(one: Instruction) -> dict[int, int]:
    """Result index -> index of the operand that is the same buffer."""
    found = re.search(r"output_to_operand_aliasing=\{(.*?)\}, \w", one.attributes)
    pairs = re.findall(r"\{(\d*)\}: \((\d+), \{", found.group(0)) if found else []
    return {int(index or 0): int(operand) for index, operand in pairs}
