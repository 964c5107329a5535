"""The folder of a run: new, started again, or gone on with.

A run begins with its first finished step. Until then its folder stays as it was (empty,
where there was none), so that whatever ends it before can be mended and tried again.
"""

import argparse
import json
import os
import pathlib
import shutil
import sys

from lm.checkpoint import clean, newest_whole
from lm.errors import RunError, UserError
from lm.metrics import MetricsFile
from lm.stats import StatsFile

# Flags that say where and how a run is started, not what it does.
_OUTSIDE = {"given", "out", "resume", "overwrite", "devices", "processes"}
_OUTSIDE |= {"distributed", "coordinator", "num_processes", "process_id"}


def prepare(out: pathlib.Path, args: argparse.Namespace) -> int:
    """Makes sure of the folder, and returns the step to go on from (0: the start)."""
    checkpoints = out / "checkpoints"
    if args.resume:
        if not (out / "config.json").is_file():
            raise UserError(f"--resume: {out} holds no run (there is no config.json)")
        hold(out)
        clean(checkpoints)
        return newest_whole(checkpoints, lambda line: print(line, file=sys.stderr))
    if _holds_run(out) and not args.overwrite:
        raise UserError(
            f"{out} already holds a run: add --resume to go on with it, "
            f"--overwrite to start it again, or --out DIR to put this one elsewhere"
        )
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {out}: cannot be made ({error.strerror})") from None
    hold(out)
    return 0


def hold(out: pathlib.Path) -> None:
    """Keeps every other process out of the folder until this one ends, in any way.

    Raises:
        UserError: another process holds it.
    """
    try:
        import fcntl

        handle = os.open(out, os.O_RDONLY)  # the lock goes with the process
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise UserError(
            f"another process is training in {out}: wait for its end, or stop it"
        ) from None
    except (ImportError, OSError):
        pass  # this system, or this file system, has no locks


def _holds_run(out: pathlib.Path) -> bool:
    return (out / "config.json").exists() or (out / "checkpoints").exists()


def begin(out: pathlib.Path, args: argparse.Namespace, start: int, facts: dict):
    """Once the first step after `start` is finished: config.json and metrics.csv.

    What --overwrite replaces goes only now. Returns the MetricsFile, open.
    """
    if args.overwrite:
        if (out / "checkpoints").exists():
            shutil.rmtree(out / "checkpoints")
        for name in ("stats.csv", "slice_norms.png"):
            (out / name).unlink(missing_ok=True)
    elif not args.resume and (out / "config.json").exists():
        raise RunError(f"another run has begun in {out} since this one was started")
    elif (out / "stats.csv").exists():  # though this run may not add to it
        StatsFile(out / "stats.csv", start).close()
    rows = MetricsFile(out / "metrics.csv", start)
    write_config(out, args, **facts)
    return rows


def resumed(out: pathlib.Path, args: argparse.Namespace, start: int) -> list[str]:
    """Lines that say what is gone on with, and what is not as it was."""
    if start:
        first = f"resumed from step {start}"
    else:
        first = f"warning: {out} has no whole checkpoint: it begins again with step 1"
    return [first, *changes(out, args)]


def changes(out: pathlib.Path, args: argparse.Namespace) -> list[str]:
    """A line for every setting that is not as the run in `out` had it."""
    try:
        before = dict(json.loads((out / "config.json").read_bytes()))
    except (OSError, ValueError, TypeError):
        return [f"warning: {out / 'config.json'} cannot be read: settings may differ"]

    def shown(value):
        return "the default" if value is None else value

    return [
        f"{name.replace('_', '-')}: {shown(before[name])} before, {shown(now)} now"
        for name, now in vars(args).items()
        if name not in _OUTSIDE and before.get(name, now) != now
    ]


def write_config(out: pathlib.Path, args: argparse.Namespace, **facts) -> None:
    """config.json: every flag, and what was found out."""
    beside = out / "config.json.tmp"
    beside.write_text(json.dumps({**vars(args), **facts}, indent=1) + "\n")
    os.replace(beside, out / "config.json")
