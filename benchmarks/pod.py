"""What one optimizer step costs every chip of a TPU pod, on a machine without one.

Compiles the whole step (gradient in, new parameters and state out, donated) with the
TPU compiler for a real topology and counts in the text of the executable. Needs no
accelerator and no network:

    pip install '.[tpu]'
    python benchmarks/pod.py --topology v5e:4x4 --mesh fsdp=16 --model 1b \
        --optimizer dion2 --fraction 0.25 --peers
"""

import argparse
import csv
import importlib.util
import json
import math
import os
import sys
import time
import warnings
from dataclasses import dataclass
from importlib import metadata

# Before jax loads libtpu: no metadata server, no lock file, CPU as the real backend.
TPU_WITHOUT_TPU = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
if "jax" not in sys.modules:
    os.environ.update(TPU_WITHOUT_TPU)

import jax  # noqa: E402
import optax  # noqa: E402
from hlo_cost import Cost, count  # noqa: E402
from hlo_overlap import exchanges  # noqa: E402
from jax.experimental import topologies  # noqa: E402
from models import MODELS, abstract_params, state_shardings  # noqa: E402

METHOD = """\
Counted in the text of the compiled step, per chip: operations with bodies of loops
times their trips and float32 products times their precision passes; HBM bytes of
operands and results that do not lie on the chip, asynchronous copies once, in-place
updates at their own size; interconnect bytes as results of collectives, an all-reduce
twice. Modelled time = operations / rate + HBM bytes / bandwidth + interconnect bytes /
bandwidth, nothing overlapped, all at the published rates and without latency: it
compares variants, and is neither a bound nor a prediction.

"XLA's" are its own bytes accessed, "temp bytes" what the step allocates beside its
arguments, "CPU s" what tracing and compiling took. The floor is that of a Dion2 step
with direct Newton-Schulz, the target that of docs/performance.md, where it has one."""


@dataclass(frozen=True)
class Chip:
    """Rates of one chip, per second.

    Published bfloat16 operations and HBM bytes; of the interconnect half the published
    bidirectional bytes, of v5e 1600 Gbps (https://cloud.google.com/tpu/docs/v5e and its
    siblings).
    """

    flops: float
    hbm: float
    wire: float


CHIPS = {
    "v5e": Chip(197e12, 819e9, 100e9),
    "v5p": Chip(459e12, 2765e9, 300e9),
    "v6e": Chip(918e12, 1640e9, 224e9),
}
# (flops, HBM bytes, interconnect bytes, temp bytes, modelled seconds) that Dion2 at
# fraction 0.25 on 1b must not exceed: docs/performance.md.
TARGETS = {
    (16, "sharded"): (6e11, 2.3e9, 1.25e8, 200e6, 6.9e-3),
    (16, "shorter"): (2.4e11, 2.3e9, 8.2e7, 200e6, 4.6e-3),
    (256, "sharded"): (1.3e11, 1.1e8, 5.5e7, 30e6, 1.25e-3),
    (256, "shorter"): (2.4e10, 1.0e8, 1.5e7, 30e6, 0.36e-3),
}


@dataclass(frozen=True)
class Measured:
    """Of one compiled step, per chip."""

    cost: Cost
    temp_bytes: int
    compile_cpu_seconds: float
    xla_flops: float
    xla_bytes: float
    text: str

    def seconds(self, chip: Chip) -> float:
        return (
            self.cost.flops / chip.flops
            + self.cost.hbm_bytes / chip.hbm
            + self.cost.wire_bytes / chip.wire
        )

    def hidden_seconds(self, chip: Chip) -> float:
        """Of the interconnect's time, what other work runs beside.

        At most: the chip computes on while links and HBM serve the exchange.
        """
        hidden = 0.0
        for one in exchanges(self.text):
            flops = sum(line.flops for line in one.beside)
            hbm = sum(line.hbm_bytes for line in one.beside)
            beside = flops / chip.flops + hbm / chip.hbm
            hidden += min(one.wire_bytes / chip.wire, beside)
        return hidden

    def row(self, chip: Chip) -> dict:
        return {
            "flops": self.cost.flops,
            "hbm_bytes": self.cost.hbm_bytes,
            "xla_bytes_accessed": self.xla_bytes,
            "xla_flops": self.xla_flops,
            "wire_bytes": self.cost.wire_bytes,
            "collectives": self.cost.collectives,
            "temp_bytes": self.temp_bytes,
            "compile_cpu_seconds": round(self.compile_cpu_seconds, 2),
            "modelled_seconds": self.seconds(chip),
            "hidden_seconds": self.hidden_seconds(chip),
            "unknown": list(self.cost.unknown),
        }


def optimizer(name: str, params, *, fraction: float, select_axis: str, ns_method: str):
    """The transformation called `name`, told how `params` lie where it asks."""
    if name == "adamw":
        return optax.adamw(1e-3)
    if name == "muon":
        return optax.contrib.muon(1e-3, muon_weight_dimension_numbers=matrices(params))
    import dion2_jax  # only here: the peers must be measurable without it

    return getattr(dion2_jax, name)(
        1e-3,
        fraction,
        select_axis=select_axis,
        ns_method=ns_method,
        weight_dimension_numbers=matrices(params),
        param_shardings=jax.tree.map(lambda p: p.sharding, params),
    )


def matrices(params):
    """The last two axes of every leaf: (input, output)."""
    return jax.tree.map(
        lambda p: optax.contrib.MuonDimensionNumbers(
            reduction_axis=len(p.shape) - 2, output_axis=len(p.shape) - 1
        ),
        params,
    )


def measure(transformation, params, compiler_options=()) -> Measured:
    """Compiles one step for the topology that `params` lie on, and counts it."""
    state = jax.eval_shape(transformation.init, params)
    state = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=sharding
        ),
        state,
        state_shardings(params, state),
    )
    placed = jax.tree.map(lambda leaf: leaf.sharding, (params, state))

    def step(params, grads, state):
        updates, state = transformation.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    jitted = jax.jit(step, donate_argnums=(0, 2), out_shardings=placed)
    before = time.process_time()
    lowered = jitted.lower(params, params, state)
    compiled = lowered.compile(compiler_options=dict(compiler_options))
    spent = time.process_time() - before
    text = compiled.as_text()
    totals = compiled.cost_analysis() or {}
    return Measured(
        cost=count(text),
        temp_bytes=compiled.memory_analysis().temp_size_in_bytes,
        compile_cpu_seconds=spent,
        xla_flops=totals.get("flops", math.nan),
        xla_bytes=totals.get("bytes accessed", math.nan),
        text=text,
    )


def floors(params, fraction: float, select_axis: str) -> dict[str, float]:
    """What no Dion2 step can go below: perfect shares, no padding, no teams.

    Operations: five direct Newton-Schulz iterations of every selected submatrix, of the
    symmetric products one half, spread evenly (`select_axis` "output" and "reduction"
    as "shorter"). HBM: the gradient read, momentum and
    parameters read and written. Wire: the selected slices in bfloat16, there and back.
    """
    flops = hbm = wire = 0.0
    for leaf in jax.tree.leaves(params):
        mesh = leaf.sharding.mesh
        *batch, rows, columns = leaf.shape
        spec = list(leaf.sharding.spec) + [None] * len(leaf.shape)
        shards = [_shards(mesh, spec[len(batch) + axis]) for axis in (0, 1)]
        along_rows = rows <= columns
        if select_axis == "sharded" and shards[0] != shards[1]:
            along_rows = shards[0] > shards[1]
        selected = (
            (rows * fraction, columns) if along_rows else (rows, columns * fraction)
        )
        r, c = min(selected), max(selected)
        held = math.prod(
            n / _shards(mesh, s) for n, s in zip(leaf.shape, spec, strict=False)
        )
        flops += math.prod(batch) * (15 * r * r * c + 5 * r**3) / mesh.size
        hbm += 5 * held * leaf.dtype.itemsize
        wire += 2 * fraction * held * 2 * (max(shards) > 1)
    return {"flops": flops, "hbm_bytes": hbm, "wire_bytes": wire}


def _shards(mesh, entry) -> int:
    names = entry if isinstance(entry, tuple) else (entry,)
    return math.prod(mesh.shape[name] for name in names if name is not None)


def make_mesh(topology: str, axes: str):
    """A mesh over all chips of a topology: "v5e:4x4", "fsdp=4,tp=4"."""
    generation = topology.split(":")[0]
    if generation not in CHIPS:
        raise ValueError(
            f"--topology {topology}: no rates for {generation!r}, only for "
            f"{', '.join(CHIPS)}"
        )
    shape = {}
    for pair in axes.split(","):
        name, _, size = pair.partition("=")
        if not size.isdigit():
            raise ValueError(f"--mesh {axes!r}: expected name=size,name=size")
        if name in shape:
            raise ValueError(f"--mesh {axes!r} names {name} twice")
        shape[name] = int(size)
    try:
        description = topologies.get_topology_desc(
            platform="tpu", topology_name=topology
        )
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(
            f"--topology {topology}: libtpu has no such slice ({str(error)[:160]}); "
            f"try v5e:2x2, v5e:4x4, v5e:16x16, v5p:2x2x4 or v6e:8x8"
        ) from error
    chips = len(description.devices)
    if math.prod(shape.values()) != chips:
        raise ValueError(
            f"--mesh {axes} is {math.prod(shape.values())} devices and --topology "
            f"{topology} has {chips}: make the product of the axes {chips}"
        )
    return topologies.make_mesh(description, tuple(shape.values()), tuple(shape))


def print_table(rows: dict[str, dict], floor: dict | None, target: tuple | None):
    columns = ("flops", "hbm_bytes", "xla_bytes_accessed", "wire_bytes", "temp_bytes")
    heads = ("operations", "HBM bytes", "XLA's", "interconnect", "temp bytes")
    print(f"{'':22}" + "".join(f"{h:>14}" for h in (*heads, "modelled ms", "CPU s")))
    for name, row in rows.items():
        cells = "".join(f"{row[column]:14.3e}" for column in columns)
        modelled = f"{row['modelled_seconds'] * 1e3:14.3f}"
        print(f"{name:22}{cells}{modelled}{row['compile_cpu_seconds']:14.1f}")
    first = next(iter(rows.values()))
    if floor:
        cells = [floor.get(column) for column in columns]
        print(f"{'floor':22}" + "".join(f"{c:14.3e}" if c else " " * 14 for c in cells))
    if target:
        flops, hbm, wire, temp, seconds = target
        wanted = dict(zip(columns, (flops, hbm, None, wire, temp), strict=True))
        line = "".join(f"{w:14.3e}" if w else " " * 14 for w in wanted.values())
        print(f"{'target':22}{line}{seconds * 1e3:14.3f}")
        missed = [name for name, w in wanted.items() if w and first[name] > w]
        missed += ["modelled_seconds"] if first["modelled_seconds"] > seconds else []
        print("missed: " + ", ".join(missed) if missed else "all targets met")
    for name, row in rows.items():
        for kind, found in row["collectives"].items():
            print(f"{name}: {found['count']} {kind}, {found['bytes']:.3e} bytes")
        if row["hidden_seconds"]:
            hidden = row["hidden_seconds"] * 1e3
            print(f"{name}: {hidden:.3f} ms of interconnect time beside other work")
        for doubt in row["unknown"]:
            print(f"{name}: not counted: {doubt}")


def print_largest(name: str, measured: Measured, number: int):
    print(f"\n{name}: largest instructions by HBM bytes (all runs together)")
    for line in measured.cost.largest(number):
        print(
            f"{line.hbm_bytes / 1e6:10.2f} MB x{line.times:<4} {line.opcode:20} "
            f"{line.result:44} {line.name}  [{line.op_name or 'made by XLA'}]"
        )
    units = {"hbm_bytes": (1e6, "MB"), "flops": (1e9, "Gop")}
    for what, (unit, word) in units.items():
        print(f"{name}: {what} by what in the program causes them")
        causes: dict[str, list] = {}
        for line in measured.cost.lines:
            sums = causes.setdefault(f"{line.opcode} [{line.op_name}]", [0, 0])
            sums[0] += getattr(line, what)
            sums[1] += line.times
        ordered = sorted(causes.items(), key=lambda item: -item[1][0])
        for cause, (total, runs) in ordered[:number]:
            print(f"{total / unit:10.2f} {word} in {runs:5} {cause}")


def append_csv(args, chips: int, rows: dict[str, dict]):
    """One row an optimizer; docs/figures/growth.py draws them."""
    asked = ("model", "topology", "mesh", "stacked", "compiler_option")
    of_dion = ("fraction", "select_axis", "ns_method")
    found = ("flops", "hbm_bytes", "wire_bytes", "temp_bytes", "compile_cpu_seconds")
    head = ["optimizer", *asked, *of_dion, "layers", "chips", *found]
    head.append("modelled_seconds")
    layers = args.layers or MODELS[args.model].layers
    options = " ".join("=".join(pair) for pair in args.compiler_option)
    is_new = not os.path.exists(args.csv)
    if not is_new:
        with open(args.csv, newline="") as file:
            columns = next(csv.reader(file), [])
        if columns != head:
            raise ValueError(
                f"--csv {args.csv} has the columns {','.join(columns)}, and a row now "
                f"{','.join(head)}: give another file"
            )
    with open(args.csv, "a", newline="") as file:
        writer = csv.DictWriter(file, head, extrasaction="ignore")
        if is_new:
            writer.writeheader()
        for name, row in rows.items():
            of_run = {**vars(args), "layers": layers, "chips": chips}
            of_run["compiler_option"] = options
            if not name.startswith("dion"):
                of_run |= dict.fromkeys(of_dion, "")
            writer.writerow({**of_run, **row, "optimizer": name})


def arguments(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0],
        epilog=METHOD,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--topology", default="v5e:4x4", help="generation:shape, as libtpu names it")
    add("--mesh", default="fsdp=16", help="axes and sizes: fsdp, tp, ep, dp")
    add("--model", default="1b", choices=MODELS)
    add("--layers", type=int, default=0, help="that many; 0: the model's own")
    add("--stacked", action="store_true", help="layers stacked, [layers, ...]")
    names = ("dion2", "dion3", "muon", "adamw")
    add("--optimizer", default="dion2", choices=names)
    add("--fraction", type=float, default=0.25, help="share of slices selected")
    axes = ("sharded", "shorter", "output", "reduction")
    add("--select-axis", default="sharded", choices=axes)
    add("--ns-method", default="direct", choices=("direct", "gram", "auto"))
    add(
        "--compiler-option",
        action="append",
        default=[],
        type=option,
        metavar="NAME=VALUE",
        help="of XLA, such as xla_tpu_enable_async_all_to_all=true; may be repeated",
    )
    add("--peers", action="store_true", help="compile muon and adamw as well")
    add("--largest", type=int, default=0, help="print the N largest instructions")
    add("--text", default="", help="write the optimizer's compiled text to this file")
    add("--csv", default="", help="append a row an optimizer to this file")
    add("--json", action="store_true", help="print one JSON object and nothing else")
    args = parser.parse_args(argv)
    if args.layers < 0:
        parser.error(f"--layers {args.layers} must be 0 (the model's own) or more")
    for name in ("text", "csv"):  # before minutes of compiling
        folder = os.path.dirname(getattr(args, name)) or "."
        if not os.path.isdir(folder):
            parser.error(f"--{name} {getattr(args, name)}: no folder {folder}")
    return args


def option(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r}: expected NAME=VALUE")
    return name, value


def main(argv=None) -> int:
    args = arguments(argv)
    if importlib.util.find_spec("libtpu") is None:
        print(
            "pod.py: the TPU compiler is not installed: pip install '.[tpu]'",
            file=sys.stderr,
        )
        return 2
    try:
        return run(args)
    except (ValueError, jax.errors.JaxRuntimeError) as error:
        print(f"pod.py: error: {str(error)[:2000]}", file=sys.stderr)
        return 2


def run(args) -> int:
    """Compiles, counts and prints; returns the exit status."""
    mesh = make_mesh(args.topology, args.mesh)
    chip = CHIPS[args.topology.split(":")[0]]
    model = MODELS[args.model]
    params = abstract_params(model, mesh, layers=args.layers, stacked=args.stacked)
    others = [n for n in ("muon", "adamw") if args.peers and n != args.optimizer]
    measured = {}
    for name in (args.optimizer, *others):
        tx = optimizer(
            name,
            params,
            fraction=args.fraction,
            select_axis=args.select_axis,
            ns_method=args.ns_method,
        )
        measured[name] = measure(tx, params, args.compiler_option)
    rows = {name: one.row(chip) for name, one in measured.items()}
    is_dion = args.optimizer.startswith("dion")
    floor = floors(params, args.fraction, args.select_axis) if is_dion else None
    if args.text:
        with open(args.text, "w") as file:
            file.write(measured[args.optimizer].text)
    if args.csv:
        append_csv(args, mesh.size, rows)
    if args.json:
        versions = {"jax": jax.__version__, "libtpu": metadata.version("libtpu")}
        about = {**vars(args), **versions, "chips": mesh.size, "floor": floor}
        print(json.dumps({**about, **rows}))
        return 0
    layers = args.layers or model.layers
    of_all = f" of {model.layers}" if layers != model.layers else ""
    print(f"{args.model}: {model}; {layers}{of_all} layers{' stacked' * args.stacked}")
    print(
        f"{args.topology}, {args.mesh}, jax {jax.__version__}, libtpu "
        f"{metadata.version('libtpu')}, per chip and step; a second: {chip.flops:.3g} "
        f"operations, {chip.hbm:.3g} HBM bytes, {chip.wire:.3g} interconnect bytes"
    )
    target = None
    step = (args.optimizer, args.model, args.fraction, args.ns_method, layers)
    if step == ("dion2", "1b", 0.25, "direct", model.layers) and (
        args.topology.startswith("v5e:") and args.mesh == f"fsdp={mesh.size}"
    ):
        target = TARGETS.get((mesh.size, args.select_axis))
    print_table(rows, floor, target)
    print(METHOD)
    if args.largest:
        print_largest(args.optimizer, measured[args.optimizer], args.largest)
    return 0


if __name__ == "__main__":
    warnings.filterwarnings("error", message="Some donated buffers")
    sys.exit(main())
