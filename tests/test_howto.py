"""Every how-to runs, and shows what it says."""

import pathlib
import re
import runpy

import jax
import numpy as np
import pytest
from helpers import dion2_state
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

ROOT = pathlib.Path(__file__).parents[1]
SCRIPTS = sorted((ROOT / "examples" / "howto").glob("*.py"))


def run(name, **arguments):
    """What the script's main returns."""
    return runpy.run_path(ROOT / "examples" / "howto" / f"{name}.py")["main"](
        **arguments
    )


def lies(x, *spec):
    """Whether an array is partitioned so."""
    wanted = NamedSharding(x.sharding.mesh, P(*spec))
    return x.sharding.is_equivalent_to(wanted, x.ndim)


def test_nnx_training(capsys):
    losses, model, optimizer = run("nnx_training", steps=25)
    assert losses[-1] < 0.6 * losses[0]
    momenta = [m for m in jax.tree.leaves(optimizer.opt_state) if m.shape == (256, 256)]
    assert len(momenta) == 4 and all(lies(m, "fsdp") for m in momenta)
    assert lies(model.up.kernel.get_value(), "fsdp")
    assert "8 of 32 reduction a shard" in capsys.readouterr().out


def test_linen_train_state():
    losses, state = run("linen_train_state", steps=25)
    assert losses[-1] < 0.6 * losses[0]
    mu = dion2_state(state.opt_state).mu
    for name in ("Dense_0", "Dense_1"):
        assert lies(state.params[name]["kernel"], "fsdp")
        assert lies(mu[name]["kernel"], "fsdp") and mu[name]["kernel"].any()


def test_scanned_fsdp_tp():
    loss, params, state = run("scanned_fsdp_tp", steps=25)
    assert loss < 3.2  # 5.5 is that of a uniform guess
    mu = dion2_state(state).mu
    assert set(mu) == {"query", "key", "value", "out", "up", "down", "embed"}
    assert mu["up"].sharding.spec == params["up"].sharding.spec == P(None, "fsdp", "tp")
    assert mu["down"].sharding.spec == P(None, "tp", "fsdp")


def test_mixture_of_experts():
    losses, params, table = run("mixture_of_experts", steps=60)
    assert np.mean(losses[-5:]) < 0.5 * losses[0]
    assert lies(params["up"], "expert", "fsdp")
    rows = {row.path: row for row in table.rows}
    assert rows["router"].taken_by == "adamw"
    # Experts stay where they are: the exchange is over fsdp alone.
    assert rows["up"].exchange.endswith(" fsdp")
    assert rows["down"].exchange.endswith(" fsdp")


def test_abstract_init():
    state, after = run("abstract_init")
    for each in (state, after):
        up, down = (each.params[k]["kernel"].value for k in ("up", "down"))
        assert lies(up, "fsdp", "tensor") and lies(down, "tensor", "fsdp")
        assert lies(each.params["Embed_0"]["embedding"].value, None, "fsdp")
        for x in jax.tree.leaves(each):
            assert len(x.devices()) == 8
        mu = dion2_state(each.opt_state).mu
        assert lies(mu["up"]["kernel"].value, "fsdp", "tensor")
    assert not (state.params["up"]["kernel"].value == up).all()


def test_from_optax_muon():
    found = run("from_optax_muon", steps=20)
    before, wanted, same, after = found.values()
    np.testing.assert_allclose(same, wanted, rtol=1e-4)
    assert wanted[-1] < wanted[0] < before[-1]
    assert after[0] == wanted[0] and after[-1] < 0.9 * after[0]


def test_from_adamw():
    found = run("from_adamw", steps=30, multiples=(20,))
    before, adamw, alike, larger = ((x[0], x[-5:].mean()) for x in found.values())
    assert adamw[0] == alike[0] == larger[0]  # all go on from the same parameters
    assert max(adamw[1], alike[1], larger[1]) < before[1] < before[0]


def test_choosing_fraction():
    found = run("choosing_fraction", fractions=(0.5, 0.25), steps=20)
    (half, share, cost), (quarter, fewer, less) = found.values()
    assert max(half, quarter) < 3.0 < np.log(256)
    assert 0.5 < share < 2 * fewer < 2 * share
    # Bytes go with the fraction; operations also with the square of the short side.
    assert less.bytes == cost.bytes / 2
    assert less.operations < cost.operations / 4


def test_schedules():
    losses, log = run("schedules")
    assert losses[-1] < losses[0]
    assert log[0]["learning_rate"] == 0 and max(x["learning_rate"] for x in log) > 0.049
    assert log[0]["ef_decay"] == pytest.approx(0.85)
    assert log[-1]["ef_decay"] == pytest.approx(0.95)
    assert {round(x["weight_decay"], 6) for x in log} == {0.1, 0.01}


def test_accumulation():
    once, repeated, few, many = run("accumulation")
    assert few == 2 and many == 8
    for name, kernel in once.items():
        np.testing.assert_allclose(kernel, repeated[name], atol=1e-6)
    key, *_ = jax.random.split(jax.random.key(0), 3)
    start = jax.random.normal(key, (64, 64)) / 8
    assert abs(np.asarray(once["in"] - start)).max() > 0.01  # they moved


def test_tpu_pod_on_one_host():
    losses, kernel = run("tpu_pod")
    assert losses[-1] < 0.8 * losses[0]
    assert lies(kernel, "fsdp") and len(kernel.devices()) == 8


def test_commands_of_the_pod_page(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    from lm import flags

    page = (ROOT / "docs" / "tpu_pod.md").read_text().replace("\\\n", " ")
    commands = re.findall(r"examples/train_lm\.py([^'`\n]*)", page)
    parsed = [flags.parse(command.split()) for command in commands]
    assert len(parsed) >= 3 and any(args.coordinator for args in parsed)
    assert all(args.distributed or args.processes > 1 for args in parsed)


def test_every_script_is_short_listed_and_tested():
    page = (ROOT / "docs" / "howto.md").read_text()
    tests = pathlib.Path(__file__).read_text()
    assert len(SCRIPTS) >= 11
    for script in SCRIPTS:
        lines = script.read_text().splitlines()
        assert len(lines) < 80, script.name
        assert f"../examples/howto/{script.name}" in page, script.name
        assert f'= run("{script.stem}"' in tests, script.name
        assert f"python examples/howto/{script.name}" in lines[2], script.name
    assert "docs/howto.md" in (ROOT / "README.md").read_text()
    assert "tpu_pod.md" in page
