"""The computation that a fusion runs, fusions within it written out."""

from dataclasses import replace

from hlo_text import Computation, Instruction, Module


def flat(module: Module, fusion: Instruction) -> Computation:
    """The fused computation; of a fusion within it, the instructions in its place.

    What goes into the inner fusion is a bitcast; the inner `fusion` itself stays, with
    what comes out of it as its one operand.
    """
    body = module.body(fusion)
    made = Computation(body.name)
    for one in body.instructions.values():
        if one.opcode != "fusion":
            made.add(one)
            continue
        inner = flat(module, one)
        for other in inner.instructions.values():
            operands = tuple(f"{one.name}/{name}" for name in other.operands)
            if other.opcode == "parameter":
                operands = (one.operands[int(other.literal)],)
                other = replace(other, opcode="bitcast")
            name = f"{one.name}/{other.name}"
            made.add(replace(other, name=name, operands=operands, is_root=False))
        root = f"{one.name}/{inner.root.name}"
        made.add(replace(one, operands=(root,)))
    return made
