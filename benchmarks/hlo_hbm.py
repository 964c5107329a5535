"""HBM bytes that one instruction moves.

Operands and results of every instruction that is not inside a fusion, unless their
layout says `S(n)`, memory on the chip. An operand is counted once an instruction.
Counted at what they move, not at what they name: an asynchronous pair once, at its
start; a slice or gather at what it reads; an in-place update at the size of the update;
views and tuples not at all. Padding of tiles is not counted.
"""

from hlo_text import NOTES, Array, Computation, Instruction


def moved(inside: Computation, one: Instruction) -> int:
    """Of an instruction that is neither a fusion nor a collective."""
    operands = inside.operands(one)
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
    return operand_bytes(inside, one) + one.hbm_bytes


def operand_bytes(inside: Computation, one: Instruction) -> int:
    """All of every operand, once though it be named twice."""
    different = dict.fromkeys(one.operands)
    return sum(inside.instructions[name].hbm_bytes for name in different)


def fusion_bytes(
    inside: Computation, one: Instruction, body: Computation, aliases: dict[int, int]
) -> int:
    """Of a fusion with the flat `body`; `aliases`: result -> operand of one buffer."""
    parameters = zip(inside.operands(one), body.parameters, strict=True)
    total = sum(
        _reads(body, parameter, operand.arrays)
        for position, (operand, parameter) in enumerate(parameters)
        if position not in aliases.values()
    )
    # A variadic reduction is a root of several arrays without being a tuple.
    results = [body.root] * len(one.arrays)
    if body.root.opcode == "tuple":
        results = body.operands(body.root)
    return total + sum(
        _writes(body, result, array)
        for index, (result, array) in enumerate(zip(results, one.arrays, strict=True))
        if index not in aliases
    )


def _reads(body: Computation, value: Instruction, arrays: tuple[Array, ...]) -> int:
    """What a fused computation reads of `value`, which lies in `arrays`."""
    full = sum(array.hbm_bytes for array in arrays)
    if not full:
        return 0
    total = 0
    for user in body.users(value.name):
        is_base = user.operands[0] == value.name
        match user.opcode:
            # Handed out. Of an inner fusion, too, though what is done with it there is
            # then missed: see docs/performance.md.
            case "tuple" | "fusion":
                pass
            case "dynamic-update-slice" | "scatter" if is_base:
                pass
            case "slice" | "dynamic-slice" | "gather" if is_base:
                item = arrays[0].bytes / max(1, arrays[0].size)
                total += int(user.arrays[0].size * item)
            case opcode if opcode == "bitcast" or user.target in NOTES:
                total += _reads(body, user, arrays)
            case _:
                return full
    return min(total, full)


def _writes(body: Computation, result: Instruction, array: Array) -> int:
    """What a fused computation writes for one result, which lies in `array`."""
    if not array.in_hbm:
        return 0
    operands = body.operands(result)
    match result.opcode:
        case "parameter":
            return 0
        case "bitcast" | "fusion":
            return _writes(body, operands[0], array)
        case "dynamic-update-slice" if _is_passed_in(body, operands[0]):
            return operands[1].arrays[0].bytes
        case "scatter" if _is_passed_in(body, operands[0]):
            return operands[2].arrays[0].bytes
    return array.bytes


def _is_passed_in(body: Computation, base: Instruction) -> bool:
    """Whether a buffer is the program's, so that a fused update is in place."""
    while base.opcode == "bitcast":
        [base] = body.operands(base)
    return base.opcode == "parameter"
