"""Change a run from optax.contrib.muon to Dion2 in the middle, by the same numbers.

    python examples/howto/from_optax_muon.py

    muon                                    dion2
    beta=0.95                               ef_decay=0.95
    nesterov=True, in Adam as well          none: the momentum itself is orthogonalized
    muon_weight_dimension_numbers           weight_dimension_numbers
    consistent_rms=0.2                      adjust_lr="rms_norm"
    factor sqrt(max(1, out / in))           adjust_lr="spectral_norm": sqrt(out / in)
    ns_coeffs="muon", gradients' dtype      ns_coeffs="polar_express", ns_dtype bfloat16
    weight_decay=0, adam_weight_decay=0     0.01 each
    adam_b2=0.999, eps for both             adam_b2=0.95, adam_eps
    every leaf of rank 2 is a matrix        but embeddings, heads and norms, by name
    every step takes the whole matrix       fraction=0.25

With fraction=1 and Muon's values Dion2 is Muon without Nesterov, on matrices no taller
than wide. Here it takes over Muon's state and goes on by the same numbers.
"""

import jax
import jax.numpy as jnp
import optax

import dion2_jax

MUON = dict(ns_coeffs="muon", weight_decay=0.0, adam_b2=0.999, adam_weight_decay=0.0)


def dion2_state(tx, params, muon_state, beta=0.95):
    """The state of `tx`, a `dion2`, as if it had taken Muon's steps."""
    state = tx.init(params).inner_states
    muon, adam = (muon_state.inner_states[k] for k in ("muon", "adam"))
    # Muon's momentum is (1 - beta) times the sum that Dion2 keeps, and Dion2 decays it
    # at the end of a step, not at the beginning of the next.
    mu = jax.tree.map(lambda m: m * beta / (1 - beta), muon.inner_state[0].mu)
    first, *rest = state["dion2"].inner_state
    matrices = state["dion2"]._replace(inner_state=(first._replace(mu=mu), *rest))
    return optax.PartitionState({"dion2": matrices, "adam": adam})


def main(steps=30):
    """Returns the losses of a run with Muon, and of three ways to go on."""
    keys = jax.random.split(jax.random.key(0), 4)
    params = {"up": jax.random.normal(keys[0], (32, 64)) / 6, "bias": jnp.zeros(64)}
    params["down"] = jax.random.normal(keys[1], (64, 64)) / 8
    x = jax.random.normal(keys[2], (256, 32))
    y = jnp.tanh(x @ jax.random.normal(keys[3], (32, 64)))

    def loss(params):
        hidden = jax.nn.relu(x @ params["up"] + params["bias"][None, :])
        return jnp.mean((hidden @ params["down"] - y) ** 2)

    def train(tx, params, state):
        def step(carry, _):
            value, grads = jax.value_and_grad(loss)(carry[0])
            updates, state = tx.update(grads, carry[1], carry[0])
            return (optax.apply_updates(carry[0], updates), state), value

        (params, state), losses = jax.lax.scan(step, (params, state), None, steps)
        return params, state, losses

    muon = optax.contrib.muon(0.02, nesterov=False)
    like_muon = dion2_jax.dion2(0.02, 1.0, ns_dtype=jnp.float32, **MUON)
    plain = dion2_jax.dion2(0.02)
    params, state, before = train(muon, params, muon.init(params))
    *_, wanted = train(muon, params, state)
    *_, same = train(like_muon, params, dion2_state(like_muon, params, state))
    *_, after = train(plain, params, dion2_state(plain, params, state))
    found = {"Muon": before, "then Muon": wanted}
    found |= {"or Dion2 with Muon's values": same, "or Dion2 by default": after}
    for name, losses in found.items():
        print(f"{name:30} loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    return found


if __name__ == "__main__":
    main()
