"""examples/lm/training.py: a step whose gradient is not finite is no step at all."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import two_processes  # noqa: F401  (puts examples on the path)

from lm import training  # isort: skip

import dion2_jax


def test_a_bad_step_changes_nothing_and_is_not_counted(monkeypatch):
    """Nor do the schedule and the waits of --log-stats go on."""
    monkeypatch.setattr(training.nnx, "merge", lambda graphdef, params: params)
    monkeypatch.setattr(training, "next_token_loss", lambda p, x: jnp.sum(p["w"] * x))
    mesh = jax.make_mesh((1,), ("x",), (jax.sharding.AxisType.Auto,))
    params = {"w": jax.device_put(np.ones((4, 8), np.float32), jax.devices()[0])}
    tx = optax.apply_if_finite(dion2_jax.dion2(0.1), max_consecutive_errors=99)
    stats = dion2_jax.stats()
    state = training.init_state(tx, params, mesh, stats)
    step = training.make_train_step(None, tx, lambda count: count, state, stats)

    good = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)
    bad = np.where(np.arange(8) == 3, np.nan, good)
    told, kept = [], []
    for x in (good, bad, bad, good):
        state, report = step(state, jnp.asarray(x))
        told.append((int(report.bad_steps), int(report.learning_rate)))
        tree = (state.params, state.opt_state.inner_state, state.waits)
        kept.append(jax.tree.map(np.asarray, tree))
    # Bad steps in a row, and updates done before.
    assert told == [(0, 0), (1, 1), (2, 1), (0, 1)]
    assert int(state.step) == 4
    for after_bad in kept[1:3]:
        jax.tree.map(np.testing.assert_array_equal, after_bad, kept[0])
    for before, after in zip(kept[0], kept[3], strict=True):
        pairs = zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
        assert any((a != b).any() for a, b in pairs)
