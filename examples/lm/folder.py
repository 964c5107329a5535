"""The folder of a run: new, started again, or gone on with."""

import argparse
import json
import os
import pathlib
import shutil
import sys

from lm.checkpoint import clean, newest_whole
from lm.errors import UserError


def prepare(out: pathlib.Path, args: argparse.Namespace) -> int:
    """Makes the folder ready and returns the step to go on from (0: the start)."""
    checkpoints = out / "checkpoints"
    if args.resume:
        if not (out / "config.json").is_file():
            raise UserError(f"--resume: {out} holds no run (there is no config.json)")
        clean(checkpoints)
        return newest_whole(checkpoints, lambda line: print(line, file=sys.stderr))
    if (out / "config.json").exists() or checkpoints.exists():
        if not args.overwrite:
            raise UserError(
                f"{out} already holds a run: add --resume to go on with it, "
                f"--overwrite to start it again, or --out DIR to put this one elsewhere"
            )
        shutil.rmtree(checkpoints, ignore_errors=True)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {out}: cannot be made ({error.strerror})") from None
    return 0


def write_config(out: pathlib.Path, args: argparse.Namespace, **facts) -> None:
    """config.json: every flag, and what was found out."""
    beside = out / "config.json.tmp"
    beside.write_text(json.dumps({**vars(args), **facts}, indent=1) + "\n")
    os.replace(beside, out / "config.json")
