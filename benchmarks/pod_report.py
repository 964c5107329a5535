"""What the steps cost, in words: a table, the largest instructions, rows of a CSV."""

import csv
import os

from models import MODELS
from pod_step import Measured

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


def print_table(rows: dict[str, dict], floor: dict | None, target: tuple | None):
    columns = ("flops", "hbm_bytes", "xla_bytes_accessed", "wire_bytes", "temp_bytes")
    heads = ("operations", "HBM bytes", "XLA's", "interconnect", "temp bytes")
    print(f"{'':22}" + "".join(f"{h:>14}" for h in (*heads, "modelled ms", "CPU s")))
    for name, row in rows.items():
        modelled = f"{row['modelled_seconds'] * 1e3:14.3f}"
        cpu = f"{row['compile_cpu_seconds']:14.1f}"
        print(_cells(name, (row[column] for column in columns)) + modelled + cpu)
    first = next(iter(rows.values()))
    if floor:
        print(_cells("floor", (floor.get(column) or None for column in columns)))
    if target:
        flops, hbm, wire, temp, seconds = target
        wanted = dict(zip(columns, (flops, hbm, None, wire, temp), strict=True))
        print(_cells("target", wanted.values()) + f"{seconds * 1e3:14.3f}")
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


def _cells(head: str, numbers) -> str:
    """A line of the table; None is an empty cell."""
    cells = (" " * 14 if n is None else f"{n:14.3e}" for n in numbers)
    return f"{head:22}" + "".join(cells)


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
