"""Pieces of several slots travel in one array, and come out of it as they went in."""

import jax.numpy as jnp
import numpy as np
import pytest

from dion2_jax._exchange import _cut, _join

# (repeat, k, c) of every slot, and the shape of what a device sends another.
SEAMS = {
    "one slot": ([(2, 3, 8)], (2, 3, 8)),
    "rows line up": ([(2, 6, 4), (3, 2, 4)], (18, 4)),
    "one is twice as wide": ([(2, 3, 256), (3, 3, 128)], (21, 128)),
    "widths share a tile": ([(2, 3, 384), (1, 2, 256)], (22, 128)),
    "narrower than a tile: whole pieces": ([(2, 3, 8), (3, 3, 4)], (7, 12)),
    "one wider, one narrower than their rows": ([(1, 1, 9), (2, 1, 6)], (7, 3)),
    "no common divisor": ([(2, 1, 3), (3, 1, 2)], (12, 1)),
}


@pytest.mark.parametrize("name", SEAMS)
def test_what_is_joined_is_cut_again(name):
    shapes, sent = SEAMS[name]
    rng = np.random.default_rng(0)
    pieces = [jnp.asarray(rng.normal(size=(5, *s)), jnp.float32) for s in shapes]
    buffer = _join(pieces)
    assert buffer.shape == (5, *sent)
    # In any order of devices: what is for one of them lies in its row.
    order = np.array([3, 1, 4, 0, 2])
    for found, piece in zip(_cut(buffer[order], shapes), pieces, strict=True):
        np.testing.assert_array_equal(found, piece[order])
