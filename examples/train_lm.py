"""Train a GPT on real text with sharded Dion2, on whatever devices there are.

    python examples/train_lm.py

trains a byte-level Flax GPT of 0.85 million parameters on the source text of the Python
standard library, fully sharded over 8 devices (emulated where there are only CPUs), and
writes runs/dion2-0.25_dp1_fsdp8/{metrics.csv,loss.png,config.json,checkpoints}.
`--help` lists the flags; the parts are in examples/lm/.
"""

import argparse
import functools
import pathlib
import sys
import traceback

from lm import data, flags, loggers, processes
from lm.errors import RunError, UserError


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    args = flags.parse(argv)
    try:
        loggers.require(args)
        corpus = data.load(args.data, args.seq_len + 1, args.vocab_size)
        args.vocab_size = corpus.vocab
        if args.processes > 1:
            command = [
                sys.executable,
                __file__,
                *(sys.argv[1:] if argv is None else argv),
            ]
            return processes.start_local(args, command)
        processes.emulate(args.devices)
        processes.join(args)
        return train(args, corpus)
    except Exception as error:
        status = tell(error)
        if args.distributed:
            processes.leave(status, error)
        return status


def tell(error: Exception) -> int:
    """What went wrong, on stderr, once; returns the exit status."""
    if isinstance(error, UserError):
        line, status = f"error: {error}", 2
    elif isinstance(error, (RunError, OSError)):  # a full disk, a folder that went away
        line, status = str(error), 1
    else:
        traceback.print_exception(error)
        return 1
    if not getattr(error, "told", False):
        sys.stderr.write(f"train_lm.py: {line}\n")  # whole, beside other threads
    return status


def train(args: argparse.Namespace, corpus: data.Corpus) -> int:
    """One run, from step 0 or the newest whole checkpoint; returns the exit status."""
    import jax  # after the flags: they say how many devices there are
    from lm import checkpoint, folder, mesh, metrics, model, optimizers, training
    from lm.loop import Loop

    # The mesh and the folder.
    with processes.alike():
        sizes = mesh.mesh_sizes(jax.device_count(), args.dp, args.fsdp, args.tp)
        if problem := flags.check_sizes(args, *sizes):
            raise UserError(problem)
        args.dp, args.fsdp, args.tp = sizes
        name = flags.run_name(args, *sizes)
        out = pathlib.Path(args.out or f"runs/{name}")
        start = processes.agree(lambda: folder.prepare(out, args))
    devices = mesh.make_mesh(*sizes, args.axis_types)
    jax.set_mesh(devices)

    # Model, optimizer, state.
    config = model.GPTConfig(
        vocab=args.vocab_size,
        width=args.width,
        layers=args.layers,
        heads=args.heads,
        mlp=args.mlp_size,
        scan=args.scan_layers,
        dtype=args.dtype,
    )
    graphdef, params = model.init_sharded(config, args.seed, devices)
    tx, rate, table = optimizers.make_optimizer(args, params)
    stats = optimizers.make_stats(args, params) if args.log_stats else None
    state = training.init_state(tx, params, devices, stats)
    checkpoints = checkpoint.Checkpoints(out / "checkpoints", args.keep)
    if start:
        with processes.alike():
            state = checkpoints.restore(start, state)

    # Process 0 keeps the log.
    facts = dict(
        name=name,
        parameters=sum(x.size for x in jax.tree.leaves(params)),
        unigram_entropy=corpus.val.unigram_entropy(),
        platform=devices.devices.flat[0].platform,
        device_count=devices.devices.size,
        jax_version=jax.__version__,
    )
    log = None
    if jax.process_index() == 0:
        begin = functools.partial(folder.begin, out, args, start, facts)
        others = loggers.openers(args, out, start, name)
        log = metrics.Log(out, start, args.steps, facts, begin, others)
        log.say(
            f"{name}: {facts['parameters']:,} parameters, {facts['device_count']} "
            f"{facts['platform']} devices, {args.axis_types} axes, in {out}"
        )
        log.say(
            f"data: {corpus.source}: {corpus.train.size:,} tokens to train on, "
            f"{corpus.val.size:,} held out"
        )
        log.say(table)
        if start < args.steps:
            log.say("compiling the step: a minute or so without a word")
        if args.resume and start < args.steps:
            for line in folder.resumed(out, args, start):
                log.say(line)

    window = args.seq_len + 1
    loop = Loop(
        args=args,
        start=start,
        train_step=training.make_train_step(graphdef, tx, rate, state, stats),
        val_loss=training.make_val_loss(graphdef),
        batch=lambda step: training.put_batch(
            devices,
            corpus.train,
            corpus.positions(args.seed, step, args.batch_size, window),
            window,
        ),
        val_batch=lambda i: training.put_batch(
            devices,
            corpus.val,
            corpus.val_positions(i, args.batch_size, window),
            window,
        ),
        checkpoints=checkpoints,
        log=log,
    )
    return loop.run(state)


if __name__ == "__main__":
    sys.exit(main())
