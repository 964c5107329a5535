"""The runs of the quality study: settings, learning rates, seeds, and their order."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

# width, layers, heads: 0.85 and 3.3 million parameters.
MODELS = {"small": (128, 4, 2), "large": (256, 4, 4)}
DEVICES = 8  # over which parameters are sharded; what is "local" depends on it
STEPS = 305  # of 64 x 128 tokens: 2.5 million
SEEDS = (0, 1, 2)  # the first one is the one that rates are tuned on
MOST_RATES = 6  # tried for one setting


@dataclass(frozen=True)
class Setting:
    """One optimizer with its arguments; `fraction` is None where there is none."""

    optimizer: str
    fraction: float | None = None
    selection: str = "local"
    select_axis: str = "sharded"
    score: str = "l1"
    ef_decay: float = 0.95

    @property
    def name(self) -> str:
        """As in dion2-0.25-global: what differs from the defaults is named."""
        parts = [self.optimizer]
        parts += [f"{self.fraction:g}"] if self.fraction else []
        parts += [self.selection] if self.selection != "local" else []
        parts += [self.select_axis] if self.select_axis != "sharded" else []
        parts += [self.score] if self.score != "l1" else []
        parts += [f"decay{self.ef_decay:g}"] if self.ef_decay != 0.95 else []
        return "-".join(parts)

    @property
    def first_rate(self) -> float:
        """The learning rate tried first: the main job's default.

        Small fractions of Dion2 were best at its double in the first grid that was
        run: what is tried first decides how many are tried, not which one is best.
        """
        if self.optimizer == "dion2" and self.fraction <= 0.25:
            return 0.1
        return {"dion2": 0.05, "dion3": 0.05, "muon": 0.02, "adamw": 0.004}[
            self.optimizer
        ]


# In the order of their learning-rate grids: what an interrupted study has is what
# matters most. At fraction 1 all slices are selected: nothing else makes a difference.
# Dion3 selects neurons, so it has no other axis. FURTHER comes after all runs of MAIN.
CONFIRMED = (  # on the large model, too
    Setting("dion2", 0.25),
    Setting("muon"),
    Setting("adamw"),
    Setting("dion2", 1.0),
    Setting("dion3", 0.25),
    # A slice that is selected every fourth step: 0.95 ** 4 is 0.81.
    Setting("dion2", 0.25, ef_decay=0.8),
)
MAIN = (
    *CONFIRMED,
    Setting("dion2", 0.125),
    Setting("dion2", 0.5),
    Setting("dion3", 1.0),
    Setting("dion3", 0.125),
    Setting("dion3", 0.5),
    Setting("dion2", 0.25, selection="global"),
    Setting("dion2", 0.25, select_axis="shorter"),
    Setting("dion2", 0.25, score="random"),
)
FURTHER = (
    Setting("dion2", 0.125, ef_decay=0.66),  # 0.95 ** 8
    Setting("dion2", 1.0, ef_decay=0.8),
    Setting("dion2", 0.5, ef_decay=0.9),  # 0.95 ** 2
    Setting("dion3", 0.25, ef_decay=0.8),
    Setting("dion3", 0.25, selection="global"),
    Setting("dion3", 0.25, score="random"),
    Setting("dion2", 0.125, selection="global"),
    Setting("dion2", 0.125, select_axis="shorter"),
    Setting("dion2", 0.125, score="random"),
    Setting("dion2", 0.25, selection="global", select_axis="shorter"),
)
SETTINGS = (*MAIN, *FURTHER)


@dataclass(frozen=True)
class Run:
    """One training run, and the key of its row."""

    model: str
    setting: str
    rate: float
    seed: int
    steps: int

    def __str__(self):
        name = f"{self.model}/{self.setting}"
        return f"{name} rate {self.rate:g} seed {self.seed} steps {self.steps}"


def best_rate(losses: Mapping[float, float]) -> float:
    """The rate of the lowest loss; diverged runs (NaN) come last, fastest first."""
    return min(
        losses,
        key=lambda rate: (
            (math.inf, rate) if math.isnan(losses[rate]) else (losses[rate], rate)
        ),
    )


def next_rate(first: float, losses: Mapping[float, float]) -> float | None:
    """The rate to be tried next, given the losses of those tried; None: none.

    The first, its double and its half; then on beyond the best as long as that is the
    lowest or highest tried, up to MOST_RATES. The same for every setting.
    """
    for rate in (first, 2 * first, first / 2):
        if rate not in losses:
            return rate
    best = best_rate(losses)
    for rate in (2 * best, best / 2):
        if rate not in losses and len(losses) < MOST_RATES:
            return rate
    return None


def tuning(done: Mapping[Run, float], setting: Setting, steps: int):
    """{rate: final loss} of a setting's runs on the small model and the first seed."""
    return {
        run.rate: loss
        for run, loss in done.items()
        if (run.model, run.setting, run.seed, run.steps)
        == ("small", setting.name, SEEDS[0], steps)
    }


def next_run(
    done: Mapping[Run, float],
    steps: int = STEPS,
    wanted: Callable[[str], bool] = lambda label: True,
) -> Run | None:
    """The most important run that is not done yet; None: all are.

    Of MAIN, then of FURTHER: the grids; the other seeds at their best rates; the large
    model at the best rate of the small one and at half of it.

    Args:
        done: final losses of the runs that are.
        steps: of every run; runs of another length do not count.
        wanted: whether a label such as "small/dion2-0.25" takes part.
    """
    for settings in (MAIN, FURTHER):
        for run in _runs(settings, done, steps):
            if run not in done and wanted(f"{run.model}/{run.setting}"):
                return run
    return None


def _runs(settings, done: Mapping[Run, float], steps: int) -> Iterator[Run]:
    """The runs of some settings that are known so far, in their order."""
    tuned = {}
    for setting in settings:
        losses = tuning(done, setting, steps)
        rate = next_rate(setting.first_rate, losses)
        if rate is None:
            tuned[setting] = best_rate(losses)
        else:
            yield Run("small", setting.name, rate, SEEDS[0], steps)
    for seed in SEEDS[1:]:
        for setting, rate in tuned.items():
            yield Run("small", setting.name, rate, seed, steps)
    for share in (1, 0.5):
        for setting in CONFIRMED:
            if setting in tuned:
                yield Run(
                    "large", setting.name, tuned[setting] * share, SEEDS[0], steps
                )
