"""Schedule any number of Dion2, not only the learning rate.

    python examples/howto/schedules.py

A schedule as learning_rate needs nothing. For the others `optax.inject_hyperparams`
keeps the numbers in the state, where they can also be read, logged and set. What fixes
shapes must stay out of it: `static_args=dion2_jax.STATIC_ARGS`, always.
"""

import jax
import jax.numpy as jnp
import optax

import dion2_jax

STEPS = 40
SCHEDULES = {
    "learning_rate": optax.warmup_cosine_decay_schedule(0.0, 0.05, 4, STEPS),
    "ef_decay": optax.linear_schedule(0.85, 0.95, STEPS // 2),
    "weight_decay": optax.piecewise_constant_schedule(0.1, {STEPS // 2: 0.1}),
    "adam_learning_rate": optax.warmup_cosine_decay_schedule(0.0, 0.01, 4, STEPS),
}


def main():
    """Trains; returns the losses and the numbers of every step."""
    tx = optax.inject_hyperparams(
        dion2_jax.dion2,
        static_args=dion2_jax.STATIC_ARGS,
        hyperparam_dtype=jnp.float32,  # else that of the parameters: bfloat16 is coarse
    )(fraction=0.25, **SCHEDULES)
    x = jax.random.normal(jax.random.key(0), (128, 32))
    y = x @ jax.random.normal(jax.random.key(1), (32, 64)) + 1
    params = {"kernel": jnp.zeros((32, 64)), "bias": jnp.zeros(64)}

    @jax.jit
    def step(params, state):
        def loss(params):
            return jnp.mean((x @ params["kernel"] + params["bias"][None, :] - y) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    state, losses, log = tx.init(params), [], []
    for i in range(STEPS):
        params, state, loss = step(params, state)
        losses.append(float(loss))
        log.append({name: float(state.hyperparams[name]) for name in SCHEDULES})
        if i % 5 == 0:
            said = "  ".join(f"{name} {value:.3g}" for name, value in log[-1].items())
            print(f"step {i:3}  loss {loss:6.2f}  {said}")
    return losses, log


if __name__ == "__main__":
    main()
