"""The text of an XLA executable as data: computations and their instructions.

`jax.jit(f).lower(...).compile().as_text()` prints one optimized, scheduled program
per device. `parse` reads it into `Module`; nothing here knows what anything costs.
"""

import math
import re
from dataclasses import dataclass, field

ITEM_BITS = {
    "pred": 8,
    **{f"{kind}{bits}": bits for kind in "su" for bits in (2, 4, 8, 16, 32, 64)},
    **{"bf16": 16, "f16": 16, "f32": 32, "f64": 64, "c64": 64, "c128": 128},
    **{"token": 0, "opaque": 0},
}
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
class Array:
    """One array of a result: `bf16[8,128]{1,0:T(8,128)(2,1)S(1)}`."""

    dtype: str
    dims: tuple[int, ...]
    in_hbm: bool

    @property
    def size(self) -> int:
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        bits = 8 if self.dtype.startswith("f8") else ITEM_BITS[self.dtype]
        return (self.size * bits + 7) // 8

    @property
    def hbm_bytes(self) -> int:
        return self.bytes if self.in_hbm else 0

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


@dataclass(frozen=True)
class Instruction:
    name: str
    opcode: str
    arrays: tuple[Array, ...]  # a tuple-shaped result, flattened
    operands: tuple[str, ...]
    literal: str  # what stands between the parentheses
    attributes: str
    is_root: bool

    @property
    def hbm_bytes(self) -> int:
        return sum(array.hbm_bytes for array in self.arrays)

    @property
    def op_name(self) -> str:
        """The JAX name stack that made it, `jit(step)/mul`; empty if XLA made it."""
        found = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.attributes)
        return found.group(1) if found else ""

    @property
    def target(self) -> str:
        """Of a custom call, what it calls."""
        found = re.search(r'custom_call_target="([^"]*)"', self.attributes)
        return found.group(1) if found else ""

    def called(self, keyword: str) -> str:
        found = re.search(rf"\b{keyword}=%?([\w.-]+)", self.attributes)
        return found.group(1) if found else ""


@dataclass
class Computation:
    name: str
    instructions: dict[str, Instruction] = field(default_factory=dict)
    _users: dict[str, list[Instruction]] = field(default_factory=dict)

    @property
    def root(self) -> Instruction:
        return next(i for i in self.instructions.values() if i.is_root)

    @property
    def parameters(self) -> list[Instruction]:
        found = [i for i in self.instructions.values() if i.opcode == "parameter"]
        return sorted(found, key=lambda i: int(i.literal))

    def add(self, one: Instruction) -> None:
        self.instructions[one.name] = one
        for name in dict.fromkeys(one.operands):
            self._users.setdefault(name, []).append(one)

    def users(self, name: str) -> list[Instruction]:
        return self._users.get(name, [])

    def operands(self, one: Instruction) -> list[Instruction]:
        return [self.instructions[name] for name in one.operands]


@dataclass(frozen=True)
class Module:
    computations: dict[str, Computation]
    entry: Computation

    def body(self, one: Instruction) -> Computation:
        """What a fusion or a call runs."""
        return self.computations[one.called("calls") or one.called("to_apply")]


def parse(text: str) -> Module:
    """Reads the text of one executable.

    Raises:
        ValueError: the text holds no entry computation.
    """
    computations: dict[str, Computation] = {}
    entry = current = None
    for line in text.splitlines():
        opens = re.match(r"(ENTRY )?%?([\w.-]+) \(.*\{$", line)
        if opens:
            current = Computation(opens.group(2))
            computations[current.name] = current
            entry = current if opens.group(1) else entry
        elif line.startswith("}"):
            current = None
        elif current is not None and " = " in line:
            current.add(_instruction(line))
    if entry is None:
        raise ValueError("no ENTRY computation: this is not the text of an executable")
    return Module(computations, entry)


def _instruction(line: str) -> Instruction:
    left, right = line.strip().split(" = ", 1)
    shape_end = _closing(right, 0) + 1 if right[0] == "(" else right.index(" ")
    shape, rest = right[:shape_end], right[shape_end:].lstrip()
    opens = rest.index("(")
    closes = _closing(rest, opens)
    literal = rest[opens + 1 : closes]
    return Instruction(
        name=left.removeprefix("ROOT ").lstrip("%"),
        opcode=rest[:opens],
        arrays=tuple(_arrays(shape)),
        operands=tuple(re.findall(r"%([\w.-]+)", literal)),
        literal=literal,
        attributes=rest[closes + 1 :],
        is_root=left.startswith("ROOT "),
    )


def _closing(text: str, opens: int) -> int:
    depth = 0
    for position in range(opens, len(text)):
        depth += {"(": 1, ")": -1}.get(text[position], 0)
        if depth == 0:
            return position
    raise ValueError(f"no closing parenthesis in {text[:80]!r}")


def _arrays(shape: str):
    for dtype, dims, layout in re.findall(r"(\w+)\[([^\]]*)\](\{[^}]*\})?", shape):
        # S(n), n > 0, is memory on the chip: vector, scalar, flags. Plain S is HBM.
        on_chip = re.search(r"S\([1-9]\d*\)", layout)
        sizes = tuple(int(d.lstrip("<=")) for d in dims.split(",") if d)
        yield Array(dtype, sizes, on_chip is None)
