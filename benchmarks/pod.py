"""What one optimizer step costs every chip of a TPU pod, on a machine without one.

Compiles the whole step (gradient in, new parameters and state out, donated) with the
TPU compiler for a real topology and counts in the text of the executable. Needs no
accelerator and no network:

    pip install '.[tpu]'
    python benchmarks/pod.py --topology v5e:4x4 --mesh fsdp=16 --model 1b \
        --optimizer dion2 --fraction 0.25 --peers
"""

import argparse
import importlib.util
import json
import os
import sys
import warnings
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
from models import MODELS, abstract_params  # noqa: E402
from pod_bounds import floors, target  # noqa: E402
from pod_chips import chip_of, make_mesh  # noqa: E402
from pod_report import METHOD, append_csv, print_largest, print_table  # noqa: E402
from pod_step import measure, optimizer  # noqa: E402


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
    chip = chip_of(args.topology)
    mesh = make_mesh(args.topology, args.mesh)
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
    print_table(rows, floor, target(args, mesh.size))
    print(METHOD)
    if args.largest:
        print_largest(args.optimizer, measured[args.optimizer], args.largest)
    return 0


if __name__ == "__main__":
    warnings.filterwarnings("error", message="Some donated buffers")
    sys.exit(main())
