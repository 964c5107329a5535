"""The counting of benchmarks/pod.py, rule by rule, against counts made by hand."""

import importlib.util
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import hlo_cost  # noqa: E402
import hlo_overlap  # noqa: E402
import hlo_text  # noqa: E402
import models  # noqa: E402
import pod  # noqa: E402
import pod_bounds  # noqa: E402
import pod_chips  # noqa: E402
import pod_step  # noqa: E402

import dion2_jax  # noqa: E402

HAS_LIBTPU = importlib.util.find_spec("libtpu") is not None
needs_libtpu = pytest.mark.skipif(
    not HAS_LIBTPU, reason="the TPU compiler comes with the tpu extra: libtpu"
)

F = "f32[8,128]{1,0:T(8,128)}"  # 4096 bytes in HBM
V = "f32[8,128]{1,0:T(8,128)S(1)}"  # 4096 bytes on the chip


def program(entry: str, *computations: str) -> str:
    """A program whose entry holds these lines; %p, %q in HBM, %v on the chip."""
    text = "\n".join(computations)
    return f"""{text}
ENTRY %main (p: f32[8,128], q: f32[8,128], v: f32[8,128]) -> f32[8,128] {{
  %p = {F} parameter(0)
  %q = {F} parameter(1)
  %v = {V} parameter(2)
  {entry.strip()}
}}
"""


def count(entry: str, *computations: str) -> hlo_cost.Cost:
    return hlo_cost.count(program(entry, *computations))


# (what, lines of the entry, computations, HBM bytes by hand)
HBM = [
    ("both operands and the result", f"ROOT %a = {F} add(%p, %q)", "", 3 * 4096),
    ("one operand named twice", f"ROOT %a = {F} multiply(%p, %p)", "", 2 * 4096),
    ("memory on the chip", f"ROOT %a = {V} add(%v, %p)", "", 4096),
    (
        "views",
        f"%t = ({F}, {V}) tuple(%p, %v)\n"
        f"  %g = {F} get-tuple-element(%t), index=0\n"
        "  ROOT %b = f32[1024]{0:T(1024)} bitcast(%g)",
        "",
        0,
    ),
    (
        "a prefetch once, and its use on the chip not",
        f"%s = ({V}, {F}, u32[]{{:S(2)}}) copy-start(%p)\n"
        f"  %d = {V} copy-done(%s)\n"
        f"  ROOT %a = {V} negate(%d)",
        "",
        4096,
    ),
    (
        "a copy from HBM to HBM both ways",
        f"%s = ({F}, {F}, u32[]{{:S(2)}}) copy-start(%p)\n"
        f"  ROOT %d = {F} copy-done(%s)",
        "",
        2 * 4096,
    ),
    (
        "an asynchronous slice at what it reads",
        f"%s = (({F}), f32[2,128]{{1,0:T(2,128)S(1)}}, s32[]{{:S(2)}}) "
        "slice-start(%p), slice={[0:2], [0:128]}\n"
        "  ROOT %d = f32[2,128]{1,0:T(2,128)S(1)} slice-done(%s)",
        "",
        1024,
    ),
    (
        "a slice at what it reads and writes",
        "ROOT %s = f32[2,128]{1,0} slice(%p), slice={[0:2], [0:128]}",
        "",
        2 * 1024,
    ),
    (
        "an update in place: read and written at its own size",
        "%u = f32[1,128]{1,0} slice(%v), slice={[0:1], [0:128]}\n"
        "  %i = s32[]{:S(6)} constant(0)\n"
        f"  ROOT %d = {F} dynamic-update-slice(%p, %u, %i, %i)",
        "",
        512 + 512 + 512,  # the slice writes u to HBM
    ),
    (
        "a fused update in place",
        f"%i = s32[]{{:S(6)}} constant(0)\n"
        f"  ROOT %f = {F} fusion(%p, %i), kind=kLoop, calls=%update",
        f"""
%update (a: f32[8,128], i: s32[]) -> f32[8,128] {{
  %a = {F} parameter(0)
  %i = s32[]{{:S(6)}} parameter(1)
  %one = f32[1,128]{{1,0}} dynamic-slice(%a, %i, %i), dynamic_slice_sizes={{1,128}}
  %neg = f32[1,128]{{1,0}} negate(%one)
  ROOT %d = {F} dynamic-update-slice(%a, %neg, %i, %i)
}}""",
        512 + 512,
    ),
    (
        "a fused update of fresh zeros: all of it",
        f"%i = s32[]{{:S(6)}} constant(0)\n"
        f"  ROOT %f = {F} fusion(%v, %i), kind=kLoop, calls=%update",
        f"""
%update (a: f32[8,128], i: s32[]) -> f32[8,128] {{
  %a = {V} parameter(0)
  %i = s32[]{{:S(6)}} parameter(1)
  %zero = f32[] constant(0)
  %zeros = {F} broadcast(%zero), dimensions={{}}
  %one = f32[1,128]{{1,0}} dynamic-slice(%a, %i, %i), dynamic_slice_sizes={{1,128}}
  ROOT %d = {F} dynamic-update-slice(%zeros, %one, %i, %i)
}}""",
        4096,
    ),
    (
        "a gather at the rows it takes",
        "%i = s32[2]{0:S(1)} iota(), iota_dimension=0\n"
        "  ROOT %g = f32[2,128]{1,0:S(1)} gather(%p, %i), offset_dims={1}, "
        "collapsed_slice_dims={0}, start_index_map={0}, index_vector_dim=1, "
        "slice_sizes={1,128}",
        "",
        1024,
    ),
    (
        "a fusion of several results",
        f"ROOT %f = ({F}, {V}, {F}) fusion(%p, %q), kind=kLoop, calls=%three",
        f"""
%three (a: f32[8,128], b: f32[8,128]) -> (f32[8,128], f32[8,128], f32[8,128]) {{
  %a = {F} parameter(0)
  %b = {F} parameter(1)
  %s = {F} add(%a, %b)
  %d = {V} subtract(%a, %b)
  ROOT %t = ({F}, {V}, {F}) tuple(%s, %d, %a)
}}""",
        3 * 4096,  # the third is %a handed through
    ),
    (
        "a slice within a fusion within a fusion",
        f"ROOT %f = {F} fusion(%p, %q), kind=kLoop, calls=%outer",
        f"""
%inner (x: f32[8,128], y: f32[8,128]) -> f32[8,128] {{
  %x = {F} parameter(0)
  %y = {F} parameter(1)
  %s = f32[2,128]{{1,0}} slice(%y), slice={{[0:2], [0:128]}}
  %zero = f32[] constant(0)
  %z = {F} pad(%s, %zero), padding=0_6x0_0
  ROOT %a = {F} add(%x, %z)
}}

%outer (a: f32[8,128], b: f32[8,128]) -> f32[8,128] {{
  %a = {F} parameter(0)
  %b = {F} parameter(1)
  %in = {F} fusion(%a, %b), kind=kLoop, calls=%inner
  ROOT %n = {F} negate(%in)
}}""",
        4096 + 1024 + 4096,
    ),
    (
        "an update in place within a fusion within a fusion",
        f"%i = s32[]{{:S(6)}} constant(0)\n"
        f"  ROOT %f = {F} fusion(%i, %p), kind=kLoop, calls=%outer",
        f"""
%inner (x: f32[8,128], i: s32[]) -> f32[8,128] {{
  %x = {F} parameter(0)
  %i = s32[]{{:S(6)}} parameter(1)
  %one = f32[1,128]{{1,0}} dynamic-slice(%x, %i, %i), dynamic_slice_sizes={{1,128}}
  ROOT %d = {F} dynamic-update-slice(%x, %one, %i, %i)
}}

%outer (i: s32[], a: f32[8,128]) -> f32[8,128] {{
  %i = s32[]{{:S(6)}} parameter(0)
  %a = {F} parameter(1)
  ROOT %in = {F} fusion(%a, %i), kind=kLoop, calls=%inner
}}""",
        512 + 512,
    ),
]


@pytest.mark.parametrize(
    "entry, computations, by_hand", [h[1:] for h in HBM], ids=[h[0] for h in HBM]
)
def test_hbm_bytes(entry, computations, by_hand):
    assert count(entry, computations).hbm_bytes == by_hand


GROUPS = "replica_groups={{0,1,2,3}}"
G = "f32[32,128]{1,0:T(8,128)}"  # 16384 bytes
# (what, lines, {kind: (count, bytes)})
WIRE = [
    (
        "all-to-all",
        f"ROOT %c = {F} all-to-all(%p), {GROUPS}",
        {"all-to-all": (1, 4096)},
    ),
    (
        "all-to-all of a tuple",
        f"ROOT %c = ({F}, {V}) all-to-all(%p, %v), {GROUPS}",
        {"all-to-all": (1, 8192)},
    ),
    (
        "all-reduce twice",
        f"ROOT %c = {F} all-reduce(%p), {GROUPS}",
        {"all-reduce": (1, 8192)},
    ),
    (
        "all-gather",
        f"ROOT %c = {G} all-gather(%p), {GROUPS}",
        {"all-gather": (1, 16384)},
    ),
    (
        "reduce-scatter",
        f"ROOT %c = f32[2,128]{{1,0}} reduce-scatter(%p), {GROUPS}",
        {"reduce-scatter": (1, 1024)},
    ),
    (
        "a start and its done once",
        f"%s = ({F}, {G}) all-gather-start(%p), {GROUPS}\n"
        f"  ROOT %d = {G} all-gather-done(%s)",
        {"all-gather": (1, 16384)},
    ),
    (
        "collective-permute pair",
        f"%s = ({F}, {F}, u32[]{{:S(2)}}, u32[]{{:S(2)}}) "
        "collective-permute-start(%p), source_target_pairs={{0,1}}\n"
        f"  ROOT %d = {F} collective-permute-done(%s)",
        {"collective-permute": (1, 4096)},
    ),
    (
        "an asynchronous reduce-scatter",
        f"%s = (({F}), f32[2,128]{{1,0}}, u32[], u32[]) reduce-scatter-start(%p), "
        f"{GROUPS}\nROOT %c = f32[2,128]{{1,0}} reduce-scatter-done(%s)",
        {"reduce-scatter": (1, 1024)},
    ),
    (
        "an asynchronous all-reduce of two",
        f"%s = ({F}, {F}) all-reduce-start(%p, %q), {GROUPS}, to_apply=%add\n"
        f"ROOT %c = ({F}, {F}) all-reduce-done(%s)",
        {"all-reduce": (1, 2 * 8192)},
    ),
    (
        "replica groups in the syntax of a mesh",
        f"ROOT %c = {F} all-to-all(%p), replica_groups=mesh['a'=4] {{'a'}}",
        {"all-to-all": (1, 4096)},
    ),
]


@pytest.mark.parametrize(
    "entry, kinds", [w[1:] for w in WIRE], ids=[w[0] for w in WIRE]
)
def test_interconnect_bytes(entry, kinds):
    found = count(entry)
    assert {k: (v["count"], v["bytes"]) for k, v in found.collectives.items()} == kinds
    assert found.wire_bytes == sum(size for _, size in kinds.values())


# As TPU executables print an asynchronous all-gather (op and types kept, rest cut):
# the same collective stands in the fusion that starts it, in one that runs beside it
# and in the one that awaits it.
START = 'custom_call_target="AsyncCollectiveStart"'
DONE = 'custom_call_target="AsyncCollectiveDone"'
CHAIN = f"""
%start.body (x: f32[8,128]) -> (f32[8,128], f32[32,128], u32[]) {{
  %x = {V} parameter(0)
  %g.1 = {G} all-gather(%x), channel_id=3, frontend_attributes={{chain_id="0"}}
  ROOT %n = ({V}, {G}, u32[]{{:S(2)}}) custom-call(%g.1), {START}
}}

%beside.body (x: f32[8,128], g: f32[32,128], w: f32[8,128]) -> (f32[8,128]) {{
  %x = {V} parameter(0)
  %g = {G} parameter(1)
  %w = {F} parameter(2)
  %work = {F} negate(%w)
  %g.2 = {G} all-gather(%x), channel_id=3, frontend_attributes={{chain_id="0"}}
  ROOT %t = ({F}, {V}, {G}) tuple(%work, %x, %g.2)
}}

%done.body (x: f32[8,128], g: f32[32,128]) -> f32[32,128] {{
  %x = {V} parameter(0)
  %g = {G} parameter(1)
  %g.3 = {G} all-gather(%x), channel_id=3, frontend_attributes={{chain_id="0"}}
  ROOT %n = {G} custom-call(%g.3), {DONE}
}}
"""


def test_asynchronous_collective_of_a_tpu_counts_once():
    first = "output_to_operand_aliasing={{0}: (0, {})}"
    beside = "output_to_operand_aliasing={{1}: (0, {}), {2}: (1, {})}"
    last = "output_to_operand_aliasing={{}: (1, {})}"
    entry = f"""
  %s = ({V}, {G}, u32[]{{:S(2)}}) fusion(%v), kind=kCustom, {first}, calls=%start.body
  %x = {V} get-tuple-element(%s), index=0
  %g = {G} get-tuple-element(%s), index=1
  %b = ({F}, {V}, {G}) fusion(%x, %g, %p), kind=kOutput, {beside}, calls=%beside.body
  %g.4 = {G} get-tuple-element(%b), index=2
  ROOT %d = {G} fusion(%x, %g.4), kind=kCustom, {last}, calls=%done.body"""
    found = count(entry, CHAIN)
    assert found.collectives == {"all-gather": {"count": 1, "bytes": 16384}}
    assert found.hbm_bytes == 16384 + 2 * 4096  # gathered once; work beside it


STARTED = f"(({F}), {F}, u32[], u32[]) all-to-all-start"
WORK = f"""
  %a = {STARTED}(%p), {GROUPS}
  %x = {F} add(%q, %q)
  %b = {STARTED}(%q), {GROUPS}
  %y = {F} multiply(%p, %q)
  %m = {F} all-to-all-done(%a)
  %z = {F} negate(%y)
  %n = {F} all-to-all-done(%b)
  %s = {F} all-to-all(%n), {GROUPS}
  ROOT %r = {F} add(%s, %z)"""


def test_what_runs_beside_exchanges():
    """Only what stands between a start and its end, and once; no other exchange."""
    assert count(WORK).collectives == {"all-to-all": {"count": 3, "bytes": 3 * 4096}}
    # Whole operand read, whole result written, at the start alone.
    by_hand = 3 * 2 * 4096 + (2 + 3 + 2 + 3) * 4096
    assert count(WORK).hbm_bytes == by_hand
    beside = {
        one.name: ([line.name for line in one.beside], one.wire_bytes)
        for one in hlo_overlap.exchanges(program(WORK))
    }
    assert beside == {"a": (["x", "y"], 4096), "b": (["z"], 4096), "s": ([], 4096)}
    step = pod_step.Measured(count(WORK), 0, 0, 0, 0, program(WORK))
    # A second an operation of z, x and y, four an exchange.
    chip = pod_chips.Chip(flops=1024, hbm=math.inf, wire=1024)
    assert step.seconds(chip) == 4 + 3 * 4
    assert step.hidden_seconds(chip) == 2 + 1
    # No more than the exchange takes, though two operations run beside the first.
    assert step.hidden_seconds(pod_chips.Chip(1024, math.inf, wire=4096)) == 1 + 1
    # x and y move 2 and 3 arrays, z 2.
    assert step.hidden_seconds(pod_chips.Chip(math.inf, 4096, wire=512)) == 5 + 2


def test_what_runs_beside_an_exchange_within_another():
    nested = f"""
  %a = {STARTED}(%p), {GROUPS}
  %b = {STARTED}(%q), {GROUPS}
  %n = {F} all-to-all-done(%b)
  %c = {STARTED}(%n), {GROUPS}
  %x = {F} add(%q, %q)
  %m = {F} all-to-all-done(%a)
  %y = {F} multiply(%p, %m)
  %o = {F} all-to-all-done(%c)
  ROOT %r = {F} add(%o, %y)"""
    beside = {
        one.name: [line.name for line in one.beside]
        for one in hlo_overlap.exchanges(program(nested))
    }
    assert beside == {"a": ["x"], "b": [], "c": ["y"]}


def test_fused_reduce_scatter_counts_its_share():
    body = f"""
%body (x: f32[8,128], i: s32[]) -> f32[2,128] {{
  %x = {F} parameter(0)
  %i = s32[]{{:S(6)}} parameter(1)
  %r = {F} all-reduce(%x), {GROUPS}
  ROOT %d = f32[2,128]{{1,0}} dynamic-slice(%r, %i, %i), dynamic_slice_sizes={{2,128}}
}}"""
    entry = """
  %i = s32[]{:S(6)} constant(0)
  ROOT %f = f32[2,128]{1,0} fusion(%p, %i), kind=kCustom, calls=%body"""
    found = count(entry, body)
    assert found.collectives == {"reduce-scatter": {"count": 1, "bytes": 1024}}
    assert found.hbm_bytes == 4096 + 1024


STATE = f"(s32[], {F})"


def loop(limit: int, name: str, inside: str = "", step: int = 1) -> str:
    """A `while` that counts from its initial value to `limit`."""
    return f"""
%cond.{name} (s: (s32[], f32[8,128])) -> pred[] {{
  %s = {STATE} parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %n = s32[] constant({limit})
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}}

%body.{name} (s: (s32[], f32[8,128])) -> (s32[], f32[8,128]) {{
  %s = {STATE} parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %x = {F} get-tuple-element(%s), index=1
  %one = s32[] constant({step})
  %next = s32[] add(%i, %one)
  {inside or f"%y = {F} all-reduce(%x), {GROUPS}"}
  ROOT %t = {STATE} tuple(%next, %y)
}}"""


def start(name: str, first: int = 0, more: str = "") -> str:
    runs = f"condition=%cond.{name}, body=%body.{name}{more}"
    return f"""
  %zero.{name} = s32[] constant({first})
  %init.{name} = {STATE} tuple(%zero.{name}, %p)
  ROOT %w = {STATE} while(%init.{name}), {runs}"""


def test_a_loop_counts_as_often_as_it_runs():
    found = count(start("a"), loop(5, "a"))
    assert found.collectives == {"all-reduce": {"count": 5, "bytes": 5 * 8192}}
    # The all-reduce in HBM, both ways, and the counter: two reads and a write of four.
    assert found.hbm_bytes == 5 * (2 * 4096 + 12)


def test_a_loop_that_starts_late_and_steps_by_two():
    found = count(start("a", first=1), loop(8, "a", step=2))
    assert found.collectives["all-reduce"]["count"] == 4


@pytest.mark.parametrize(
    "direction, first, limit, step, trips",
    [
        ("LT", 0, 5, 1, 5),
        ("LE", 0, 5, 1, 6),
        ("GT", 5, 0, -1, 5),
        ("GE", 5, 0, -1, 6),
        ("NE", 0, 5, 1, 5),
        ("EQ", 5, 5, 1, 1),
    ],
)
def test_a_loop_ends_by_any_comparison(direction, first, limit, step, trips):
    text = loop(limit, "a", step=step).replace("direction=LT", f"direction={direction}")
    found = count(start("a", first=first), text)
    assert found.collectives["all-reduce"]["count"] == trips


def test_known_trip_count_is_believed():
    config = ', backend_config={"known_trip_count":{"n":"7"}}'
    found = count(start("a", more=config), loop(5, "a"))
    assert found.collectives["all-reduce"]["count"] == 7


def test_nested_loops_multiply():
    inside = f"""%zero = s32[] constant(0)
  %init = {STATE} tuple(%zero, %x)
  %w = {STATE} while(%init), condition=%cond.in, body=%body.in
  %y = {F} get-tuple-element(%w), index=1"""
    found = count(start("out"), loop(3, "in"), loop(4, "out", inside))
    assert found.collectives["all-reduce"]["count"] == 12


def test_a_loop_without_a_count_is_reported():
    condition = loop(5, "a").replace("s32[] constant(5)", "s32[] iota()")
    found = count(start("a"), condition)
    assert found.collectives["all-reduce"]["count"] == 1
    assert len(found.unknown) == 1 and "trip count" in found.unknown[0]


def test_the_dearest_branch_counts():
    entry = f"""
  %c = s32[] constant(0)
  ROOT %x = {F} conditional(%c, %p, %p), branch_computations={{%cheap, %dear}}"""
    branch = "%{} (x: f32[8,128]) -> f32[8,128] {{\n  %x = {} parameter(0)\n  {}\n}}"
    found = count(
        entry,
        branch.format("cheap", F, f"ROOT %b = {F} bitcast(%x)"),
        branch.format("dear", F, f"ROOT %b = {F} negate(%x)"),
    )
    assert found.hbm_bytes == 2 * 4096


@pytest.mark.parametrize(
    "dtype, precision, passes",
    [
        ("f32", "", 1),
        ("f32", ", operand_precision={high,high}", 3),
        ("f32", ", operand_precision={highest,highest}", 6),
        ("bf16", ", operand_precision={highest,highest}", 1),
    ],
)
@pytest.mark.parametrize("operation", ["dot", "convolution"])
def test_precision_passes(operation, dtype, precision, passes):
    how = {
        "dot": "lhs_contracting_dims={1}, rhs_contracting_dims={1}",
        "convolution": "dim_labels=bf_oi->bf",
    }[operation]
    found = count(f"""
  %x = {dtype}[8,128]{{1,0}} convert(%p)
  ROOT %d = {dtype}[8,8]{{1,0}} {operation}(%x, %x), {how}{precision}""")
    assert found.flops == passes * 2 * 8 * 8 * 128


def test_a_batch_of_products_is_a_dilated_convolution_on_tpu():
    # As printed for einsum("nij,nkj->nik", x, x) with x [3, 8, 128].
    how = "window={size=3 stride=2 lhs_dilate=3}, dim_labels=0bf_0oi->0bf"
    found = count(f"""
  %x = bf16[3,8,128]{{2,1,0}} iota(), iota_dimension=2
  ROOT %c = bf16[3,8,8]{{2,1,0}} convolution(%x, %x), {how}""")
    assert found.flops == 3 * 2 * 8 * 8 * 128


def test_elementwise_and_reduction_operations():
    found = count("""
  %s = f32[8,128]{1,0} add(%p, %q)
  %z = f32[] constant(0)
  ROOT %r = f32[8]{0} reduce(%s, %z), dimensions={1}, to_apply=%sum""")
    assert found.flops == 8 * 128 + 8 * 128


def test_what_xla_gave_no_name_is_named_by_what_it_serves():
    called = 'metadata={op_name="jit(step)/neg"}'
    found = count(
        f"""
  %s = ({V}, {F}, u32[]{{:S(2)}}) copy-start(%p)
  %d = {V} copy-done(%s)
  %n = {V} negate(%d), {called}
  %back = ({F}, {V}, u32[]{{:S(2)}}) copy-start(%n)
  %home = {F} copy-done(%back)
  ROOT %f = {F} fusion(%home), kind=kLoop, calls=%body""",
        f"""
%body (x: f32[8,128]) -> f32[8,128] {{
  %x = {F} parameter(0)
  %m = {F} negate(%x), {called.replace("neg", "mul")}
  ROOT %b = {F} bitcast(%m)
}}""",
    )
    assert {line.name: line.op_name for line in found.lines} == {
        "s": "read ahead for jit(step)/neg",
        "n": "jit(step)/neg",
        "back": "written back from jit(step)/neg",
        "f": "jit(step)/mul",
    }


def test_text_that_is_no_executable():
    with pytest.raises(ValueError, match="no ENTRY computation"):
        hlo_text.parse("module @jit_f {}")


def test_a_cpu_executable_end_to_end():
    """A scanned product and an all-reduce, compiled here and counted by hand."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))

    def step(x, scales):
        def body(x, scale):
            return jax.lax.psum(x @ x, "x") * scale, None

        return jax.lax.scan(body, x, scales)[0]

    mapped = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(PartitionSpec("x"), PartitionSpec()),
        out_specs=PartitionSpec("x"),
        check_vma=False,
    )
    sharding = NamedSharding(mesh, PartitionSpec("x"))
    x = jax.ShapeDtypeStruct((8 * 16, 16), jnp.float32, sharding=sharding)
    text = jax.jit(mapped).lower(x, jnp.ones(5)).compile().as_text()
    found = hlo_cost.count(text)
    products = 5 * 2 * 16**3
    # Per trip: the product, and elementwise: a sum over devices, a scale, a counter.
    assert products < found.flops <= products + 5 * (3 * 16 * 16 + 8)
    sent = found.collectives["all-reduce"]
    assert sent == {"count": 5, "bytes": 5 * 2 * 16 * 16 * 4}
    assert found.unknown == ()


def test_floors_by_hand():
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec("fsdp", None))
    down = {"down": jax.ShapeDtypeStruct((8192, 2048), jnp.float32, sharding=sharding)}
    sharded = pod_bounds.floors(down, 0.25, "sharded")  # [2048, 2048] selected
    shorter = pod_bounds.floors(down, 0.25, "shorter")  # [8192, 512] selected
    assert sharded["flops"] == 20 * 2048**3 / 8
    assert shorter["flops"] == (15 * 512**2 * 8192 + 5 * 512**3) / 8
    shard = 8192 * 2048 / 8
    for floor in (sharded, shorter):
        assert floor["hbm_bytes"] == 5 * shard * 4
        assert floor["wire_bytes"] == 2 * 0.25 * shard * 2


@pytest.mark.parametrize(
    "options, chips, found",
    [
        ("", 16, pod_bounds.TARGETS[16, "sharded"]),
        ("--layers 24 --stacked", 16, pod_bounds.TARGETS[16, "sharded"]),
        ("--select-axis shorter", 16, pod_bounds.TARGETS[16, "shorter"]),
        ("--topology v5e:2x2 --mesh fsdp=4", 4, None),  # of another size: none
        ("--topology v5p:2x2x4", 16, None),
        ("--mesh fsdp=4,tp=4", 16, None),
        ("--layers 2", 16, None),
        ("--fraction 0.5", 16, None),
        ("--ns-method gram", 16, None),
        ("--optimizer dion3", 16, None),
        ("--model 7b", 16, None),
    ],
)
def test_a_target_is_that_of_its_step_alone(options, chips, found):
    assert pod_bounds.target(pod.arguments(options.split()), chips) == found


@pytest.mark.parametrize(
    "name, total", [("1b", 1.208e9), ("7b", 6.476e9), ("moe", 6.71e9)]
)
def test_model_sizes(name, total):
    mesh = jax.make_mesh(
        (4, 2), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2
    )
    model = models.MODELS[name]
    flat = models.abstract_params(model, mesh)
    stacked = models.abstract_params(model, mesh, stacked=True)
    sizes = [sum(p.size for p in jax.tree.leaves(t)) for t in (flat, stacked)]
    assert sizes[0] == sizes[1] == pytest.approx(total, rel=2e-3)
    for leaf in jax.tree.leaves(flat):
        local = leaf.sharding.shard_shape(leaf.shape)
        assert leaf.size == 8 * math.prod(local)


@pytest.mark.parametrize(
    "sizes, up, down",
    [
        ({"dp": 8}, (None, None), (None, None)),
        ({"dp": 2, "fsdp": 4}, ("fsdp", None), ("fsdp", None)),
        ({"fsdp": 4, "tp": 2}, ("fsdp", "tp"), ("tp", "fsdp")),
        ({"tp": 8}, (None, "tp"), ("tp", None)),
    ],
)
def test_a_mesh_shards_by_the_axes_it_has(sizes, up, down):
    auto = (jax.sharding.AxisType.Auto,) * len(sizes)
    mesh = jax.sharding.AbstractMesh(tuple(sizes.values()), tuple(sizes), auto)
    layer = models.abstract_params(models.MODELS["1b"], mesh)["layer_00"]
    assert layer["up"].sharding.spec == PartitionSpec(*up)
    assert layer["down"].sharding.spec == PartitionSpec(*down)


def test_state_lies_as_its_parameters():
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    params = models.abstract_params(models.MODELS["1b"], mesh, layers=1)
    state = jax.eval_shape(pod_step.optimizer("adamw", params, **PLAIN).init, params)
    placed = models.state_shardings(params, state)
    assert placed[0].mu["layer_00"]["q"].spec == PartitionSpec("fsdp", None)
    assert placed[0].count.spec == PartitionSpec()


@pytest.mark.parametrize(
    "options, message",
    [
        ("--layers -1", "--layers -1 must be 0"),
        ("--compiler-option fast", "'fast': expected NAME=VALUE"),
        ("--csv nowhere/rows.csv", "no folder nowhere"),
        ("--select-axis longer", "invalid choice: 'longer'"),
    ],
)
def test_an_argument_that_says_nothing_is_refused_at_once(options, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        pod.main(options.split())
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "mesh, message",
    [("fsdp=2,fsdp=2", "names fsdp twice"), ("fsdp", "name=size")],
)
def test_a_mesh_that_means_nothing_is_refused(mesh, message):
    with pytest.raises(ValueError, match=message):
        pod_chips.make_mesh("v5e:2x2", mesh)


def test_a_chip_without_rates_is_refused():
    with pytest.raises(ValueError, match="no rates for 'v4', only for v5e, v5p, v6e"):
        pod_chips.chip_of("v4:2x2x1")


def test_growth_is_drawn_from_whole_models_alone(tmp_path):
    figures = ROOT / "docs" / "figures"
    spec = importlib.util.spec_from_file_location("growth", figures / "growth.py")
    growth = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(growth)
    path = tmp_path / "growth.csv"
    text = (figures / "growth.csv").read_text()
    path.write_text(text)
    growth.main([str(path)])
    drawn = {file.name for file in tmp_path.glob("*.svg")}
    assert drawn == {"growth_1b.svg", "growth_7b.svg", "interconnect.svg"}
    for old, new, message in [
        (",24,", ",12,", "12 of 24 layers"),
        ("fsdp=16,", '"fsdp=8,tp=2",', "dion2 on fsdp=8,tp=2|adamw on fsdp=8,tp=2"),
        ("v5p:4x4x4", "v5e:8x8", "several kinds of chips"),
    ]:
        assert old in text
        path.write_text(text.replace(old, new))
        with pytest.raises(ValueError, match=message):
            growth.main([str(path)])


PLAIN = {"fraction": 0.25, "select_axis": "sharded", "ns_method": "direct"}


@pytest.mark.parametrize(
    "axes, message",
    [("fsdp=8", "has 16: make the product of the axes 16"), ("fsdp", "name=size")],
)
@needs_libtpu
def test_a_mesh_that_does_not_fit(axes, message):
    assert re.search(message, run(f"--mesh {axes}", ok=False))


def run(options: str, ok: bool = True) -> str:
    """Runs the command as a user does: in a process of its own."""
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    environment["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, str(ROOT / "benchmarks" / "pod.py"), *options.split()]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert (done.returncode == 0) == ok, done.stderr
    return done.stdout if ok else done.stderr


def described(chips: int, *, layers: int, stacked: bool = False, **arguments):
    """What `describe` says of a step of 1b on so many chips, without compiling it."""
    mesh = jax.sharding.AbstractMesh(
        (chips,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,)
    )
    params = models.abstract_params(
        models.MODELS["1b"], mesh, layers=layers, stacked=stacked
    )
    return dion2_jax.describe(
        params,
        0.25,
        ns_method="direct",
        weight_dimension_numbers=pod_step.matrices(params),
        param_shardings=jax.tree.map(lambda p: p.sharding, params),
        **arguments,
    ).total


@needs_libtpu
def test_adamw_on_a_tpu_topology_moves_seven_passes():
    """Gradient, parameter and two moments read; parameter and moments written."""
    printed = json.loads(run("--optimizer adamw --layers 1 --json"))
    shard = (4 * 2048 * 2048 + 2 * 2048 * 8192) // 16 * 4
    assert printed["adamw"]["hbm_bytes"] == pytest.approx(7 * shard, rel=1e-3)
    assert printed["adamw"]["xla_bytes_accessed"] > 2 * printed["adamw"]["hbm_bytes"]
    assert printed["adamw"]["collectives"] == {}


@needs_libtpu
def test_dion2_on_a_tpu_topology_sends_what_was_selected():
    """Two layers on four chips leave no remainder: nothing padded, no teams."""
    small = "--topology v5e:2x2 --mesh fsdp=4 --layers 2"
    printed = json.loads(run(f"{small} --select-axis shorter --json"))
    found, floor = printed["dion2"], printed["floor"]
    assert found["collectives"]["all-to-all"]["bytes"] == floor["wire_bytes"]
    # Eight square matrices and two `down` are selected along the axis that is whole:
    # 2048 scores each are summed over the chips, in float32, twice the bytes; of one
    # kind after the other.
    scores = {"count": 2, "bytes": 2 * 10 * 2048 * 4}
    assert found["collectives"]["all-reduce"] == scores
    assert set(found["collectives"]) == {"all-to-all", "all-reduce"}
    told = described(4, layers=2, select_axis="shorter")
    assert told.all_to_all == found["collectives"]["all-to-all"]["bytes"]
    assert 2 * told.all_reduce == scores["bytes"]
    # Five iterations, of symmetric products 5/8; the dense update as a product,
    # [shard, k] @ [k, c]; and 2 % for what is elementwise.
    iterated = [5 * 2 * (13 * 512**2 * c + 5 * 512**3) / 8 for c in (2048, 8192)]
    square, up, down = 512 * 2048 * 512, 512 * 128 * 8192, 2048 * 512 * 2048
    dense = 2 * (8 * square + 2 * up + 2 * down)
    counted = (8 * iterated[0] + 4 * iterated[1]) / 4 + dense
    assert counted < found["flops"] < 1.02 * counted
    assert found["flops"] > floor["flops"]
    # Transposed copies for gathers along the minor axis, of bfloat16 and on the chip.
    assert floor["hbm_bytes"] < found["hbm_bytes"] < 1.03 * floor["hbm_bytes"]
    assert found["unknown"] == []


@needs_libtpu
def test_dion2_on_a_tpu_topology_moves_five_passes():
    """Gradient read, momentum and parameter read and written once, in a team or not:
    no sum of momentum and gradient and nothing of Newton-Schulz leaves the chip."""
    printed = json.loads(run("--layers 2 --stacked --json"))
    found, floor = printed["dion2"]["hbm_bytes"], printed["floor"]["hbm_bytes"]
    assert found == pytest.approx(floor, rel=1e-3)
    # Six remainders in teams: what they sum and exchange is what the plan says.
    told = described(16, layers=2, stacked=True)
    sent = printed["dion2"]["collectives"]
    assert told.all_to_all == sent["all-to-all"]["bytes"]
    assert 2 * told.all_reduce == sent["all-reduce"]["bytes"]


@needs_libtpu
def test_an_option_of_the_compiler_lets_other_work_run_beside_exchanges():
    """The figures stay; some of the interconnect's time is hidden."""
    small = "--topology v5e:2x2 --mesh fsdp=4 --layers 1 --json"
    plain = json.loads(run(small))["dion2"]
    flag = "--compiler-option xla_tpu_enable_async_all_to_all=true"
    found = json.loads(run(f"{small} {flag}"))["dion2"]
    assert plain["hidden_seconds"] == 0
    assert found["collectives"] == plain["collectives"]
    assert 0 < found["hidden_seconds"] < found["wire_bytes"] / 100e9
