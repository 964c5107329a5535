"""What runs on a chip while its collectives are on their way, read from a schedule.

An executable's text lists its instructions in the order in which they start. Beside a
synchronous collective nothing runs; beside an asynchronous one what stands between its
start and its end. Collectives that XLA has put into fusions are not looked at.
"""

from dataclasses import dataclass

import hlo_text
from hlo_cost import Line, by_instruction
from hlo_wire import kind_of


@dataclass(frozen=True)
class Exchange:
    """A collective outside of loops and what runs beside it.

    `beside` holds no other collective, since two of them share the same links, and
    nothing that runs beside an exchange started before.
    """

    name: str
    wire_bytes: int
    beside: tuple[Line, ...]


def exchanges(text: str) -> list[Exchange]:
    """The collectives of an executable, in the order of their starts."""
    module = hlo_text.parse(text)
    lines = by_instruction(module)
    order = list(module.entry.instructions.values())
    ends = {
        one.operands[0]: index
        for index, one in enumerate(order)
        if one.opcode.endswith("-done") and one.operands
    }
    found, taken = [], 0
    for index, one in enumerate(order):
        if not kind_of(one):
            continue
        end = ends.get(one.name, index)
        between = order[max(index + 1, taken) : end]
        taken = max(taken, end)
        beside = [line for other in between for line in lines[other.name]]
        wire = sum(line.wire_bytes for line in lines[one.name])
        quiet = tuple(line for line in beside if not line.wire_bytes)
        found.append(Exchange(one.name, wire, quiet))
    return found
