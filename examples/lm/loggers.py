"""TensorBoard and Weights & Biases, beside metrics.csv."""

import argparse
import importlib.util
import os
import pathlib

from lm.errors import UserError

PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb"}  # flag: what it needs


def require(args: argparse.Namespace) -> None:
    """Raises unless the packages of the flags given are there."""
    for flag, package in PACKAGES.items():
        if getattr(args, flag) and importlib.util.find_spec(package) is None:
            raise UserError(
                f"--{flag} needs the package {package}: "
                f"python3 -m pip install {package}"
            )


class TensorBoard:
    """Event files in DIR/tensorboard."""

    def __init__(self, out: pathlib.Path, start: int):
        from tensorboardX import SummaryWriter

        # Of a run that is gone on with, TensorBoard drops what is after its start.
        self._writer = SummaryWriter(str(out / "tensorboard"), purge_step=start + 1)

    def log(self, step: int, numbers: dict[str, float]) -> None:
        for name, x in numbers.items():
            self._writer.add_scalar(name, x, step)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of the project dion2_jax; offline, it lies in DIR/wandb until `wandb sync`.

    Its id lies in DIR/wandb.id: a run that is gone on with stays one run.
    """

    def __init__(self, out: pathlib.Path, start: int, mode: str, name: str, config):
        import wandb

        file = out / "wandb.id"
        known = file.read_text().strip() if start and file.exists() else None
        self._run = wandb.init(
            project="dion2_jax",
            name=name,
            dir=str(out),
            mode=mode,
            config=config,
            id=known,
            resume="allow" if known else None,
        )
        beside = out / "wandb.id.tmp"
        beside.write_text(self._run.id + "\n")
        os.replace(beside, file)

    def log(self, step: int, numbers: dict[str, float]) -> None:
        self._run.log(numbers, step=step)

    def close(self) -> None:
        self._run.finish()


def openers(args: argparse.Namespace, out: pathlib.Path, start: int, name: str) -> list:
    """For every flag given a function that opens its logger."""
    found = []
    if args.tensorboard:
        found.append(lambda: TensorBoard(out, start))
    if args.wandb:
        config = {k: v for k, v in vars(args).items() if k != "given"}
        found.append(lambda: WeightsAndBiases(out, start, args.wandb, name, config))
    return found
