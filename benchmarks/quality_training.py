"""Training runs of one setting, by the parts of examples/train_lm.py."""

import argparse
import math
from typing import NamedTuple

import jax
import numpy as np
import optax
from flax import nnx
from lm import data, mesh, model, optimizers, training
from quality_settings import DEVICES, Setting

import dion2_jax

ADAM_RATE = 0.004  # of embedding, head and norms, beside Dion2, Dion3 and Muon
WEIGHT_DECAY = 0.01
MARKS = 30  # rows of a curve
VALIDATED = 5  # every fifth of them has a validation loss
VAL_BATCHES = 8


class Mark(NamedTuple):
    """One row of a curve."""

    tokens: int
    training_loss: float  # mean over the steps since the mark before
    validation_loss: float | None


def make_optimizer(setting: Setting, shardings, peak, steps: int):
    """The transformation; `peak`, the learning rate of the matrices, may be traced.

    Warmup, decay, weight decay and AdamW's part are those of train_lm.py.
    """
    args = argparse.Namespace(steps=steps, warmup=min(20, steps // 10))
    args.decay = steps // 2
    rate = optimizers.schedule(peak, args)
    if setting.optimizer == "adamw":
        return optax.adamw(rate, b1=0.9, b2=0.95, weight_decay=WEIGHT_DECAY)
    adam_rate = optimizers.schedule(ADAM_RATE, args)
    if setting.optimizer == "muon":
        return optimizers.make_muon(rate, adam_rate, WEIGHT_DECAY)
    return getattr(dion2_jax, setting.optimizer)(
        rate,
        setting.fraction,
        setting.ef_decay,
        selection=setting.selection,
        select_axis=setting.select_axis,
        score=setting.score,
        param_shardings=shardings,
        adam_learning_rate=adam_rate,
        adam_b2=0.95,
        weight_decay=WEIGHT_DECAY,
        adam_weight_decay=WEIGHT_DECAY,
    )


class Trainer:
    """Runs of one setting and model; all rates and seeds share one compiled step."""

    def __init__(
        self,
        setting: Setting,
        config: model.GPTConfig,
        corpus: data.Corpus,
        steps: int,
        *,
        batch: int = 64,
        length: int = 128,
    ):
        self._config, self._corpus, self._steps = config, corpus, steps
        self._batch, self._length = batch, length
        self._mesh = mesh.make_mesh(1, DEVICES, 1, "auto")
        with jax.set_mesh(self._mesh):
            graphdef, params = self._init(0)
            shardings = dion2_jax.shardings_of(params)
            self._optimizer = lambda peak: make_optimizer(
                setting, shardings, peak, steps
            )
            state = training.init_state(self._optimizer(1.0), params, self._mesh)
            self.step = self._make_step(graphdef, state)
            self._val_loss = training.make_val_loss(graphdef)

    def run(self, rate: float, seed: int, say=lambda mark: None) -> list[Mark]:
        """The curve of one run. A run whose loss is not finite ends there, with NaN."""
        steps, tokens = self._steps, self._batch * self._length
        numbers = {-(-steps * i // MARKS): i for i in range(1, MARKS + 1)}
        with jax.set_mesh(self._mesh):
            _, params = self._init(seed)
            state = training.init_state(self._optimizer(1.0), params, self._mesh)
            curve, losses = [], []
            for step in range(1, steps + 1):
                state, loss = self.step(state, self._cut(seed, step), rate)
                losses.append(float(training.value(loss)))
                if not math.isfinite(losses[-1]):
                    return [*curve, Mark(step * tokens, math.nan, math.nan)]
                if step in numbers:
                    validated = numbers[step] % VALIDATED == 0
                    validation = self._validate(state.params) if validated else None
                    curve.append(Mark(step * tokens, np.mean(losses), validation))
                    losses = []
                    say(curve[-1])
            return curve

    def _init(self, seed: int):
        return model.init_sharded(self._config, seed, self._mesh)

    def _make_step(self, graphdef, state):
        """jitted (state, int32[B, T + 1], peak rate) -> (state, loss)."""

        def step(state, tokens, peak):
            def loss_of(params):
                return model.next_token_loss(nnx.merge(graphdef, params), tokens)

            loss, grads = jax.value_and_grad(loss_of)(state.params)
            updates, opt_state = self._optimizer(peak).update(
                grads, state.opt_state, state.params
            )
            params = optax.apply_updates(state.params, updates)
            return training.TrainState(state.step + 1, params, opt_state), loss

        shardings = jax.tree.map(lambda x: x.sharding, state)
        return jax.jit(step, donate_argnums=0, out_shardings=(shardings, None))

    def _cut(self, seed: int, step: int):
        window = self._length + 1
        positions = self._corpus.positions(seed, step, self._batch, window)
        return training.put_batch(self._mesh, self._corpus.train, positions, window)

    def _validate(self, params) -> float:
        """Mean loss of the same VAL_BATCHES batches in every run."""
        window, losses = self._length + 1, []
        for i in range(VAL_BATCHES):
            positions = self._corpus.val_positions(i, self._batch, window)
            batch = training.put_batch(self._mesh, self._corpus.val, positions, window)
            losses.append(float(training.value(self._val_loss(params, batch))))
        return sum(losses) / VAL_BATCHES
