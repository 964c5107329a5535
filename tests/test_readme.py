"""The README's code runs as printed."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp

import dion2_jax

README = Path(__file__).parents[1] / "README.md"


def blocks():
    return re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


def test_quick_start(capsys):
    code, _ = blocks()
    names: dict = {}
    exec(compile(code, "README.md", "exec"), names)
    first = jnp.mean((jnp.ones((8, 64)) @ (jnp.ones((64, 32)) / 8)) ** 2)
    assert names["loss"] < first
    assert names["params"]["kernel"].sharding.spec == names["rows"].spec
    assert "dion2" in capsys.readouterr().out


def test_rule_for_other_leaves():
    names: dict = {}
    exec(compile(blocks()[1], "README.md", "exec"), names)
    params = {
        "query": {"kernel": jnp.ones((8, 2, 4)), "bias": jnp.ones((2, 4))},
        "experts": jnp.ones((3, 8, 16)),
        "conv": {"kernel": jnp.ones((3, 3, 4, 8))},
        "readout": {"kernel": jnp.ones((8, 16))},
        "up": jnp.ones((8, 16)),
    }
    rows = dion2_jax.describe(params, weight_dimension_numbers=names["rule"]).rows
    taken = {row.path: row.taken_by for row in rows}
    assert {path for path, by in taken.items() if by == "adamw"} == {
        "query/bias",
        "readout/kernel",
    }
    state = jax.eval_shape(names["tx"].init, params)
    jax.eval_shape(names["tx"].update, params, state, params)
