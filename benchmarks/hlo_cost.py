"""What one run of an XLA executable costs one device, counted from its text.

Three costs, each with its rule; `docs/performance.md` says why XLA's own totals do
not do.

Operations: two for each multiply-add of a `dot` or `convolution`, times the passes
that its precision asks of a bfloat16 unit (float32 at HIGH 3, at HIGHEST 6), one for
each element of elementwise arithmetic or of a reduction's input.

HBM bytes: operands and results of every instruction that is not inside a fusion,
unless their layout says `S(n)`, memory on the chip. An operand is counted once an
instruction. Counted at what they move, not at what they name: an asynchronous pair
once, at its start; a slice or gather at what it reads; an in-place update at the size
of the update; views and tuples not at all. Padding of tiles is not counted.

Interconnect bytes: the results of collectives, an all-reduce twice.

Bodies of loops count as often as they run; of a conditional, the dearest branch.
"""

import math
import re
from dataclasses import dataclass, replace

import hlo_text
from hlo_text import Array, Computation, Instruction, Module

WIRE_PASSES = {
    "all-to-all": 1,
    "ragged-all-to-all": 1,
    "all-gather": 1,
    "all-reduce": 2,
    "reduce-scatter": 1,
    "collective-permute": 1,
    "collective-broadcast": 1,
}
ARITHMETIC = frozenset(
    "abs add and atan2 cbrt ceil clamp compare cosine divide erf exponential "
    "exponential-minus-one floor log log-plus-one logistic maximum minimum multiply "
    "negate not or power remainder round-nearest-afz round-nearest-even rsqrt select "
    "shift-left shift-right-arithmetic shift-right-logical sign sine sqrt subtract "
    "tan tanh xor".split()
)
VIEWS = frozenset(
    "parameter constant tuple get-tuple-element bitcast after-all partition-id "
    "replica-id opt-barrier add-dependency domain".split()
)
# Custom calls that are notes to the compiler: no code runs for them.
NOTES = frozenset(
    "AllocateBuffer AssumeGatherIndicesInBound AsyncCollectiveDone "
    "AsyncCollectiveStart ConcatBitcast Sharding".split()
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
            case opcode if opcode in VIEWS or target(one) in NOTES:
                return []
            case "async-start":
                return self.computation(self.callee(one))
            case opcode if opcode.endswith(("-done", "-update")):
                if not opcode.startswith("dynamic-update"):
                    return []
        if target(one) == "tpu_custom_call":
            self.unknown.append(f"{one.name}: operations inside a custom kernel")
        kind = one.opcode.removesuffix("-start")
        if kind in WIRE_PASSES:
            return [self.collective(inside, one, kind)]
        counted = line(one, self.flops(inside, one), moved(inside, one))
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
        hbm = sum(read_whole(inside, o) for o in unique(one.operands))
        hbm += sum(a.hbm_bytes for a in results)
        flops = sum(a.size for a in results) if "reduce" in kind else 0
        return line(one, flops, hbm, wire, kind)

    def fusion(self, inside: Computation, one: Instruction) -> list[Line]:
        body = self.callee(one)
        # TPU executables wrap an asynchronous collective in fusions: one that starts
        # it, some that run beside it, one that awaits it. All repeat the collective.
        chained = [i for i in body.instructions.values() if "chain_id=" in i.attributes]
        starts = any(
            target(i) == "AsyncCollectiveStart" for i in body.instructions.values()
        )
        awaits = any(
            target(i) == "AsyncCollectiveDone" for i in body.instructions.values()
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
        hbm = sum(read_whole(inside, o) for o in unique(one.operands))
        hbm += sum(a.hbm_bytes for i, a in enumerate(one.arrays) if i not in aliased)
        wire = sum(a.bytes for a in inner.arrays) * WIRE_PASSES[inner.opcode]
        return replace(line(inner), name=one.name, hbm_bytes=hbm, wire_bytes=wire)

    def fused_flops(self, body: Computation) -> float:
        total = 0.0
        for one in body.instructions.values():
            if one.opcode == "fusion":
                total += self.fused_flops(self.callee(one))
            else:
                total += self.flops(body, one)
        return total

    def flops(self, inside: Computation, one: Instruction) -> float:
        size = one.arrays[0].size if one.arrays else 0
        match one.opcode:
            case "dot":
                return dot_flops(inside, one)
            case "convolution":
                return convolution_flops(inside, one)
            case "reduce" | "reduce-window":
                return inside.instructions[one.operands[0]].arrays[0].size
            case "sort":
                return size * math.ceil(math.log2(max(2, one.arrays[0].dims[-1])))
            case opcode if opcode in ARITHMETIC:
                return size
        return 0


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
        if through or user.opcode.endswith("-done") or target(user) in NOTES:
            found += consumers(inside, user)
        else:
            found.append(user)
    return found


def unique(names) -> list[str]:
    return list(dict.fromkeys(names))


def target(one: Instruction) -> str:
    found = re.search(r'custom_call_target="([^"]*)"', one.attributes)
    return found.group(1) if found else ""


def read_whole(inside: Computation, name: str) -> int:
    return inside.instructions[name].hbm_bytes


def output_aliases(one: Instruction) -> dict[int, int]:
    """Result index -> index of the operand that is the same buffer."""
    found = re.search(r"output_to_operand_aliasing=\{(.*?)\}, \w", one.attributes)
    pairs = re.findall(r"\{(\d*)\}: \((\d+), \{", found.group(0)) if found else []
    return {int(index or 0): int(operand) for index, operand in pairs}


def moved(inside: Computation, one: Instruction) -> int:
    """HBM bytes of a plain instruction."""
    operands = [inside.instructions[o] for o in one.operands]
    match one.opcode:
        case "copy-start" | "slice-start" | "dynamic-slice-start":
            position = 0 if one.opcode == "copy-start" else 1
            arrived = one.arrays[position]
            return arrived.hbm_bytes + arrived.bytes * operands[0].arrays[0].in_hbm
        case "slice" | "dynamic-slice" | "gather":
            read = one.arrays[0].bytes * operands[0].arrays[0].in_hbm
            return read + sum(o.hbm_bytes for o in operands[1:]) + one.hbm_bytes
        case "dynamic-update-slice":
            update = operands[1].arrays[0]
            return update.hbm_bytes + update.bytes * one.arrays[0].in_hbm
        case "scatter":
            updates = operands[len(operands) // 2 + 1 :]
            written = sum(u.arrays[0].bytes for u in updates) * one.arrays[0].in_hbm
            read = operands[len(operands) // 2 :]
            return written + sum(o.hbm_bytes for o in read)
    names = unique(one.operands)
    return sum(read_whole(inside, name) for name in names) + one.hbm_bytes


def reads(module, body: Computation, value: Instruction, arrays) -> int:
    """HBM bytes that a fused computation reads of `value`, which lies in `arrays`."""
    full = sum(array.hbm_bytes for array in arrays)
    if not full:
        return 0
    total = 0
    for user in body.users(value.name):
        is_base = user.operands[0] == value.name
        match user.opcode:
            case "tuple":
                pass
            case "dynamic-update-slice" | "scatter" if is_base:
                pass
            case "bitcast":
                total += reads(module, body, user, arrays)
            case "slice" | "dynamic-slice" | "gather" if is_base:
                item = arrays[0].bytes / max(1, arrays[0].size)
                total += int(user.arrays[0].size * item)
            case "fusion":
                inner = module.computations[user.called("calls")]
                for operand, parameter in zip(
                    user.operands, inner.parameters, strict=True
                ):
                    if operand == value.name:
                        total += reads(module, inner, parameter, arrays)
            case "custom-call" if target(user) in NOTES:
                total += reads(module, body, user, arrays)
            case _:
                total = full
        if total >= full:
            return full
    return total


def writes(module, scopes, name: str, array: Array) -> int:
    """HBM bytes that a fused computation writes for the result `name`.

    `scopes` is the fused computation, or that and the (computation, fusion) pairs
    around it, innermost last: `[(body, None), (inner, fusion in body)]`.
    """
    if not array.in_hbm:
        return 0
    body = scopes[-1][0]
    one = body.instructions[name]
    match one.opcode:
        case "parameter" if len(scopes) == 1:
            return 0
        case "bitcast":
            return writes(module, scopes, one.operands[0], array)
        case "fusion" if len(one.arrays) == 1:
            inner = module.computations[one.called("calls")]
            return writes(module, [*scopes, (inner, one)], inner.root.name, array)
        case "dynamic-update-slice" if updates_in_place(scopes, one):
            return body.instructions[one.operands[1]].arrays[0].bytes
        case "scatter" if updates_in_place(scopes, one):
            return body.instructions[one.operands[2]].arrays[0].bytes
    return array.bytes


def updates_in_place(scopes, one: Instruction) -> bool:
    """Whether a fused update starts from a buffer that the program passed in."""
    scopes, name = list(scopes), one.operands[0]
    while True:
        body, fusion = scopes[-1]
        base = body.instructions[name]
        if base.opcode == "bitcast":
            name = base.operands[0]
        elif base.opcode == "parameter" and fusion is None:
            return True
        elif base.opcode == "parameter":
            name = fusion.operands[int(base.literal)]
            scopes.pop()
        else:
            return False


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


def precision_passes(inside: Computation, one: Instruction) -> int:
    """Products of bfloat16 matrices that one product at this precision takes."""
    operands = [inside.instructions[o].arrays[0].dtype for o in one.operands[:2]]
    if "f32" not in operands:
        return 1
    found = re.search(r"operand_precision=\{([^}]*)\}", one.attributes)
    asked = found.group(1) if found else ""
    return 6 if "highest" in asked else 3 if "high" in asked else 1


def dot_flops(inside: Computation, one: Instruction) -> float:
    left = inside.instructions[one.operands[0]].arrays[0]
    found = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", one.attributes)
    axes = [int(axis) for axis in found.group(1).split(",") if axis] if found else []
    terms = math.prod(left.dims[axis] for axis in axes)
    return 2 * one.arrays[0].size * terms * precision_passes(inside, one)


def convolution_flops(inside: Computation, one: Instruction) -> float:
    """A matrix product on TPU is a convolution; its batch axes are spatial axes."""
    left, right = (inside.instructions[o].arrays[0] for o in one.operands[:2])
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", one.attributes).groups()
    in_axes, kernel_axes, out_axes = (
        dict(zip(labels[i], array.dims, strict=True))
        for i, array in enumerate((left, right, one.arrays[0]))
    )
    found = re.search(r"window=\{([^}]*)\}", one.attributes)
    window = dict(re.findall(r"(\w+)=(\S+)", found.group(1))) if found else {}
    spatial = [axis for axis in labels[0] if axis.isdigit()]
    pairs = 1
    for position, axis in enumerate(spatial):

        def setting(name, default, position=position):
            return window[name].split("x")[position] if name in window else default

        pairs *= valid_pairs(
            in_axes[axis],
            kernel_axes[axis],
            out_axes[axis],
            stride=int(setting("stride", 1)),
            pad=int(setting("pad", "0_0").split("_")[0]),
            lhs_dilate=int(setting("lhs_dilate", 1)),
            rhs_dilate=int(setting("rhs_dilate", 1)),
        )
    batch = out_axes["b"]
    products = batch * kernel_axes["i"] * kernel_axes["o"] * pairs
    return 2 * products * precision_passes(inside, one)


def valid_pairs(size, kernel, out, *, stride, pad, lhs_dilate, rhs_dilate) -> int:
    """(output, kernel) positions of one axis that meet an input, not a hole."""
    last = (size - 1) * lhs_dilate
    pairs = 0
    for o in range(out):
        for k in range(kernel):
            at = o * stride - pad + k * rhs_dilate
            pairs += 0 <= at <= last and at % lhs_dilate == 0
    return pairs
