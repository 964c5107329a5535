"""Arithmetic operations of one instruction.

Two for each multiply-add of a `dot` or `convolution`, times the passes that its
precision asks of a bfloat16 unit (float32 at HIGH 3, at HIGHEST 6), one for each
element of elementwise arithmetic or of a reduction's input.
"""

import math
import re

from hlo_text import Computation, Instruction

ARITHMETIC = frozenset(
    "abs add and atan2 cbrt ceil clamp compare cosine divide erf exponential "
    "exponential-minus-one floor log log-plus-one logistic maximum minimum multiply "
    "negate not or power remainder round-nearest-afz round-nearest-even rsqrt select "
    "shift-left shift-right-arithmetic shift-right-logical sign sine sqrt subtract "
    "tan tanh xor".split()
)


def operations(inside: Computation, one: Instruction) -> float:
    size = one.arrays[0].size if one.arrays else 0
    match one.opcode:
        case "dot":
            return _dot(inside, one)
        case "convolution":
            return _convolution(inside, one)
        case "reduce" | "reduce-window":
            return inside.operands(one)[0].arrays[0].size
        case "sort":
            return size * math.ceil(math.log2(max(2, one.arrays[0].dims[-1])))
        case opcode if opcode in ARITHMETIC:
            return size
    return 0


def _precision_passes(inside: Computation, one: Instruction) -> int:
    """Products of bfloat16 matrices that one product at this precision takes."""
    if all(factor.arrays[0].dtype != "f32" for factor in inside.operands(one)[:2]):
        return 1
    found = re.search(r"operand_precision=\{([^}]*)\}", one.attributes)
    asked = found.group(1) if found else ""
    return 6 if "highest" in asked else 3 if "high" in asked else 1


def _dot(inside: Computation, one: Instruction) -> float:
    left = inside.operands(one)[0].arrays[0]
    found = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", one.attributes)
    axes = [int(axis) for axis in found.group(1).split(",") if axis] if found else []
    terms = math.prod(left.dims[axis] for axis in axes)
    return 2 * one.arrays[0].size * terms * _precision_passes(inside, one)


def _convolution(inside: Computation, one: Instruction) -> float:
    """A matrix product on TPU is a convolution; its batch axes are spatial axes."""
    left, right = (factor.arrays[0] for factor in inside.operands(one)[:2])
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", one.attributes).groups()
    in_axes, kernel_axes, out_axes = (
        dict(zip(names, array.dims, strict=True))
        for names, array in zip(labels, (left, right, one.arrays[0]), strict=True)
    )
    found = re.search(r"window=\{([^}]*)\}", one.attributes)
    window = dict(re.findall(r"(\w+)=(\S+)", found.group(1))) if found else {}
    spatial = [axis for axis in labels[0] if axis.isdigit()]

    def setting(name: str, default: int) -> list[int]:
        """One number a spatial axis; of padding `before_after`, what is before."""
        if name not in window:
            return [default] * len(spatial)
        return [int(text.split("_")[0]) for text in window[name].split("x")]

    pairs = math.prod(
        _valid_pairs(in_axes[axis], kernel_axes[axis], out_axes[axis], *numbers)
        for axis, *numbers in zip(
            spatial,
            setting("stride", 1),
            setting("pad", 0),
            setting("lhs_dilate", 1),
            setting("rhs_dilate", 1),
            strict=True,
        )
    )
    products = out_axes["b"] * kernel_axes["i"] * kernel_axes["o"] * pairs
    return 2 * products * _precision_passes(inside, one)


def _valid_pairs(size, kernel, out, stride, pad, lhs_dilate, rhs_dilate) -> int:
    """(output, kernel) positions of one axis that meet an input, not a hole."""
    last = (size - 1) * lhs_dilate
    pairs = 0
    for o in range(out):
        for k in range(kernel):
            at = o * stride - pad + k * rhs_dilate
            pairs += 0 <= at <= last and at % lhs_dilate == 0
    return pairs
