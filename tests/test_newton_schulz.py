"""benchmarks/newton_schulz.py, in small, on whatever device there is."""

import json
import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "benchmarks"))

import newton_schulz  # noqa: E402

SMALL = "--batch 2 --repeats 2 --square 64 --shapes 16x32 32x32".split()


def test_both_methods_of_every_shape_are_measured(capsys):
    newton_schulz.main([*SMALL, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["product_rate"] > 0
    rows = [(row["shape"], row["method"]) for row in found["rows"]]
    assert rows == [
        (shape, method)
        for shape in ([16, 32], [32, 32])
        for method in ("direct", "gram")
    ]
    for row in found["rows"]:
        assert row["milliseconds"] > 0
        # Polar Express in bfloat16 on random matrices; a square one has small values.
        assert row["largest_singular_value"] < 1.2
        if row["shape"] == [16, 32]:
            assert row["smallest_singular_value"] > 0.7


def test_the_table_has_a_line_a_row(capsys):
    newton_schulz.main(SMALL[:-1])
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in printed[-2:]] == [
        ["16x32", "direct"],
        ["16x32", "gram"],
    ]


@pytest.mark.parametrize("shape", ["512", "512x", "64x32", "0x8", "axb", "8xax8"])
def test_a_shape_that_is_none_is_refused(shape, capsys):
    with pytest.raises(SystemExit, match="2"):
        newton_schulz.main(["--shapes", shape])
    assert "expected ROWSxCOLUMNS" in capsys.readouterr().err
