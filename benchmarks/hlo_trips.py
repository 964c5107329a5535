"""How often a loop of an executable runs: XLA's word, else by running its integers."""

import operator
import re

from hlo_text import Computation, Instruction, Module

LOOP_LIMIT = 1_000_000  # a longer loop is reported as unknown, not run
COMPARISONS = {
    "LT": operator.lt,
    "LE": operator.le,
    "GT": operator.gt,
    "GE": operator.ge,
    "NE": operator.ne,
    "EQ": operator.eq,
}


def trip_count(module: Module, inside: Computation, loop: Instruction) -> int | None:
    """How often a `while` runs; None if the text does not say."""
    known = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.attributes)
    if known:
        return int(known.group(1))
    state = _value(module, inside, loop.operands[0], None)
    condition = module.computations[loop.called("condition")]
    body = module.computations[loop.called("body")]
    for trips in range(LOOP_LIMIT):
        go_on = _value(module, condition, condition.root.name, [state])
        if go_on is None or not isinstance(state, list):
            return None
        if not go_on:
            return trips
        state = _value(module, body, body.root.name, [state])
    return None


def _value(module: Module, inside: Computation, name: str, arguments):
    """An integer, or a tuple as a list of them; None for anything else."""
    made_by = inside.instructions[name]

    def operands():
        return [_value(module, inside, o, arguments) for o in made_by.operands]

    match made_by.opcode:
        case "constant":
            text = made_by.literal
            return int(text) if re.fullmatch(r"-?\d+", text) else None
        case "parameter":
            return arguments[int(made_by.literal)] if arguments else None
        case "tuple":
            return operands()
        case "get-tuple-element":
            index = int(re.search(r"index=(\d+)", made_by.attributes).group(1))
            [whole] = operands()
            return whole[index] if isinstance(whole, list) else None
        case "fusion" | "call":
            if any(a.size != 1 or a.dtype[0] == "f" for a in made_by.arrays):
                return None
            body = module.body(made_by)
            return _value(module, body, body.root.name, operands())
        case "copy" | "bitcast" | "copy-done" | "copy-start":
            apply = operator.pos
        case "add":
            apply = operator.add
        case "subtract":
            apply = operator.sub
        case "compare":
            direction = re.search(r"direction=(\w+)", made_by.attributes).group(1)
            apply = COMPARISONS[direction]
        case _:
            return None
    values = operands()
    if None in values or any(isinstance(v, list) for v in values):
        return None
    return apply(*values)
