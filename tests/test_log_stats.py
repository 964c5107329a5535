"""train_lm.py --log-stats, --tensorboard and --wandb: what they write, and resumes."""

import argparse
import csv
import shutil
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_examples  # puts examples/ on the path

from lm import (  # isort: skip
    checkpoint,
    flags,
    folder,
    loggers,
    metrics,
    stats,
    training,
)
from lm.errors import UserError
from test_examples import refused, run, text  # noqa: F401

import dion2_jax

start = test_examples.start  # the fixture


def rows(out):
    with open(out / "stats.csv", newline="") as file:
        return list(csv.DictReader(file))


FEW = "--devices 2 --layers 1 --steps 8 --val-every 4 --log-stats 2".split()


@pytest.fixture(scope="module")
def logged(run, tmp_path_factory):  # noqa: F811
    out = tmp_path_factory.mktemp("runs") / "logged"
    run(out, *FEW)
    return out


def test_a_run_writes_stats_and_a_heat_map(logged):
    found = rows(logged)
    names = list(dict.fromkeys(row["of"] for row in found))
    assert names[:2] == ["#0", "#1"] and "blocks/0/mlp/up/kernel" in names
    assert len(names) == 2 + 6
    wanted = [(str(step), of) for step in (2, 4, 6, 8) for of in names]
    assert [(row["step"], row["of"]) for row in found] == wanted
    for row in found:
        assert 0.25 < float(row["selected_mass"]) < 1
        low, middle, high = (float(row[f"norm_{x}"]) for x in ("min", "p50", "max"))
        assert low <= middle <= high and high >= 1
        assert (
            1 <= float(row["wait_mean"]) <= float(row["wait_max"]) <= int(row["step"])
        )
        assert 0 < float(row["orthogonality_error"]) < 1
        assert 0 < float(row["update_to_parameter"]) < 1
    assert (logged / "slice_norms.png").read_bytes().startswith(b"\x89PNG")


def test_a_resumed_run_repeats_its_stats_and_writes_no_step_twice(
    logged,
    run,  # noqa: F811
    tmp_path,
):
    out = shutil.copytree(logged, tmp_path / "copy")
    (out / "checkpoints" / "8.sha256").unlink()  # as if killed before it was whole
    with open(out / "stats.csv", "a") as file:
        file.write("10,#0,0.3")  # a row torn by a kill
    stdout, _ = run(out, *FEW, "--resume")
    assert "resumed from step 4" in stdout
    assert (out / "stats.csv").read_bytes() == (logged / "stats.csv").read_bytes()


def test_waits_may_be_missing_in_a_checkpoint_or_be_others(tmp_path):
    def state(step, waits):
        return training.TrainState(jnp.int32(step), jnp.ones(3), jnp.ones(2), waits)

    with_waits, without = state(1, ((jnp.full((1, 4), 7),),)), state(2, None)
    checkpoints = checkpoint.Checkpoints(tmp_path, 9)
    checkpoints.save(1, with_waits)
    checkpoints.save(2, without)
    checkpoints.wait()
    zeros = state(0, ((jnp.zeros((1, 4), int),),))
    assert (checkpoints.restore(1, zeros).waits[0][0] == 7).all()
    assert not checkpoints.restore(2, zeros).waits[0][0].any()
    restored = checkpoints.restore(1, state(0, None))
    assert restored.step == 1 and restored.waits is None
    # Another mesh, another axis to select from.
    other = ((jnp.zeros((1, 6), int),),)
    restored = checkpoints.restore(1, state(0, other)).waits[0][0]
    assert restored.shape == (1, 6) and not restored.any()
    with pytest.raises(UserError, match="is only in the checkpoint"):
        checkpoints.restore(1, state(0, None)._replace(opt_state=None))
    checkpoints.close()


def test_overwriting_a_run_takes_its_stats_away(tmp_path):
    args = flags.parse(["--out", str(tmp_path), "--overwrite"])
    for name in ("stats.csv", "slice_norms.png"):
        (tmp_path / name).write_text("old")
    folder.begin(tmp_path, args, 0, {}).close()
    assert sorted(x.name for x in tmp_path.iterdir()) == ["config.json", "metrics.csv"]


def test_a_resume_without_stats_drops_the_rows_that_it_goes_back_behind(tmp_path):
    path = tmp_path / "stats.csv"
    table = stats.StatsFile(path, 0)
    for step in (2, 4, 6):
        table.write(step, {"#0": dict.fromkeys(stats.NUMBERS, np.float32(0.5))})
    table.close()
    args = flags.parse(["--out", str(tmp_path), "--resume"])
    folder.begin(tmp_path, args, 4, {}).close()
    assert [row["step"] for row in rows(tmp_path)] == ["2", "4"]


def test_the_table_has_every_number_of_a_report():
    params = {"w": np.ones((4, 6), np.float32)}
    state, measure = dion2_jax.scale_by_dion2().init(params), dion2_jax.stats()
    waits = measure.init(params)
    report, _ = measure.measure(params, state, params, waits, params)
    found = stats.flat(jax.tree.map(np.asarray, report))
    assert found.keys() == {"#0", "w"}
    assert all(set(x) == set(stats.NUMBERS) for x in found.values())


def test_stats_are_refused_of_other_optimizers(capsys):
    said = "--log-stats is of dion2 and dion3, not of --optimizer adamw"
    assert said in refused(capsys, "--log-stats", "5", "--optimizer", "adamw")


# TensorBoard and Weights & Biases


@pytest.mark.parametrize(
    "given, package",
    [("--tensorboard", "tensorboardX"), ("--wandb offline", "wandb")],
)
def test_a_missing_package_is_named_with_the_command(
    given,
    package,
    capsys,
    monkeypatch,
):
    monkeypatch.setattr(loggers.importlib.util, "find_spec", lambda name: None)
    line = refused(capsys, *given.split(), "--data", "/nowhere")
    flag = given.split()[0]
    command = f"python3 -m pip install {package}"
    assert (
        line == f"train_lm.py: error: {flag} needs the package {package}: {command}\n"
    )


def log_one_step(out, *given, after=0):
    """A `Log` with the loggers of these flags, one step long."""
    args = flags.parse([*given, "--out", str(out)])
    out.mkdir(exist_ok=True)
    log = metrics.Log(
        *(out, after, 9, dict(name="x", unigram_entropy=3.0)),
        lambda: metrics.MetricsFile(out / "metrics.csv", after),
        loggers.openers(args, out, after, "dion2-0.25_dp1_fsdp8"),
    )
    numbers = dict.fromkeys(stats.NUMBERS, np.float32(0.5))
    report = {"groups": {"#0": numbers}, "leaves": {"up/kernel/value": numbers}}
    loss, rate = np.float32(5), np.float32(0.125)
    log.step(after + 1, 8, loss, None, rate, 2.0, report)
    log.close()


WANTED = {"tokens": 8.0, "loss": 5.0, "learning_rate": 0.125, "tokens_per_second": 2.0}
WANTED |= {
    f"{name}/{of}": 0.5 for name in stats.NUMBERS for of in ("group0", "up/kernel")
}


class FakeRun:
    """What wandb.init returns, as far as it is used."""

    def __init__(self, **arguments):
        self.id = arguments["id"] or "new"
        self.arguments, self.rows, self.finished = arguments, {}, False

    def log(self, numbers, step):
        self.rows.setdefault(step, {}).update(numbers)

    def finish(self):
        self.finished = True


def test_wandb_gets_the_name_the_flags_and_every_number(monkeypatch, tmp_path):
    runs = []

    def init(**arguments):
        runs.append(FakeRun(**arguments))
        return runs[-1]

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    out = tmp_path / "run"
    log_one_step(out, "--wandb", "offline")
    log_one_step(out, "--wandb", "offline", after=1)
    first, second = runs
    assert first.arguments["name"] == "dion2-0.25_dp1_fsdp8"
    assert first.arguments["mode"] == "offline"
    assert first.arguments["dir"] == str(out)
    assert first.arguments["config"]["fraction"] == 0.25
    assert first.rows == {1: WANTED} and second.rows == {2: WANTED}
    assert first.finished and second.finished
    # A run that is gone on with stays one run.
    assert first.arguments["id"] is None
    assert second.arguments["id"] == "new" and second.arguments["resume"] == "allow"


def test_tensorboard_gets_every_number(monkeypatch, tmp_path):
    made = []

    class Writer:
        def __init__(self, logdir, purge_step):
            self.logdir, self.purge_step, self.rows = logdir, purge_step, {}
            made.append(self)

        def add_scalar(self, name, x, step):
            self.rows[name, step] = x

        def close(self):
            self.closed = True

    fake = types.SimpleNamespace(SummaryWriter=Writer)
    monkeypatch.setitem(sys.modules, "tensorboardX", fake)
    log_one_step(tmp_path / "run", "--tensorboard", after=3)
    (writer,) = made
    assert writer.logdir == str(tmp_path / "run" / "tensorboard")
    assert writer.purge_step == 4 and writer.closed
    assert writer.rows == {(name, 4): x for name, x in WANTED.items()}


def test_the_real_tensorboardx_writes_an_event_file(tmp_path):
    log_one_step(tmp_path / "run", "--tensorboard")
    (file,) = (tmp_path / "run" / "tensorboard").iterdir()
    content = file.read_bytes()
    assert b"learning_rate" in content and b"selected_mass/up/kernel" in content


def test_the_real_wandb_writes_an_offline_run(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    log_one_step(tmp_path / "run", "--wandb", "offline")
    assert list((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))
    assert (tmp_path / "run" / "wandb.id").read_text().strip()


def test_without_their_flags_nothing_is_needed(monkeypatch):
    monkeypatch.setattr(loggers.importlib.util, "find_spec", lambda name: None)
    loggers.require(argparse.Namespace(tensorboard=False, wandb=None))
    with pytest.raises(UserError):
        loggers.require(argparse.Namespace(tensorboard=True, wandb=None))
