"""Every flag of train_lm.py, with its unit and default."""

import argparse
import math

LEARNING_RATES = {"dion2": 0.05, "dion3": 0.05, "muon": 0.02, "adamw": 0.004}


class _OneLine(argparse.ArgumentParser):
    """A parser that says what is wrong in one line, without the usage."""

    def error(self, message):
        self.exit(2, f"{self.prog}: error: {message}\n")


def _number(kind, wanted: str, fits):
    """A parser of one flag's text that says, of whatever it refuses, what is wanted.

    argparse would put this function's name into the message for a ValueError.
    """

    def parse(text: str):
        try:
            number = kind(text)
        except ValueError:
            number = None
        if number is None or not fits(number):
            raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}")
        return number

    return parse


_count = _number(int, "a whole number of at least 1", lambda n: n >= 1)
_count_or_zero = _number(int, "a whole number of at least 0", lambda n: n >= 0)
_seed = _number(int, "a whole number from 0 to 2^32 - 1", lambda n: 0 <= n < 2**32)
_positive = _number(float, "a number above 0", lambda x: 0 < x < math.inf)
_not_negative = _number(float, "a number of at least 0", lambda x: 0 <= x < math.inf)
_share = _number(float, "a number in (0, 1]", lambda x: 0 < x <= 1)


# Rows: flag, type (or its choices, or bool for a switch), default, what it says.
_GROUPS = {
    "data": (
        ("--data PATH", str, None, "a text file, a folder of text files, or uint16 "
         "token files *.bin with modded-nanogpt's header (default: the source of the "
         "Python standard library)"),
        ("--vocab-size N", _count, None, "tokens in the vocabulary (default: 256 for "
         "text, 50304 for token files)"),
    ),
    "mesh": (
        ("--devices N", _count, 8, "emulated devices, where the machine has only CPUs"),
        ("--dp N", _count, None, "replicas (default: 1, or what a given --fsdp "
         "leaves)"),
        ("--fsdp N", _count, None, "devices over which parameters and optimizer state "
         "are divided (default: all that --dp and --tp leave)"),
        ("--tp N", _count, None, "devices over which heads and MLP are divided "
         "(default: 1)"),
        ("--axis-types", ("auto", "explicit"), "auto", "who decides layouts: the "
         "compiler, or the types of arrays"),
    ),
    "processes": (
        ("--processes N", _count, 1, "start N processes of --devices emulated devices "
         "each on this machine, and join them"),
        ("--distributed", bool, False, "this is one process of many: call "
         "jax.distributed.initialize; on a TPU pod no further flag is needed"),
        ("--coordinator HOST:PORT", str, None, "with --distributed: the address of "
         "process 0, where JAX cannot find it out"),
        ("--num-processes N", _count, None, "with --coordinator: how many there are"),
        ("--process-id I", _count_or_zero, None, "with --coordinator: number of this "
         "one, from 0"),
    ),
    "model": (
        ("--width N", _count, 128, "features of the residual stream"),
        ("--layers N", _count, 4, "attention and MLP pairs"),
        ("--heads N", _count, 2, "attention heads a layer"),
        ("--mlp-size N", _count, None, "features inside the MLP (default: 4 x width)"),
        ("--scan-layers", bool, False, "stack the layers' parameters as [layers, in, "
         "out] and scan over them"),
        ("--dtype", ("float32", "bfloat16"), "float32", "of activations and products; "
         "parameters are float32"),
    ),
    "optimizer": (
        ("--optimizer", tuple(LEARNING_RATES), "dion2", "of the layers' matrices; "
         "embedding, head and norms take AdamW"),
        ("--fraction F", _share, 0.25, "share of each momentum matrix's slices that "
         "Dion2 and Dion3 orthogonalize a step, above 0 to 1"),
        ("--lr LR", _positive, None, "peak learning rate (default: "
         + ", ".join(f"{name} {rate}" for name, rate in LEARNING_RATES.items()) + ")"),
        ("--adam-lr LR", _positive, None, "peak learning rate of what AdamW takes "
         f"beside Dion2, Dion3 or Muon (default: {LEARNING_RATES['adamw']})"),
        ("--weight-decay WD", _not_negative, 0.01, "a step takes WD x learning rate "
         "off each parameter, as a share"),
        ("--warmup STEPS", _count_or_zero, None, "linear, from zero (default: 20, but "
         "at most a tenth of --steps)"),
        ("--decay STEPS", _count_or_zero, None, "linear, to zero at the end (default: "
         "half of --steps)"),
    ),
    "training": (
        ("--steps N", _count, 240, "steps in all, those before a resume included"),
        ("--batch-size N", _count, 64, "sequences a step, over all devices"),
        ("--seq-len N", _count, 128, "tokens a sequence"),
        ("--seed N", _seed, 0, "of parameters and of the order of the data"),
        ("--max-bad-steps N", _count, 5, "stop after N steps in a row whose gradient "
         "is not finite; such steps change nothing"),
    ),
    "output": (
        ("--out DIR", str, None, "for metrics.csv, loss.png, config.json and "
         "checkpoints (default: runs/NAME, with a NAME like dion2-0.25_dp1_fsdp8)"),
        ("--val-every STEPS", _count, 50, "steps between validations; one at the end"),
        ("--val-batches N", _count, 8, "batches a validation reads, always the same"),
        ("--checkpoint-every STEPS", _count, 100, "steps between checkpoints; one at "
         "the end"),
        ("--keep N", _count, 2, "newest checkpoints that stay"),
        ("--log-stats STEPS", _count, None, "every STEPS steps, write what Dion2 or "
         "Dion3 selects to stats.csv and slice_norms.png"),
        ("--tensorboard", bool, False, "also log to DIR/tensorboard"),
        ("--wandb", ("online", "offline"), None, "also log to Weights & Biases; "
         "offline: to DIR/wandb, without network"),
        ("--resume", bool, False, "go on from the newest whole checkpoint in --out"),
        ("--overwrite", bool, False, "start again where --out holds a run"),
    ),
}  # fmt: skip


def _parser() -> argparse.ArgumentParser:
    """Its result has what was given; `parse` adds the defaults."""
    parser = _OneLine(
        prog="train_lm.py",
        description="Train a GPT on real text with sharded Dion2. With no argument: a "
        "byte-level model on the source of the Python standard library, on 8 devices.",
        argument_default=argparse.SUPPRESS,
    )
    for title, rows in _GROUPS.items():
        group = parser.add_argument_group(title)
        for row, kind, default, text in rows:
            flag, _, metavar = row.partition(" ")
            if default is not None and kind is not bool:
                text += f" (default: {default})"
            if kind is bool:
                takes = dict(action="store_const", const=True)
            elif isinstance(kind, tuple):
                takes = dict(choices=kind)
            else:
                takes = dict(type=kind, metavar=metavar)
            group.add_argument(flag, help=text, **takes)
    return parser


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The flags, checked as far as they can be without a device.

    `given` lists those that the command line named; the others have their defaults.
    """
    parser = _parser()
    given = vars(parser.parse_args(argv))
    defaults = {
        _name(row.split()[0]): default
        for rows in _GROUPS.values()
        for row, _, default, _ in rows
    }
    args = argparse.Namespace(**{**defaults, **given}, given=sorted(given))
    _fill(args)
    if problem := _problem(args):
        parser.error(problem)
    return args


def _name(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def _shown(args: argparse.Namespace, flag: str) -> str:
    """A flag with its value, and whether nobody gave it."""
    name = _name(flag)
    default = "" if name in args.given else " (the default)"
    return f"{flag} {getattr(args, name)}{default}"


def _fill(args: argparse.Namespace) -> None:
    """Defaults that depend on other flags."""
    args.mlp_size = args.mlp_size or 4 * args.width
    args.lr = args.lr or LEARNING_RATES[args.optimizer]
    args.adam_lr = args.adam_lr or LEARNING_RATES["adamw"]
    args.warmup = min(20, args.steps // 10) if args.warmup is None else args.warmup
    args.decay = args.steps // 2 if args.decay is None else args.decay


def _problem(args: argparse.Namespace) -> str | None:
    """Which flags do not go together, said in one line; None: all do."""
    if args.width % (2 * args.heads):
        return (
            f"{_shown(args, '--width')} must be a multiple of 2 x "
            f"{_shown(args, '--heads')}: rotary turns pairs of features inside a head"
        )
    if args.optimizer == "muon" and args.axis_types == "explicit":
        return "optax.contrib.muon needs --axis-types auto: it fails on explicit"
    if args.log_stats and args.optimizer not in ("dion2", "dion3"):
        return f"--log-stats is of dion2 and dion3, not of --optimizer {args.optimizer}"
    if args.warmup + args.decay > args.steps:
        return (
            f"{_shown(args, '--warmup')} + {_shown(args, '--decay')} steps are more "
            f"than {_shown(args, '--steps')}"
        )
    if args.resume and args.overwrite:
        return "--resume goes on and --overwrite starts again: give one of them"
    if args.processes > 1 and args.distributed:
        return "--processes starts its own processes: leave --distributed out"
    joining = [args.coordinator, args.num_processes, args.process_id]
    if any(x is not None for x in joining):
        if None in joining:
            return "--coordinator, --num-processes and --process-id go together"
        if not args.distributed:
            return "--coordinator needs --distributed"
        if args.process_id >= args.num_processes:
            return (
                f"--process-id {args.process_id} is not below --num-processes "
                f"{args.num_processes}: the first process is 0"
            )
    return None


def check_sizes(args: argparse.Namespace, dp: int, fsdp: int, tp: int) -> str | None:
    """The size that the mesh does not divide, said in one line; None: all divide."""
    for flag, axes, count in (
        ("--batch-size", "dp x fsdp", dp * fsdp),
        ("--width", "fsdp", fsdp),
        ("--width", "tp", tp),
        ("--heads", "tp", tp),
        ("--mlp-size", "fsdp", fsdp),
        ("--mlp-size", "tp", tp),
        ("--vocab-size", "tp", tp),
    ):
        if getattr(args, _name(flag)) % count:
            return (
                f"{_shown(args, flag)} is not a multiple of the mesh's {axes} = {count}"
            )
    return None


def run_name(args: argparse.Namespace, dp: int, fsdp: int, tp: int) -> str:
    """Optimizer, fraction and mesh, as in dion2-0.25_dp1_fsdp8."""
    optimizer = args.optimizer + (
        f"-{args.fraction:g}" if args.optimizer in ("dion2", "dion3") else ""
    )
    return f"{optimizer}_dp{dp}_fsdp{fsdp}" + (f"_tp{tp}" if tp > 1 else "")
