"""benchmarks/quality.py: the order of its runs, its rows, and that it trains as the
main job does."""

import argparse
import csv
import dataclasses
import inspect
import math
import pathlib
import sys
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import optax
import pytest

ROOT = pathlib.Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "examples")]

import quality  # noqa: E402
import quality_plots  # noqa: E402
import quality_rows  # noqa: E402
import quality_settings as settings  # noqa: E402
import quality_training  # noqa: E402
from lm import data, mesh, model, optimizers, training  # noqa: E402
from lm.errors import UserError  # noqa: E402
from quality_settings import SEEDS, SETTINGS, Run, Setting  # noqa: E402

import dion2_jax  # noqa: E402

NAMED = quality.NAMED
needs_two_rates = pytest.mark.skipif(
    "adam_learning_rate" not in inspect.signature(optax.contrib.muon).parameters,
    reason="Muon of this Optax has one rate for all: optimizers.make_muon",
)


def loss_of(run: Run, best: float = 0.05) -> float:
    """A made-up final loss: a parabola over log2 of the rate; huge rates diverge."""
    if run.rate > 1:
        return math.nan
    return 2 + 0.1 * math.log2(run.rate / best) ** 2 + 0.01 * run.seed


def play(loss, **arguments) -> dict[Run, float]:
    """All runs of the plan in their order."""
    done = {}
    while run := settings.next_run(done, **arguments):
        assert run not in done
        done[run] = loss(run)
        assert len(done) < 1000
    return done


@pytest.mark.parametrize(
    ("best", "tried"),
    [
        (0.05, [0.05, 0.1, 0.025]),
        (0.1, [0.05, 0.1, 0.025, 0.2]),
        (0.2, [0.05, 0.1, 0.025, 0.2, 0.4]),
        (0.0125, [0.05, 0.1, 0.025, 0.0125, 0.00625]),
        (1e-9, [0.05, 0.1, 0.025, 0.0125, 0.00625, 0.003125]),
    ],
)
def test_grid_goes_on_beyond_its_edge(best, tried):
    losses = {}
    while (rate := settings.next_rate(0.05, losses)) is not None:
        losses[rate] = loss_of(Run("small", "", rate, 0, 1), best)
    assert list(losses) == tried


def test_diverged_runs_are_worst_and_smaller_rates_follow():
    losses = {0.05: math.nan, 0.1: math.nan, 0.025: math.nan}
    assert settings.best_rate(losses) == 0.025
    assert settings.next_rate(0.05, losses) == 0.0125
    assert settings.best_rate(losses | {0.0125: 9.0}) == 0.0125


def test_plan_runs_what_matters_first():
    done = play(loss_of, steps=10)
    order = list(dict.fromkeys((run.setting, run.seed, run.model) for run in done))
    main, further = (
        [setting.name for setting in part] for part in (settings.MAIN, settings.FURTHER)
    )
    assert main[:5] == ["dion2-0.25", "muon", "adamw", "dion2-1", "dion3-0.25"]
    seeds = SEEDS[1:]
    assert order == [
        *[(name, 0, "small") for name in main],
        *[(name, seed, "small") for seed in seeds for name in main],
        *[(setting.name, 0, "large") for setting in settings.CONFIRMED],
        *[(name, 0, "small") for name in further],
        *[(name, seed, "small") for seed in seeds for name in further],
    ]
    # The other seeds and the large model run at what was best, which is 0.05 here.
    assert {run.rate for run in done if run.seed} <= {0.05, 0.04, 0.064}
    assert all(
        run.rate == 0.05 for run in done if run.seed and run.setting == "dion2-0.5"
    )
    large_rates = [
        r.rate for r in done if r.model == "large" and r.setting == "dion2-1"
    ]
    assert large_rates == [0.05, 0.025]


def test_plan_keeps_to_the_wanted_runs_of_its_length():
    only = quality.parse(["--only", "^small/muon$"]).only.search
    other = {Run("small", "muon", 0.02, 0, 99): 1.0}  # of another length: not counted
    done = play(lambda run: loss_of(run, 0.02), steps=10, wanted=only)
    assert {run.setting for run in done} == {"muon"}
    assert len(done) == 3 + 2
    assert settings.next_run(other, 10, only).rate == 0.02


def test_names_tell_settings_apart():
    assert len(NAMED) == len(SETTINGS)
    assert NAMED["dion2-0.25-global-shorter"] == Setting(
        "dion2", 0.25, "global", "shorter"
    )


def test_rows_of_a_run_replace_what_an_interrupted_one_left(tmp_path):
    path = tmp_path / "new" / "curves.csv"
    first, second = (Run("small", "muon", rate, 0, 4) for rate in (0.1, 0.2))
    rows = [dict(tokens=n, training_loss=n / 7, validation_loss="") for n in (1, 2)]
    quality_rows.put(path, quality_rows.CURVES, first, rows)
    quality_rows.put(path, quality_rows.CURVES, second, rows)
    quality_rows.put(path, quality_rows.CURVES, first, rows[:1])
    found = quality_rows.read(path, quality_rows.CURVES)
    runs = [quality_rows.run_of(row) for row in found]
    assert runs == [second, second, first]
    assert [row["tokens"] for row in found] == ["1", "2", "1"]
    assert [p.name for p in path.parent.iterdir()] == ["curves.csv"]


def test_writers_at_the_same_time_lose_no_row(tmp_path):
    path = tmp_path / "runs.csv"
    runs = [Run("small", "muon", 0.1, seed, 4) for seed in range(24)]
    row = dict(fraction="", tokens=1, validation_loss=2.5, seconds=1)
    with ThreadPoolExecutor(8) as pool:
        list(
            pool.map(
                lambda r: quality_rows.put(path, quality_rows.RUNS, r, [row]), runs
            )
        )
    assert quality_rows.finished(path) == dict.fromkeys(runs, 2.5)


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("runs.csv", "small,muon,0.02,0,305,,2498560"),  # torn
        ("runs.csv", "small,muon,0.02,0,305,,2498560,,495"),  # without a loss
        ("runs.csv", "<<<<<<< HEAD"),
        ("curves.csv", "small,muon,much,0,305,1,2.0,2.0"),
    ],
)
def test_a_line_that_is_no_row_is_named_before_a_run_is_trained(
    name, line, tmp_path, monkeypatch, capsys
):
    columns = quality_rows.RUNS if name == "runs.csv" else quality_rows.CURVES
    (tmp_path / name).write_text(",".join(columns) + "\n\n" + line + "\n")
    monkeypatch.setattr(quality_training, "Trainer", None)
    assert quality.main(["--out", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert f"{name}, line 3: expected model,setting" in said and line in said


@pytest.mark.parametrize("pattern", ["dion2_0.25", "large/dion2-0.125", "("])
def test_a_pattern_that_finds_nothing_is_refused(pattern, capsys):
    with pytest.raises(SystemExit):
        quality.parse(["--only", pattern])
    assert f"argument --only: {pattern!r} is" in capsys.readouterr().err


def test_large_runs_wait_for_the_rates_of_the_small_model(tmp_path):
    args = quality.parse(["--only", "^large/(muon|adamw)$", "--steps", "9"])
    assert settings.next_run({}, 9, args.only.search) is None
    said = quality.nothing_left({}, args)
    assert said == "large models wait for the rates of small/muon, small/adamw"
    done = play(loss_of, steps=9)
    assert quality.nothing_left(done, args) == "all runs are done"


LENGTH, BATCH, STEPS = 16, 8, 4
TINY = model.GPTConfig(width=32, layers=1, heads=2, mlp=64)


@pytest.fixture(scope="module")
def corpus():
    text = np.random.default_rng(0).integers(97, 123, 5000).astype(np.uint8)
    part = data.Tokens((text,), data.BYTE_VOCAB)
    return data.Corpus(part, part, "letters")


def train(setting: Setting, corpus):
    return quality_training.Trainer(
        setting, TINY, corpus, STEPS, batch=BATCH, length=LENGTH
    )


def main_job(setting: Setting, rate: float, steps: int) -> argparse.Namespace:
    """Its flags as far as they matter to the optimizer."""
    return argparse.Namespace(
        optimizer=setting.optimizer, fraction=setting.fraction, lr=rate,
        adam_lr=0.004, weight_decay=0.01, warmup=min(20, steps // 10),
        decay=steps // 2, steps=steps, scan_layers=False,
    )  # fmt: skip


def test_an_optax_whose_muon_has_one_rate_is_refused(monkeypatch):
    monkeypatch.setattr(optax.contrib, "muon", lambda learning_rate, adam_b2: None)
    args = main_job(NAMED["muon"], 0.02, 20)
    with pytest.raises(UserError, match=r"needs optax 0\.2\.7 or newer, found [0-9]"):
        optimizers.make_optimizer(args, {})


@needs_two_rates
def test_muon_is_that_of_optax():
    rng = np.random.default_rng(0)
    params = {"blocks": {"kernel": rng.normal(size=(16, 8))}, "head": np.ones((8, 4))}
    params = jax.tree.map(np.float32, params)
    expected = optax.contrib.muon(
        0.03,
        adam_learning_rate=0.004,
        adam_b2=0.95,
        weight_decay=0.01,
        adam_weight_decay=0.01,
        muon_weight_dimension_numbers={
            "blocks": {"kernel": optax.contrib.MuonDimensionNumbers(0, 1)},
            "head": None,
        },
    )
    found = optimizers.make_muon(0.03, 0.004, 0.01)
    updates = []
    for tx in (found, expected):
        state = tx.init(params)
        for scale in (1.0, 0.1):  # the second step tells b2
            grads = jax.tree.map(lambda x: scale * x, params)  # noqa: B023
            update, state = tx.update(grads, state, params)
        updates.append(update)
    jax.tree.map(np.testing.assert_array_equal, *updates)


@pytest.mark.parametrize(
    "name", ["adamw", pytest.param("muon", marks=needs_two_rates), "dion3-0.25"]
)
def test_optimizers_are_those_of_the_main_job(name):
    setting, steps = NAMED[name], 20
    rate = 0.004 if name == "adamw" else 0.03
    rng = np.random.default_rng(0)
    shapes = {"blocks": {"kernel": (16, 8)}, "norm": (8,)}
    params, grads = (
        jax.tree.map(
            lambda shape: rng.normal(size=shape).astype(np.float32),
            shapes,
            is_leaf=lambda x: isinstance(x, tuple),
        )
        for _ in range(2)
    )
    params = jax.device_put(params)
    theirs, _, _ = optimizers.make_optimizer(main_job(setting, rate, steps), params)
    shardings = dion2_jax.shardings_of(params)

    def ours(grads, state, params, peak):
        tx = quality_training.make_optimizer(setting, shardings, peak, steps)
        return tx.update(grads, state, params)

    ours, their_update = jax.jit(ours), jax.jit(theirs.update)
    tx = quality_training.make_optimizer(setting, shardings, 1.0, steps)
    state, other = tx.init(params), theirs.init(params)
    for _ in range(4):
        updates, state = ours(grads, state, params, rate)
        expected, other = their_update(grads, other, params)
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), updates, expected
        )
        assert all(np.any(x != 0) for x in jax.tree.leaves(updates))


@pytest.mark.parametrize("name", [s.name for s in SETTINGS if s.fraction])
def test_what_a_setting_says_reaches_its_optimizer(name, monkeypatch):
    setting = NAMED[name]
    arguments = inspect.signature(getattr(dion2_jax, setting.optimizer))
    monkeypatch.setattr(
        dion2_jax,
        setting.optimizer,
        lambda *args, **kwargs: arguments.bind(*args, **kwargs).arguments,
    )
    given = quality_training.make_optimizer(setting, None, 0.1, 20)
    said = dataclasses.asdict(setting)
    del said["optimizer"]
    assert {name: given[name] for name in said} == said


@pytest.mark.slow
def test_runs_train_as_the_main_job_does(corpus):
    setting, rate, seed = NAMED["dion2-0.25"], 0.03, 5
    curve = train(setting, corpus).run(rate, seed)
    args = main_job(setting, rate, STEPS)
    devices = mesh.make_mesh(1, 8, 1, "auto")
    with jax.set_mesh(devices):
        graphdef, params = model.init_sharded(TINY, seed, devices)
        tx, schedule, _ = optimizers.make_optimizer(args, params)
        state = training.init_state(tx, params, devices)
        step = training.make_train_step(graphdef, tx, schedule, state)
        losses = []
        for i in range(1, STEPS + 1):
            at = corpus.positions(seed, i, BATCH, LENGTH + 1)
            tokens = training.put_batch(devices, corpus.train, at, LENGTH + 1)
            state, report = step(state, tokens)
            losses.append(float(report.loss))
    np.testing.assert_allclose(
        [mark.training_loss for mark in curve], losses, rtol=1e-6
    )
    assert [mark.tokens for mark in curve] == [128, 256, 384, 512]
    assert math.isfinite(curve[-1].validation_loss)


def test_rate_and_seed_are_arguments_of_one_compiled_step(corpus):
    trainer = train(NAMED["adamw"], corpus)
    slow, fast, other = (
        [mark.training_loss for mark in trainer.run(rate, seed)]
        for rate, seed in ((0.001, 0), (0.01, 0), (0.001, 1))
    )
    assert trainer.step._cache_size() == 1
    assert slow[0] == fast[0] != other[0]  # before the first update
    assert slow[-1] > fast[-1]
    diverged = trainer.run(1e38, 0)
    assert math.isnan(diverged[-1].validation_loss)
    assert diverged[-1].tokens < STEPS * BATCH * LENGTH


def test_command_goes_on_where_it_was_stopped(tmp_path, monkeypatch, capsys):
    """Whole command with a stand-in for training; then figures and table."""
    trained = []

    class Stand:
        def __init__(self, setting, config, corpus, steps):
            self.setting, self.steps = setting, steps

        def run(self, rate, seed, say):
            if len(trained) == 5:
                raise KeyboardInterrupt
            run = Run("small", self.setting.name, rate, seed, self.steps)
            trained.append(run)
            last = quality_training.Mark(20, 2.0, loss_of(run, 0.02))
            return [quality_training.Mark(10, 3.0, None), last]

    monkeypatch.setattr(quality_training, "Trainer", Stand)
    flags = ["--out", str(tmp_path), "--steps", "20", "--only", "small/(muon|dion2-1$)"]
    assert quality.main(flags) == 130
    assert len(trained) == 5
    assert set(quality_rows.finished(tmp_path / "runs.csv")) == set(trained)
    trained, before = [], trained
    assert quality.main([*flags, "--limit-minutes", "0"]) == 0
    assert not trained and "time is up; next: small/" in capsys.readouterr().out
    monkeypatch.setattr(Stand, "run", _unlimited(trained))
    assert quality.main(flags) == 0
    assert trained and not set(trained) & set(before)
    with open(tmp_path / "runs.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(before) + len(trained)
    assert {row["fraction"] for row in rows} == {"", "1.0"}

    monkeypatch.setattr(quality, "ROOT", tmp_path)
    capsys.readouterr()
    assert quality.main([*flags, "--plots"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "| muon | 0.02 | 3 | 2.010 (2.000 to 2.020) | +0.000 |" in lines
    for name in ("quality_loss.png", "quality_fraction.png"):
        assert (tmp_path / "docs" / "figures" / name).stat().st_size > 10_000


def _unlimited(trained):
    def run(self, rate, seed, say):
        run = Run("small", self.setting.name, rate, seed, self.steps)
        trained.append(run)
        last = quality_training.Mark(20, 2.0, loss_of(run, 0.02))
        return [quality_training.Mark(10, 3.0, None), last]

    return run


def test_table_says_which_grid_is_not_finished():
    done = {
        Run("small", "muon", 0.02, 0, 9): 2.0,
        Run("small", "muon", 0.04, 0, 9): 1.5,
    }
    text = quality_plots.table(done, 9)
    assert "| muon | 0.04, grid not finished | 1 | 1.500 (1.500 to 1.500) |" in text


def test_table_says_where_the_best_rate_is_the_last_one_tried():
    rates = [0.02 * 2**i for i in range(-1, 5)]
    done = {Run("small", "muon", x, 0, 9): 2.0 - x for x in rates}
    assert "| muon | 0.32, edge of its grid | 1 |" in quality_plots.table(done, 9)


def test_figures_show_finished_grids_alone(tmp_path, monkeypatch):
    drawn = []
    for name in ("_loss_figure", "_fraction_figure"):
        monkeypatch.setattr(quality_plots, name, lambda rows, *_: drawn.append(rows))
    monkeypatch.setattr(quality_plots, "_save", lambda figure, path: None)
    row = dict(fraction="", tokens=1, seconds=1)

    def report(setting, *rates):
        for rate in rates:
            run = Run("small", setting, rate, 0, 9)
            loss = [row | dict(validation_loss=loss_of(run, 0.02))]
            quality_rows.put(tmp_path / "runs.csv", quality_rows.RUNS, run, loss)
        return quality_plots.report(tmp_path, tmp_path, 9)

    assert "grid not finished" in report("muon", 0.02, 0.04) and not drawn
    report("muon", 0.01)
    assert "grid not finished" in report("adamw", 0.004)
    assert {setting for rows in drawn for setting in rows} == {Setting("muon")}


def test_table_compares_the_same_seeds():
    """Seeds differ by more than settings do: Muon has three of them, AdamW two."""
    done = {Run("small", "muon", 0.02, seed, 9): 2.0 + seed for seed in SEEDS}
    done |= {Run("small", "adamw", 0.004, seed, 9): 2.5 + seed for seed in SEEDS[:2]}
    text = quality_plots.table(done, 9)
    assert "| 3 | 3.000 (2.000 to 4.000) | +0.000 |" in text
    assert "| 2 | 3.000 (2.500 to 3.500) | +0.500 |" in text


@pytest.mark.parametrize("diverged", SEEDS[1:])
def test_a_diverged_seed_is_in_the_table(diverged):
    losses = {0: 2.0, 1: 2.1, 2: 2.2, diverged: math.nan}
    done = {Run("small", "muon", 0.02, seed, 9): x for seed, x in losses.items()}
    assert "| 3 | nan (2.000 to nan) | +nan |" in quality_plots.table(done, 9)


def test_a_curve_goes_to_where_the_first_seed_diverged():
    runs = [{10: 3.0, 20: 2.0, 30: 1.5}, {10: 3.5, 17: math.nan}, {}]
    assert quality_plots.common_marks(runs) == {10: [3.0, 3.5]}
    assert quality_plots.common_marks([{}]) == {}
