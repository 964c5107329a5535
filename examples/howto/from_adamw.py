"""Change a run from AdamW to Dion2, keeping AdamW's moments where AdamW stays.

    python examples/howto/from_adamw.py

AdamW's learning rate goes on as adam_learning_rate. That of the matrices is another
quantity: try some multiples of it, as here. With adjust_lr="rms_norm" an update is as
large as AdamW's usually is (Liu et al., Muon is Scalable for LLM Training, 2025,
arXiv:2502.16982): its rate then trains too, but tuning finds better.
"""

import argparse  # its source is the text

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dion2_jax

CONTEXT, BATCH, RATE = 8, 256, 0.004
SHAPES = {"embed": (256, 32), "up": (256, 128), "down": (128, 128), "head": (128, 256)}


def loss_of(params, tokens):
    """Mean cross-entropy in nats of the last of int32[B, CONTEXT + 1]."""
    x = params["embed"][tokens[:, :-1]].reshape(len(tokens), -1)
    x = jax.nn.relu(jax.nn.relu(x @ params["up"]) @ params["down"])
    losses = optax.softmax_cross_entropy_with_integer_labels
    return losses(x @ params["head"], tokens[:, -1]).mean()


def dion2_state(tx, params, adamw_state):
    """The state of `tx`, a `dion2`, after a run of `optax.adamw`; momentum is empty."""
    states = tx.init(params).inner_states
    new, *rest = states["adam"].inner_state  # moments, masked where Dion2 takes over
    old, *_ = adamw_state
    is_masked = lambda x: isinstance(x, optax.MaskedNode)  # noqa: E731
    pick = lambda n, o: n if is_masked(n) else o  # noqa: E731
    kept = jax.tree.map(pick, new, old, is_leaf=is_masked)
    states["adam"] = states["adam"]._replace(inner_state=(kept, *rest))
    return optax.PartitionState(states)


def train(tx, params, state, batches):
    """All batches in turn; returns parameters, state and losses."""

    def step(carry, tokens):
        loss, grads = jax.value_and_grad(loss_of)(carry[0], tokens)
        updates, state = tx.update(grads, carry[1], carry[0])
        return (optax.apply_updates(carry[0], updates), state), loss

    (params, state), losses = jax.lax.scan(step, (params, state), batches)
    return params, state, losses


def main(steps=60, multiples=(10, 20, 40)):
    """Returns the losses of AdamW, and of several ways to go on."""
    rng, text = np.random.default_rng(0), np.fromfile(argparse.__file__, np.uint8)
    params = {k: jnp.asarray(rng.normal(size=s) / 16) for k, s in SHAPES.items()}
    starts = rng.integers(len(text) - CONTEXT, size=(2, steps, BATCH, 1))
    first, second = jnp.asarray(text[starts + np.arange(CONTEXT + 1)], jnp.int32)

    adamw = optax.adamw(RATE, b2=0.95, weight_decay=0.01)
    params, state, losses = train(adamw, params, adamw.init(params), first)
    found = {"AdamW alone, so far": losses}
    found["AdamW again"] = train(adamw, params, state, second)[2]
    ways = {"Dion2, rms_norm": dict(learning_rate=RATE, adjust_lr="rms_norm")}
    ways |= {f"Dion2, {m} x rate": dict(learning_rate=m * RATE) for m in multiples}
    for name, arguments in ways.items():
        tx = dion2_jax.dion2(adam_learning_rate=RATE, **arguments)
        found[name] = train(tx, params, dion2_state(tx, params, state), second)[2]
    for name, losses in found.items():
        print(f"{name:20}  {losses[-5:].mean():.3f} nats a byte")
    return found


if __name__ == "__main__":
    main()
