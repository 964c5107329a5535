"""The README's quick start runs as printed."""

import re
from pathlib import Path

import jax.numpy as jnp

README = Path(__file__).parents[1] / "README.md"


def test_quick_start(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    names: dict = {}
    exec(compile(code, "README.md", "exec"), names)
    first = jnp.mean((jnp.ones((8, 64)) @ (jnp.ones((64, 32)) / 8)) ** 2)
    assert names["loss"] < first
    assert names["params"]["kernel"].sharding.spec == names["rows"].spec
    assert "dion2" in capsys.readouterr().out
