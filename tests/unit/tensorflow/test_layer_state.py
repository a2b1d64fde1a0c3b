"""What a layer gives next, after a restore into a fresh one: as if it had never stopped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

import ckptfmt
import ckptfmt.tensorflow as ckf
from ckptfmt import MismatchError

RANDOM = np.random.default_rng(0)
SEQUENCES = RANDOM.random((4, 5, 6), dtype=np.float32)
ROWS = RANDOM.random((4, 6), dtype=np.float32)
IMAGES = RANDOM.random((2, 6, 6, 3), dtype=np.float32)


def quantized(mode: str, *, lora: bool = False) -> Any:
    layer = layers.Dense(8)
    layer.build((None, 6))
    layer.quantize(mode)
    if lora:
        layer.enable_lora(2)
    return layer


KINDS: dict[str, tuple[Callable[[], Any], Any]] = {
    "flips and turns": (
        lambda: layers.Pipeline([layers.RandomFlip(), layers.RandomRotation(0.2)]),
        IMAGES,
    ),
    "an LSTM that keeps its state": (
        lambda: layers.LSTM(3, stateful=True, dropout=0.2, recurrent_dropout=0.3),
        SEQUENCES,
    ),
    "both directions": (lambda: layers.Bidirectional(layers.GRU(2, stateful=True)), SEQUENCES),
    "stacked cells": (
        lambda: layers.RNN([layers.LSTMCell(3), layers.GRUCell(2)], stateful=True),
        SEQUENCES,
    ),
    "a spectral norm": (lambda: layers.SpectralNormalization(layers.Dense(3)), ROWS),
    "low rank": (lambda: layers.Dense(4, lora_rank=2), ROWS),
    "int4": (lambda: quantized("int4"), ROWS),
    "int8 of low rank": (lambda: quantized("int8", lora=True), ROWS),
}


def outputs(model: Any, x: Any) -> list[bytes]:
    return [np.asarray(model(x, training=True)).tobytes() for _ in range(2)]


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # in quantize()
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_goes_on_where_it_stood(tmp_path: Path, kind: str) -> None:
    """Whether its first call builds it, or the restore does."""
    make, x = KINDS[kind]
    model = keras.Sequential([make()])
    outputs(model, x)
    ckf.save({"model": model}, tmp_path, step=1)
    expected = outputs(model, x)
    for build in (False, True):
        fresh = keras.Sequential([make()])
        status = ckf.restore({"model": fresh}, tmp_path, build=build)
        assert outputs(fresh, x) == expected
        status.assert_consumed()


def test_the_state_of_an_rnn_is_of_its_batch_and_can_be_left_out(tmp_path: Path) -> None:
    trained, served = (keras.Sequential([layers.GRU(3, stateful=True)]) for _ in range(2))
    trained(SEQUENCES)
    served(SEQUENCES[:1])
    ckf.save({"model": trained}, tmp_path, step=1)
    assert "model/gru/states/0" in ckptfmt.open(tmp_path).names()
    with pytest.raises(
        MismatchError, match=r"model/gru/states/0: expected \[1, 3\], found \[4, 3\]"
    ):
        ckf.restore({"model": served}, tmp_path)
    status = ckf.restore({"model": served}, tmp_path, names=lambda name: "/states/" not in name)
    status.assert_consumed()
    for layer in (trained.layers[0], served.layers[0]):
        layer.reset_state()
    assert np.allclose(served(SEQUENCES[:1]), trained(SEQUENCES)[:1])


def test_a_metric_gets_the_variables_that_it_makes_at_its_first_update(tmp_path: Path) -> None:
    """It has others before: those alone would be half a metric."""
    x = ROWS[:, :1]
    metric = keras.metrics.R2Score()
    metric.update_state(x, x * 2)
    ckf.save({"metric": metric}, tmp_path, step=1)
    fresh = keras.metrics.R2Score()
    status = ckf.restore({"metric": fresh}, tmp_path)
    assert "metric/sum" in status.pending
    for one in (metric, fresh):
        one.update_state(x, x * 3)
    status.assert_consumed()
    assert state_of([fresh]) == state_of([metric])
    assert float(fresh.result()) == float(metric.result())


def state_of(metrics: list[Any]) -> list[bytes]:
    return [np.asarray(value).tobytes() for metric in metrics for value in metric.variables]


def compiled() -> Any:
    model = keras.Sequential([layers.Dense(1, activation="sigmoid")])
    model.compile("sgd", "binary_crossentropy", metrics=["accuracy", keras.metrics.AUC(name="auc")])
    return model


TARGETS = np.array([[0], [1], [1], [0]])


def whole(model: Any) -> dict[str, Any]:
    return {"model": model, "optimizer": model.optimizer, "metrics": model.metrics}


def test_metrics_of_a_compiled_model_arrive_at_their_first_update(tmp_path: Path) -> None:
    first, fresh = compiled(), compiled()
    first.train_on_batch(ROWS, TARGETS)
    ckf.save(whole(first), tmp_path)
    status = ckf.restore(whole(fresh), tmp_path, build=True)
    assert status.pending
    for model in (first, fresh):
        for metric in model.metrics[1:]:
            metric.update_state(TARGETS, model(ROWS))
    status.assert_consumed()
    assert state_of(fresh.metrics) == state_of(first.metrics)
    assert float(fresh.metrics[1].variables[1]) == 2 * len(ROWS)


@pytest.mark.parametrize("way", ["train_on_batch", "fit", "evaluate"])
def test_what_is_reset_before_its_variables_exist_stays_reset(tmp_path: Path, way: str) -> None:
    """As if the values had been there: what Keras resets before each batch or epoch is gone."""
    first, fresh = compiled(), compiled()
    first.fit(ROWS, TARGETS, batch_size=2, verbose=0, shuffle=False)
    ckf.save(whole(first), tmp_path)
    status = ckf.restore(whole(fresh), tmp_path, build=True)
    assert status.pending
    options = {} if way == "train_on_batch" else {"verbose": 0, "batch_size": 2}
    if way == "fit":
        options["shuffle"] = False
    for model in (first, fresh):
        getattr(model, way)(ROWS, TARGETS, **options)
    status.assert_consumed()
    assert state_of(fresh.metrics) == state_of(first.metrics)
    assert float(fresh.metrics[1].variables[1]) == len(ROWS)


@pytest.mark.parametrize("both", [False, True])
def test_states_of_an_rnn_that_is_reset_before_it_is_built_stay_zero(
    tmp_path: Path, both: bool
) -> None:
    def make() -> Any:
        layer = layers.GRU(3, stateful=True)
        return layers.Bidirectional(layer) if both else layer

    model, fresh = keras.Sequential([make()]), keras.Sequential([make()])
    model(SEQUENCES)
    ckf.save({"model": model}, tmp_path, step=1)
    status = ckf.restore({"model": fresh}, tmp_path)
    for one in (model, fresh):
        one.layers[0].reset_state()
    assert outputs(fresh, SEQUENCES) == outputs(model, SEQUENCES)
    status.assert_consumed()
