"""What `dion2_jax.stats` costs: python benchmarks/stats_cost.py

The default model of examples/train_lm.py on eight emulated devices: its optimizer's
step and its whole training step, each without stats and with those of every step, timed
in turn (the median of the ratios), and counted in compiled text.
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from lm import flags, processes  # noqa: E402

processes.emulate(8)

import hlo_cost  # noqa: E402
import jax  # noqa: E402
import numpy as np  # noqa: E402
from lm import mesh, model, optimizers, training  # noqa: E402


def measured(name, steps, rounds):
    """Prints one row; `steps`: the step without stats and with, as (compiled, args)."""
    costs = [hlo_cost.count(step.as_text()) for step, _ in steps]
    times = np.zeros((rounds, 2))
    for i in range(-1, rounds):  # the first round only warms up
        for j, (step, args) in enumerate(steps):
            start = time.perf_counter()
            jax.block_until_ready(step(*args))
            times[i, j] = time.perf_counter() - start
    number, wire = (
        [sum(kind[what] for kind in cost.collectives.values()) for cost in costs]
        for what in ("count", "bytes")
    )
    ratio = np.median(times[:, 1] / times[:, 0])
    work = costs[1].flops / costs[0].flops
    print(
        f"{name:<15} time x {ratio:.2f}, operations x {work:.3f}, collectives "
        f"{number[0]} + {number[1] - number[0]}, their bytes {wire[0]:,} + "
        f"{wire[1] - wire[0]:,}",
        flush=True,
    )


def main(rounds=20):
    args = flags.parse(["--log-stats", "1"])
    devices = mesh.make_mesh(1, 8, 1, "auto")
    jax.set_mesh(devices)
    config = model.GPTConfig(args.vocab_size or 256)
    graphdef, params = model.init_sharded(config, args.seed, devices)
    tx, rate, _ = optimizers.make_optimizer(args, params)
    stats = optimizers.make_stats(args, params)
    waits = stats.init(params)
    state = tx.init(params)

    def step(grads, state, params):
        return tx.update(grads, state, params)

    def step_and_stats(grads, state, params, waits):
        updates, after = tx.update(grads, state, params)
        return updates, after, stats.measure(grads, state, params, waits, updates)

    both = []
    for function, more in ((step, ()), (step_and_stats, (waits,))):
        given = (params, state, params, *more)
        both.append((jax.jit(function).lower(*given).compile(), given))
    measured("optimizer alone", both, rounds)
    rows = jax.sharding.NamedSharding(devices, mesh.P(mesh.BATCH))
    tokens = np.zeros((args.batch_size, args.seq_len + 1), np.int32)
    tokens = jax.device_put(tokens, rows)
    both = []
    for wanted in (None, stats):
        state = training.init_state(tx, params, devices, wanted)
        made = training.make_train_step(graphdef, tx, rate, state, wanted)
        whole = jax.jit(made.__wrapped__)  # without donation: it is called repeatedly
        both.append((whole.lower(state, tokens).compile(), (state, tokens)))
    measured("training step", both, rounds // 2)


if __name__ == "__main__":
    main()
