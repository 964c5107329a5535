"""The static arguments of a step, checked, and what orthogonalizing by them costs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from dion2_jax import _arguments as check
from dion2_jax._orthogonalize import (
    cheaper_method,
    gram_restarts,
    newton_schulz_table,
    ns_flops,
)
from dion2_jax._selection import SCORES
from dion2_jax._symmetric import summed

FLOAT32 = 4


@dataclass(frozen=True)
class Options:
    """The static arguments of `scale_by_dion2` that a step reads."""

    score: str
    seed: int
    table: tuple
    norm_scale: float
    ns_method: str
    dtype: Any
    newton_schulz_fn: Callable | None

    def method(self, shape: tuple[int, int], team: int) -> str:
        """ "direct" or "gram", for a matrix on a team of devices."""
        if self.ns_method != "auto":
            return self.ns_method
        return cheaper_method(*shape, **self._iterations(team))

    def operations(self, shape: tuple[int, int], team: int) -> float:
        """Of one device on one matrix; 0 where a function is given: unknown."""
        if self.newton_schulz_fn is not None:
            return 0.0
        method = self.method(shape, team)
        return ns_flops(*shape, method=method, **self._iterations(team))

    def reduced_bytes(self, shape: tuple[int, int], team: int) -> int:
        """Summed over a team for one matrix: Gram products, and a norm at three scales.

        Result bytes, each all-reduce counted once.
        """
        if team == 1:
            return 0
        if self.method(shape, team) == "direct":
            width = len(self.table) * self.dtype.itemsize
        else:
            width = (1 + gram_restarts(self.table)) * FLOAT32
        return summed(shape[0]) * width + 3 * FLOAT32

    def _iterations(self, team: int) -> dict[str, Any]:
        return dict(
            steps=len(self.table),
            dtype=self.dtype,
            team=team,
            restarts=gram_restarts(self.table),
        )


def make_options(
    *,
    score: str,
    seed: int,
    ns_coeffs,
    ns_steps: int,
    ns_method: str,
    ns_dtype,
    newton_schulz_fn: Callable | None,
) -> Options:
    """The options of these arguments of `scale_by_dion2`, or their errors."""
    check.check_choice("score", score, SCORES)
    check.check_choice("ns_method", ns_method, ("direct", "gram", "auto"))
    seed = check.check_int("seed", seed, 0, 2**32)
    check.check_callable("newton_schulz_fn", newton_schulz_fn)
    dtype = check.check_dtype("ns_dtype", ns_dtype, (jnp.bfloat16, jnp.float32))
    table, norm_scale = newton_schulz_table(ns_coeffs, ns_steps)
    return Options(
        *(score, seed, table, norm_scale, ns_method, dtype, newton_schulz_fn)
    )
