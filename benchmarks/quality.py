"""Does it train as well? Trains one GPT with every setting of quality_settings.py.

    python benchmarks/quality.py --limit-minutes 60

appends a row a run to docs/quality/runs.csv, most important runs first, and goes on
where it was stopped. docs/quality.md says what is run, and why.
"""

import argparse
import math
import os
import re
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

import quality_rows  # noqa: E402
import quality_settings  # noqa: E402
from lm import data, processes  # noqa: E402
from lm.errors import UserError  # noqa: E402

NAMED = {setting.name: setting for setting in quality_settings.SETTINGS}
LENGTH = 128


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    flag = parser.add_argument
    flag(
        "--limit-minutes",
        type=float,
        default=math.inf,
        help="begin no run that would end later",
    )
    flag(
        "--only",
        type=_pattern,
        default=re.compile(""),
        metavar="PATTERN",
        help="runs in whose label, such as small/dion2-0.25-global, this regular "
        "expression is found",
    )
    flag(
        "--steps",
        type=int,
        default=quality_settings.STEPS,
        help="of a run, 8192 tokens each (default: %(default)s)",
    )
    flag(
        "--out",
        type=Path,
        default=ROOT / "docs" / "quality",
        help="folder of runs.csv and curves.csv",
    )
    flag(
        "--plots",
        action="store_true",
        help="train nothing: draw docs/figures/quality_*.png and print the table",
    )
    args = parser.parse_args(argv)
    if args.steps < 1:
        parser.error(f"--steps {args.steps} must be at least 1")
    return args


def _pattern(text: str) -> re.Pattern:
    """A regular expression that is found in the label of some run."""
    try:
        pattern = re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no regular expression: {error}"
        ) from None
    labels = [f"small/{name}" for name in NAMED]
    labels += [f"large/{setting.name}" for setting in quality_settings.CONFIRMED]
    if not any(map(pattern.search, labels)):
        raise argparse.ArgumentTypeError(
            f"{text!r} is found in no label; there are {', '.join(labels)}"
        )
    return pattern


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    args = parse(argv)
    try:
        return perform(args)
    except KeyboardInterrupt:
        print("stopped; the run that was under way begins anew next time")
        return 130
    except (quality_rows.BadRow, UserError) as error:
        print(f"quality.py: {error}", file=sys.stderr)
        return 1


def perform(args: argparse.Namespace) -> int:
    """What the flags ask for; returns the exit status."""
    if args.plots:
        import quality_plots

        figures = ROOT / "docs" / "figures"
        print(quality_plots.report(args.out, figures, args.steps))
        return 0
    # Before jax is imported.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    cache = Path(tempfile.gettempdir()) / "dion2_jax_quality"
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    processes.emulate(quality_settings.DEVICES)
    return study(args)


def study(args: argparse.Namespace) -> int:
    """Runs what is missing until the time is up; returns the exit status."""
    from lm.model import GPTConfig
    from quality_training import Trainer

    corpus = data.load(None, LENGTH + 1)
    begun, longest = time.monotonic(), 0.0
    trainer, trained = None, None
    # Now, not after a run has been trained for it.
    quality_rows.read(args.out / "curves.csv", quality_rows.CURVES)
    while True:
        done = quality_rows.finished(args.out / "runs.csv")
        run = quality_settings.next_run(done, args.steps, args.only.search)
        if run is None:
            print(nothing_left(done, args))
            return 0
        start = time.monotonic()
        if start + longest - begun >= 60 * args.limit_minutes:
            print(f"time is up; next: {run}")
            return 0
        if trained != (run.model, run.setting):
            trainer = None  # its memory goes first
            width, layers, heads = quality_settings.MODELS[run.model]
            sizes = GPTConfig(width=width, layers=layers, heads=heads, mlp=4 * width)
            trainer = Trainer(NAMED[run.setting], sizes, corpus, args.steps)
            trained = run.model, run.setting
        print(f"{run}:", end="", flush=True)
        curve = trainer.run(run.rate, run.seed, _say)
        seconds = time.monotonic() - start
        longest = max(longest, seconds)
        print(f" nats in {seconds:.0f} s", flush=True)
        save(args.out, run, curve, seconds)


def nothing_left(done, args: argparse.Namespace) -> str:
    """Why there is no run to begin: large ones wait for the rates of small ones."""
    waiting = [
        setting.name
        for setting in quality_settings.CONFIRMED
        if args.only.search(f"large/{setting.name}")
        and quality_settings.next_rate(
            setting.first_rate, quality_settings.tuning(done, setting, args.steps)
        )
    ]
    if waiting:
        return f"large models wait for the rates of small/{', small/'.join(waiting)}"
    return "all runs are done"


def save(folder: Path, run: quality_settings.Run, curve, seconds: float) -> None:
    """Writes a finished run; its row in runs.csv last, which makes it count."""
    quality_rows.put(
        folder / "curves.csv",
        quality_rows.CURVES,
        run,
        [
            dict(
                tokens=mark.tokens,
                training_loss=f"{mark.training_loss:.5f}",
                validation_loss=_digits(mark.validation_loss),
            )
            for mark in curve
        ],
    )
    row = dict(
        fraction=NAMED[run.setting].fraction,
        tokens=curve[-1].tokens,
        validation_loss=_digits(curve[-1].validation_loss),
        seconds=round(seconds),
    )
    quality_rows.put(folder / "runs.csv", quality_rows.RUNS, run, [row])


def _digits(loss: float | None) -> str:
    return "" if loss is None else f"{loss:.5f}"


def _say(mark) -> None:
    if mark.validation_loss is not None:
        print(f" {mark.validation_loss:.3f}", end="", flush=True)


if __name__ == "__main__":
    sys.exit(main())
