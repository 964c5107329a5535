"""What one run of an XLA executable costs one device, counted from its text.

Three costs; `docs/performance.md` says why XLA's own totals do not do. Operations are
those of hlo_flops.py. HBM bytes are those of hlo_bytes.py, of every instruction that is
not inside a fusion; an asynchronous pair once, at its start; views and tuples not at
all. Interconnect bytes are the results of collectives, an all-reduce twice.

Bodies of loops count as often as they run; of a conditional, the dearest branch.
"""

import re
from dataclasses import dataclass, replace

import hlo_text
from hlo_bytes import moved, read_whole, reads, writes
from hlo_flops import flops
from hlo_text import NOTES, Computation, Instruction, Module

WIRE_PASSES = {
    "all-to-all": 1,
    "ragged-all-to-all": 1,
    "all-gather": 1,
    "all-reduce": 2,
    "reduce-scatter": 1,
    "collective-permute": 1,
    "collective-broadcast": 1,
}
VIEWS = frozenset(
    "parameter constant tuple get-tuple-element bitcast after-all partition-id "
    "replica-id opt-barrier add-dependency domain".split()
)


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
            case "call":
                return self.computation(self.callee(one))
            case "fusion":
                return self.fusion(inside, one)
            case opcode if opcode in VIEWS or one.target in NOTES:
                return []
            case "async-start":
                return self.computation(self.callee(one))
            case opcode if opcode.endswith(("-done", "-update")):
                if not opcode.startswith("dynamic-update"):
                    return []
        if one.target == "tpu_custom_call":
            self.unknown.append(f"{one.name}: operations inside a custom kernel")
        kind = one.opcode.removesuffix("-start")
        if kind in WIRE_PASSES:
            return [self.collective(inside, one, kind)]
        counted = line(one, flops(inside, one), moved(inside, one))
        if one.opcode.endswith("-start"):
            counted = replace(counted, op_name=why_copied(inside, one))
        return [counted]

    def callee(self, one: Instruction) -> Computation:
        name = one.called("calls") or one.called("to_apply")
        return self.module.computations[name]

    def loop(self, inside: Computation, one: Instruction) -> list[Line]:
        trips = hlo_text.trip_count(self.module, inside, one)
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

    def collective(self, inside, one: Instruction, kind: str) -> Line:
        """A collective, or the start of one: read, write, and bytes on the wire."""
        results = list(one.arrays)
        if one.opcode == "collective-permute-start":
            results = results[1:2]
        elif one.opcode.endswith("-start") and kind != "all-reduce":
            results = results[len(one.operands) : 2 * len(one.operands)]
        wire = sum(a.bytes for a in results) * WIRE_PASSES[kind]
        hbm = read_whole(inside, one)
        hbm += sum(a.hbm_bytes for a in results)
        flops = sum(a.size for a in results) if "reduce" in kind else 0
        return line(one, flops, hbm, wire, kind)

    def fusion(self, inside: Computation, one: Instruction) -> list[Line]:
        body = self.callee(one)
        # TPU executables wrap an asynchronous collective in fusions: one that starts
        # it, some that run beside it, one that awaits it. All repeat the collective.
        chained = [i for i in body.instructions.values() if "chain_id=" in i.attributes]
        starts = any(
            i.target == "AsyncCollectiveStart" for i in body.instructions.values()
        )
        awaits = any(
            i.target == "AsyncCollectiveDone" for i in body.instructions.values()
        )
        if awaits:
            return []
        if starts:
            return [self.started(inside, one, body)]
        aliases = output_aliases(one) if chained else {}
        hbm = sum(
            reads(self.module, body, parameter, inside.instructions[operand].arrays)
            for position, (operand, parameter) in enumerate(
                zip(one.operands, body.parameters, strict=True)
            )
            if position not in aliases.values()
        )
        # A variadic reduction is a root of several arrays without being a tuple.
        names = [body.root.name] * len(one.arrays)
        if body.root.opcode == "tuple":
            names = body.root.operands
        hbm += sum(
            writes(self.module, [(body, None)], name, array)
            for index, (name, array) in enumerate(zip(names, one.arrays, strict=True))
            if index not in aliases
        )
        lines = [line(one, self.fused_flops(body), hbm)]
        for inner in body.instructions.values():
            if inner.opcode in WIRE_PASSES and not chained:
                lines.append(wire_of_fused(one, body, inner))
        if not lines[0].op_name:
            lines[0] = replace(lines[0], op_name=body_op_name(self.module, body))
        return lines

    def started(self, inside, one: Instruction, body: Computation) -> Line:
        inner = next(i for i in body.instructions.values() if i.opcode in WIRE_PASSES)
        aliased = output_aliases(one)
        hbm = read_whole(inside, one)
        hbm += sum(a.hbm_bytes for i, a in enumerate(one.arrays) if i not in aliased)
        wire = sum(a.bytes for a in inner.arrays) * WIRE_PASSES[inner.opcode]
        return replace(line(inner), name=one.name, hbm_bytes=hbm, wire_bytes=wire)

    def fused_flops(self, body: Computation) -> float:
        total = 0.0
        for one in body.instructions.values():
            if one.opcode == "fusion":
                total += self.fused_flops(self.callee(one))
            else:
                total += flops(body, one)
        return total


def line(one: Instruction, flops=0.0, hbm_bytes=0, wire_bytes=0, opcode="") -> Line:
    result = " ".join(str(array) for array in one.arrays[:3])
    result += " ..." if len(one.arrays) > 3 else ""
    opcode = opcode or one.opcode
    costs = {"flops": flops, "hbm_bytes": hbm_bytes, "wire_bytes": wire_bytes}
    return Line(one.name, opcode, one.op_name, result, **costs)


def why_copied(inside: Computation, one: Instruction) -> str:
    """The JAX name that an asynchronous copy serves: copies have none of their own."""
    source = inside.instructions[one.operands[0]]
    if source.arrays[0].in_hbm:
        for user in consumers(inside, one):
            if user.opcode not in VIEWS and user.op_name:
                return f"read ahead for {user.op_name}"
        return "read ahead"
    while source.opcode in VIEWS and source.operands:
        source = inside.instructions[source.operands[0]]
    return f"written back from {source.op_name or source.name}"


def consumers(inside: Computation, one: Instruction) -> list[Instruction]:
    """Who uses a value, through views and the ends of asynchronous copies."""
    found: list[Instruction] = []
    for user in inside.users(one.name):
        through = user.opcode in ("bitcast", "get-tuple-element", "tuple", "copy")
        if through or user.opcode.endswith("-done") or user.target in NOTES:
            found += consumers(inside, user)
        else:
            found.append(user)
    return found


def output_aliases(one: Instruction) -> dict[int, int]:
    """Result index -> index of the operand that is the same buffer."""
    found = re.search(r"output_to_operand_aliasing=\{(.*?)\}, \w", one.attributes)
    pairs = re.findall(r"\{(\d*)\}: \((\d+), \{", found.group(0)) if found else []
    return {int(index or 0): int(operand) for index, operand in pairs}


def wire_of_fused(fused: Instruction, body: Computation, inner: Instruction) -> Line:
    """A collective that is one with its neighbours: XLA fuses a reduce-scatter."""
    sliced = [u for u in body.users(inner.name) if u.opcode == "dynamic-slice"]
    if inner.opcode == "all-reduce" and sliced:
        wire = sliced[0].arrays[0].bytes
        return replace(line(inner, opcode="reduce-scatter"), wire_bytes=wire)
    wire = sum(a.bytes for a in inner.arrays) * WIRE_PASSES[inner.opcode]
    return replace(line(inner), name=fused.name, wire_bytes=wire)


def body_op_name(module: Module, body: Computation) -> str:
    """The first JAX name inside a fusion that has none of its own."""
    for one in [body.root, *reversed(body.instructions.values())]:
        if one.op_name:
            return one.op_name
        if one.opcode == "fusion":
            found = body_op_name(module, module.computations[one.called("calls")])
            if found:
                return found
    return ""
