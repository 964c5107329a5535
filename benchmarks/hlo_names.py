"""What in a JAX program an instruction serves, where XLA gave it no name of its own."""

from hlo_text import NOTES, VIEWS, Computation, Instruction


def why_copied(inside: Computation, one: Instruction) -> str:
    """The JAX name that an asynchronous copy serves: copies have none of their own."""
    source = inside.operands(one)[0]
    if source.arrays[0].in_hbm:
        for user in _consumers(inside, one):
            if user.opcode not in VIEWS and user.op_name:
                return f"read ahead for {user.op_name}"
        return "read ahead"
    while source.opcode in VIEWS and source.operands:
        source = inside.operands(source)[0]
    return f"written back from {source.op_name or source.name}"


def _consumers(inside: Computation, one: Instruction) -> list[Instruction]:
    """Who uses a value, through views and the ends of asynchronous copies."""
    found: list[Instruction] = []
    for user in inside.users(one.name):
        through = user.opcode in ("bitcast", "get-tuple-element", "tuple", "copy")
        if through or user.opcode.endswith("-done") or user.target in NOTES:
            found += _consumers(inside, user)
        else:
            found.append(user)
    return found


def fusion_name(fusion: Instruction, body: Computation) -> str:
    """A fusion's JAX name, or else the first inside its flat `body`."""
    found = [fusion, body.root, *reversed(body.instructions.values())]
    return next((one.op_name for one in found if one.op_name), "")
