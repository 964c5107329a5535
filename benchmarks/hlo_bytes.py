"""Bytes that one instruction of an XLA executable moves through HBM.

Operands and results, unless their layout says `S(n)`, memory on the chip. An operand
is counted once. Counted at what they move, not at what they name: an asynchronous copy
at its start; a slice or gather at what it reads; an in-place update at the size of the
update. Padding of tiles is not counted.
"""

from hlo_text import NOTES, Array, Computation, Instruction


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
    return read_whole(inside, one) + one.hbm_bytes


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
            case "custom-call" if user.target in NOTES:
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


def read_whole(inside: Computation, one: Instruction) -> int:
    """HBM bytes of all operands, each once."""
    names = dict.fromkeys(one.operands)
    return sum(inside.instructions[name].hbm_bytes for name in names)
