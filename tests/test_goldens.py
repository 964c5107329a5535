"""The recorded trajectories are read in the orientation they were recorded in."""

import numpy as np
import pytest
from goldens import golden_names, load_golden, read_golden

CASES = [name for name in golden_names() if not name.startswith("scalar_rules")]


@pytest.mark.parametrize("name", CASES)
def test_selected_slices_lie_where_they_were_recorded(name):
    case = load_golden(name)
    meta, arrays = read_golden(name)
    heads = meta["hyperparameters"]["num_heads"] or 1
    for i, leaf in enumerate(case.leaves):
        steps, ndim = len(leaf.grads), leaf.init.ndim
        reduction, output = ([1 + a for a in g] for g in (leaf.reduction, leaf.output))
        rows = leaf.decayed.any(axis=tuple(reduction))  # [T, *batch, out]
        columns = leaf.decayed.any(axis=tuple(output))  # [T, *batch, *in]
        if heads > 1:  # recorded of the fused matrix (H * d, in)
            rows = rows.reshape(steps, -1)
            columns = columns.any(axis=2)
        if len(reduction) > 1:  # [T, *taps, in], recorded (in, *taps) flat
            columns = np.moveaxis(columns, ndim - 1, 1).reshape(steps, -1)
        if f"changed_rows_{i}" in arrays:
            np.testing.assert_array_equal(rows, arrays[f"changed_rows_{i}"])
            np.testing.assert_array_equal(columns, arrays[f"changed_cols_{i}"])
        held = (meta["layout"]["shard_sizes"] or [[]] * len(case.leaves))[i]
        sharded = [(n, p) for n, p in zip(leaf.init.shape, leaf.shards) if p > 1]
        if sharded:
            ((n, p),) = sharded
            width = -(-n // p)
            own = [min(max(n - j * width, 0), width) for j in range(p)]
            whole_heads = sum(held) // n
            assert [whole_heads * size for size in own] == held
        else:
            assert len(held) <= 1
        assert leaf.decayed.any()


def test_goldens_cover_every_family():
    families = {name.split("__")[0] for name in golden_names()}
    assert len(golden_names()) == 111 and families == {
        *("dion2_core", "dion2_schedule", "dion2_zerograd", "dion2_multi"),
        *("dion2_batch", "dion2_flatten", "dion2_heads", "dion2_bf16params"),
        *("nordion2_core", "dist_rows", "dist_cols", "dist_replicated", "dist_batch"),
        *("dist_heads", "dist_nordion2", "scalar_rules"),
    }
    tight = golden_names(["dist_rows", "dist_cols"], precision="float32_ns")
    assert len(tight) == 21 and not any("bf16_ns" in name for name in tight)


def test_almost_all_record_which_slices_changed():
    recorded = {n for n in golden_names() if "changed_rows_0" in read_golden(n)[1]}
    assert len(recorded) == 109
    assert recorded <= set(CASES)
    for name in recorded:
        meta, arrays = read_golden(name)
        for i in range(meta["num_params"]):
            assert {f"changed_rows_{i}", f"changed_cols_{i}"} <= set(arrays)


def test_uneven_cases():
    uneven = {name for name in CASES if load_golden(name).uneven}
    assert len(uneven) == 18 and "dist_rows__w8_3of18x12_local__bf16_ns" in uneven
    for name in CASES:
        for leaf in load_golden(name).leaves:
            sizes = zip(leaf.init.shape, leaf.shards, strict=True)
            assert any(n % p for n, p in sizes) == (name in uneven)
