"""Every argument's check: the error names the argument, the value and the range."""

import re

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dion2_jax

# argument, its range
ANY = "[0, 3.403e+38]"  # what float32 holds
NUMBERS = {"ef_decay": "[0, 1]", "eps": ANY, "neuron_beta2": "[0, 1]"}
ADAM = {"adam_b1": "[0, 1)", "adam_b2": "[0, 1)", "adam_eps": ANY}
RATES = {
    "learning_rate": ANY,
    "adam_learning_rate": ANY,
    "weight_decay": ANY,
    "adam_weight_decay": ANY,
}

# argument, bad value, error, parts of its message besides the argument's name
BOTH = [
    ("fraction", 0.0, ValueError, ["(0, 1]", "0.0"]),
    ("fraction", -0.25, ValueError, ["(0, 1]", "-0.25"]),
    ("fraction", 1.5, ValueError, ["(0, 1]", "1.5"]),
    ("fraction", float("nan"), ValueError, ["(0, 1]", "nan"]),
    ("fraction", True, TypeError, ["(0, 1]", "True"]),
    ("fraction", "half", TypeError, ["(0, 1]", "'half'"]),
    ("selection", "some", ValueError, ["'local', 'global'", "'some'"]),
    ("select_axis", 0, ValueError, ["'sharded', 'shorter', 'output', 'reduction'"]),
    ("score", "l3", ValueError, ["'l1'", "'l2'", "'random'", "'l3'"]),
    ("seed", -1, ValueError, ["at least 0", "-1"]),
    ("seed", 2**32, ValueError, ["less than 4294967296"]),
    ("seed", 0.5, TypeError, ["int of at least 0", "0.5"]),
    ("ns_coeffs", "cubic", ValueError, ["'polar_express'", "'cubic'"]),
    ("ns_steps", 0, ValueError, ["at least 1", "0"]),
    ("ns_steps", 2.5, TypeError, ["int", "2.5"]),
    ("ns_method", "fast", ValueError, ["'direct', 'gram', 'auto'", "'fast'"]),
    ("ns_dtype", jnp.float16, ValueError, ["bfloat16, float32", "float16"]),
    ("ns_dtype", "tall", TypeError, ["dtype", "'tall'"]),
    ("newton_schulz_fn", 3, TypeError, ["function", "3"]),
    ("mu_dtype", jnp.int32, ValueError, ["float32, bfloat16", "int32"]),
    ("share_replicas", 1, TypeError, ["True or False", "1"]),
    ("max_exchange_bytes", 0, ValueError, ["at least 1", "0"]),
    ("max_exchange_bytes", 1e6, TypeError, ["int of at least 1", "1000000.0"]),
]
ALIAS = [
    ("adjust_lr", "fro", ValueError, ["'spectral_norm', 'rms_norm', None", "'fro'"]),
    ("adjust_fraction", None, TypeError, ["True or False", "None"]),
]


def numbers(ranges):
    for name, where in ranges.items():
        yield name, -0.5, ValueError, [where, "-0.5"]
        yield name, 1e39, ValueError, [where, "1e+39"]
        yield name, float("nan"), ValueError, [where, "nan"]
        yield name, jnp.float32(jnp.nan), ValueError, [where, "nan"]
        yield name, "much", TypeError, ["number", "'much'"]
        yield name, jnp.ones(3), TypeError, ["scalar", "float32(3,)"]
        yield name, jnp.complex64(1j), TypeError, ["real scalar", "complex64()"]


@pytest.mark.parametrize("name, value, error, parts", [*BOTH, *numbers(NUMBERS)])
def test_scale_by_dion2_refuses(name, value, error, parts):
    with pytest.raises(error, match=re.escape(name)) as caught:
        dion2_jax.scale_by_dion2(**{name: value})
    assert all(part in str(caught.value) for part in parts), caught.value


@pytest.mark.parametrize(
    "name, value, error, parts",
    [*BOTH, *ALIAS, *numbers(NUMBERS | ADAM | RATES)],
)
def test_dion2_refuses(name, value, error, parts):
    with pytest.raises(error, match=re.escape(name)) as caught:
        dion2_jax.dion2(**({"learning_rate": 0.1} | {name: value}))
    assert all(part in str(caught.value) for part in parts), caught.value


@pytest.mark.parametrize("value", [jnp.float32(0.5), np.array(0.5)])
def test_an_array_fraction_names_the_static_arguments(value):
    with pytest.raises(TypeError, match=r"fraction.*dion2_jax\.STATIC_ARGS"):
        dion2_jax.dion2(0.1, value)
    with pytest.raises(TypeError, match=r"fraction.*SCALE_BY_DION2_STATIC_ARGS"):
        dion2_jax.scale_by_dion2(value)


def test_injecting_without_static_arguments_names_them():
    injected = optax.inject_hyperparams(dion2_jax.dion2)
    with pytest.raises(TypeError, match=r"fraction.*static_args.*STATIC_ARGS"):
        injected(0.1).init({"w": jnp.ones((8, 16))})


def test_update_without_parameters_says_what_to_call():
    params = {"w": jnp.ones((8, 16))}
    tx = dion2_jax.dion2(0.1)
    with pytest.raises(ValueError, match=r"update\(updates, state, params\)"):
        tx.update(params, tx.init(params))
