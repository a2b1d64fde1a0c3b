"""Case 18: Keras and PyTorch models with the same weights give the same outputs, both ways."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import keras.layers as L
import numpy as np
import pytest
import torch
import torch.nn as N

import ckptfmt
import ckptfmt.tensorflow as ckf
import ckptfmt.torch as ckt
from ckptfmt import CkptWarning, MismatchError, UnsupportedError, UsageError


class First(N.Module):
    """A recurrent layer's sequence, without its state."""

    def __init__(self, rnn: N.Module) -> None:
        super().__init__()
        self.rnn = rnn

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rnn(x)[0]


class Attend(N.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.rnn = N.MultiheadAttention(width, heads, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rnn(x, x, x)[0]


class SelfAttention(keras.Model):
    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        self.rnn = L.MultiHeadAttention(heads, width // heads)

    def call(self, x: Any) -> Any:
        return self.rnn(x, x)


class One(keras.Model):
    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.rnn = layer

    def call(self, x: Any) -> Any:
        return self.rnn(x)


def to_channels_first(x: Any) -> Any:
    return np.moveaxis(x, -1, 1) if x.ndim > 2 else x


def to_channels_last(x: Any) -> Any:
    return np.moveaxis(x, 1, -1) if x.ndim > 2 else x


def same(x: Any) -> Any:
    return x


class Wrap(N.Module):
    def __init__(self, layer: N.Module) -> None:
        super().__init__()
        self.rnn = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rnn(x)


EPS = 1e-3
# Square kernels on purpose: nothing but the outputs can tell that one was transposed.
PAIRS: dict[str, tuple[Callable[[], Any], Callable[[], Any], tuple[int, ...], Any, Any]] = {
    "dense": (lambda: One(L.Dense(6)), lambda: Wrap(N.Linear(6, 6)), (4, 6), same, same),
    "conv1d": (lambda: One(L.Conv1D(5, 5)), lambda: Wrap(N.Conv1d(5, 5, 5)), (2, 9, 5),
               to_channels_first, to_channels_last),
    "conv2d": (lambda: One(L.Conv2D(3, 3)), lambda: Wrap(N.Conv2d(3, 3, 3)), (2, 7, 8, 3),
               to_channels_first, to_channels_last),
    "conv3d": (lambda: One(L.Conv3D(3, 3)), lambda: Wrap(N.Conv3d(3, 3, 3)), (1, 5, 6, 5, 3),
               to_channels_first, to_channels_last),
    "transposed conv1d": (lambda: One(L.Conv1DTranspose(3, 3, strides=2)),
                          lambda: Wrap(N.ConvTranspose1d(3, 3, 3, stride=2)), (2, 5, 3),
                          to_channels_first, to_channels_last),
    "transposed conv2d": (lambda: One(L.Conv2DTranspose(3, 3)), lambda: Wrap(N.ConvTranspose2d(3, 3, 3)),
                          (2, 7, 8, 3), to_channels_first, to_channels_last),
    "depthwise": (lambda: One(L.DepthwiseConv2D(3, depth_multiplier=3)),
                  lambda: Wrap(N.Conv2d(3, 9, 3, groups=3)), (2, 7, 8, 3),
                  to_channels_first, to_channels_last),
    "batch norm": (lambda: One(L.BatchNormalization()), lambda: Wrap(N.BatchNorm2d(3, eps=EPS, momentum=0.01)),
                   (4, 5, 6, 3), to_channels_first, to_channels_last),
    "layer norm": (lambda: One(L.LayerNormalization()), lambda: Wrap(N.LayerNorm(6, eps=EPS)), (4, 6), same, same),
    "lstm": (lambda: One(L.LSTM(6, return_sequences=True)), lambda: First(N.LSTM(6, 6, batch_first=True)),
             (3, 7, 6), same, same),
    "gru": (lambda: One(L.GRU(6, return_sequences=True)), lambda: First(N.GRU(6, 6, batch_first=True)),
            (3, 7, 6), same, same),
    "rnn": (lambda: One(L.SimpleRNN(6, return_sequences=True)), lambda: First(N.RNN(6, 6, batch_first=True)),
            (3, 7, 6), same, same),
    "both ways": (lambda: One(L.Bidirectional(L.GRU(6, return_sequences=True))),
                  lambda: First(N.GRU(6, 6, batch_first=True, bidirectional=True)), (3, 7, 6), same, same),
    "attention": (lambda: SelfAttention(2, 6), lambda: Attend(6, 2), (3, 7, 6), same, same),
}  # fmt: skip


@pytest.fixture(params=list(PAIRS))
def pair(request: pytest.FixtureRequest) -> tuple[Any, Any, Callable[[], float]]:
    """(Keras model, PyTorch model, how much their outputs differ), with weights that are no default."""
    make_keras, make_torch, shape, forth, back = PAIRS[request.param]
    g = np.random.default_rng(len(request.param))
    x = g.standard_normal(shape).astype(np.float32)
    k, t = make_keras(), make_torch().eval()
    k(x)
    for variable in k.variables:
        if variable.dtype == "float32":
            variable.assign(g.uniform(0.1, 0.9, variable.shape))
    with torch.no_grad():
        for parameter in [*t.parameters(), *t.buffers()]:
            if parameter.is_floating_point():
                parameter.uniform_(0.1, 0.9)

    def difference() -> float:
        with torch.no_grad():
            ours = back(t(torch.from_numpy(np.ascontiguousarray(forth(x)))).numpy())
        return float(np.abs(k(x, training=False).numpy() - ours).max())

    return k, t, difference


def test_outputs_are_equal_both_ways(
    pair: tuple[Any, Any, Callable[[], float]], tmp_path: Path
) -> None:
    k, t, difference = pair
    assert difference() > 1e-2
    weights = [v for v in k.variables if v.dtype == "float32"]  # no seeds: PyTorch has none
    before = [v.value.numpy().copy() for v in weights]
    ckf.save({"model": k}, tmp_path / "k", durable=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", CkptWarning)
        ckt.restore({"model": t}, ckptfmt.translate(tmp_path / "k", {"model": t}))
    assert difference() < 1e-5

    # And back: bit for bit what it was.
    ckt.save({"model": t}, tmp_path / "t", durable=False)
    for variable in weights:
        variable.assign(np.zeros(variable.shape))
    assert difference() > 1e-2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CkptWarning)  # Keras's epsilon is not PyTorch's default
        ckf.restore({"model": k}, ckptfmt.translate(tmp_path / "t", {"model": k}))
    assert difference() < 1e-5
    for old, variable in zip(before, weights):
        assert variable.value.numpy().tobytes() == old.tobytes(), variable.path


class KerasNet(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.enc = L.Embedding(11, 8), L.GRU(8, name="reader")
        self.bn, self.drop, self.head = L.BatchNormalization(), L.Dropout(0.5), L.Dense(8)

    def call(self, x: Any, training: bool = False) -> Any:
        return self.head(self.drop(self.bn(self.enc(self.embed(x))), training=training))


class TorchNet(N.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.gru = N.Embedding(11, 8), N.GRU(8, 8, batch_first=True)
        self.bn, self.head = N.BatchNorm1d(8), N.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.head(self.bn(self.gru(self.embed(x))[0][:, -1]))
        return made


@pytest.fixture
def nets(tmp_path: Path) -> tuple[KerasNet, TorchNet, Any, str]:
    """Both nets, an input, and a store that Keras wrote."""
    k, t = KerasNet(), TorchNet().eval()
    x = np.arange(14).reshape(2, 7) % 11
    k(x)
    g = np.random.default_rng(1)
    for variable in k.variables:
        if variable.dtype == "float32":
            variable.assign(g.uniform(0.1, 0.9, variable.shape))
    ckf.save({"model": k}, tmp_path / "k", step=5, durable=False)
    return k, t, x, str(tmp_path / "k")


def test_layers_of_other_names_are_renamed_and_another_epsilon_is_told(
    nets: tuple[KerasNet, TorchNet, Any, str],
) -> None:
    k, t, x, store = nets
    rename = {"model/reader": "model/gru"}
    with pytest.warns(CkptWarning, match="bn: epsilon is 1e-05 here and 0.001 in Keras"):
        source = ckptfmt.translate(store, {"model": t}, rename=rename)
    ckt.restore({"model": t}, source)
    t.bn.eps = 1e-3
    with torch.no_grad():
        assert np.abs(k(x).numpy() - t(torch.from_numpy(x)).numpy()).max() < 1e-5


def test_the_state_of_a_stateful_rnn_stays_behind_and_as_it_is(tmp_path: Path) -> None:
    """PyTorch's callers have it."""
    k, t = keras.Sequential([L.GRU(3, stateful=True, name="gru")]), N.Module()
    t.gru = N.GRU(6, 3, batch_first=True)
    k(np.ones((2, 5, 6), np.float32))
    ckf.save({"model": k}, tmp_path / "k", durable=False)
    ckt.restore({"model": t}, ckptfmt.translate(tmp_path / "k", {"model": t}))
    before = k.layers[0].states[0].numpy().copy()
    ckt.save({"model": t}, tmp_path / "t", durable=False)
    ckf.restore({"model": k}, ckptfmt.translate(tmp_path / "t", {"model": k}))
    assert before.any()
    assert np.array_equal(k.layers[0].states[0].numpy(), before)


def test_a_layer_that_goes_by_another_name_is_missing_not_swapped(
    nets: tuple[KerasNet, TorchNet, Any, str],
) -> None:
    _, t, _, store = nets
    before = {key: item.clone() for key, item in t.state_dict().items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CkptWarning)
        source = ckptfmt.translate(store, {"model": t})
    with pytest.raises(MismatchError, match=r"model/gru\.weight_ih_l0"):
        ckt.restore({"model": t}, source)
    assert all(torch.equal(item, before[key]) for key, item in t.state_dict().items())
    with pytest.raises(UsageError, match="touches nothing"):
        ckptfmt.translate(store, {"model": t}, rename={"model/raeder": "model/gru"})


def test_presets_do_the_same_without_live_models(
    nets: tuple[KerasNet, TorchNet, Any, str], tmp_path: Path
) -> None:
    k, t, x, store = nets
    rules: list[dict[str, Any]] = [
        {"rename": "^model/reader/", "to": "model/gru/"},
        {"preset": "keras-to-torch"},
        {"drop": "seed_generator"},
    ]
    report = ckptfmt.convert(store, tmp_path / "t", rules=rules, durable=False)
    (note,) = report.notes
    assert note == "BatchNormalization: build PyTorch's with eps=0.001, momentum=0.01: model/bn"
    ckt.restore({"model": t}, tmp_path / "t")
    t.bn.eps = 1e-3
    with torch.no_grad():
        assert np.abs(k(x).numpy() - t(torch.from_numpy(x)).numpy()).max() < 1e-5

    back = [{"preset": "torch-to-keras"}, {"rename": "^model/gru/", "to": "model/reader/"}]
    told = ckptfmt.convert(tmp_path / "t", tmp_path / "k2", rules=back, durable=False)
    assert told.notes == ["BatchNorm1d: build Keras's with epsilon=1e-05, momentum=0.9: model/bn"]
    with ckptfmt.open(store) as old, ckptfmt.open(tmp_path / "k2") as new:
        assert set(old) - set(new) == {"model/drop/seed_generator/state",
                                       "model/reader/cell/seed_generator/state"}  # fmt: skip
        for name in new:
            assert new[name].read().tobytes() == old[name].read().tobytes(), name


def test_a_gru_of_the_other_kind_is_refused(tmp_path: Path) -> None:
    k, t = One(L.GRU(4, reset_after=False)), First(N.GRU(4, 4, batch_first=True))
    k(np.zeros((1, 2, 4), np.float32))
    ckf.save({"model": k}, tmp_path / "k", durable=False)
    with pytest.raises(UnsupportedError, match="reset gate before"):
        ckptfmt.translate(tmp_path / "k", {"model": t})
    with pytest.raises(UnsupportedError, match="reset gate before"):
        ckptfmt.convert(tmp_path / "k", tmp_path / "n", rules=[{"preset": "keras-to-torch"}])
    assert not (tmp_path / "n").exists()


def test_a_target_without_models_is_refused(nets: tuple[KerasNet, TorchNet, Any, str]) -> None:
    k, t, _, store = nets
    for like in ({"w": np.zeros(3)}, {"a": k, "b": t}):
        with pytest.raises(UsageError, match="models of one framework"):
            ckptfmt.translate(store, like)


def test_a_bare_state_dict_is_moved_below_the_models_name(tmp_path: Path) -> None:
    k, t = One(L.Dense(3)), Wrap(N.Linear(3, 3))
    x = np.ones((2, 3), np.float32)
    k(x)
    torch.save(t.state_dict(), tmp_path / "bare.pt")
    ckf.restore(
        {"model": k}, ckptfmt.translate(tmp_path / "bare.pt", {"model": k}, rename={"": "model"})
    )
    with torch.no_grad():
        assert np.abs(k(x).numpy() - t(torch.from_numpy(x)).numpy()).max() < 1e-6
    ckf.save({"model": k}, tmp_path / "k", durable=False)
    bare = ckptfmt.translate(tmp_path / "k", t, rename={"model": ""})
    assert list(bare) == ["rnn.weight", "rnn.bias"]


def test_a_dense_behind_a_flatten_is_reordered_by_rules(tmp_path: Path) -> None:
    k = keras.Sequential([L.Conv2D(3, 2), L.Flatten(), L.Dense(5, name="head")])
    t = N.Sequential(N.Conv2d(2, 3, 2), N.Flatten(), N.Linear(4 * 5 * 3, 5))
    x = np.random.default_rng(0).standard_normal((2, 5, 6, 2)).astype(np.float32)
    k(x)
    ckf.save({"m": k}, tmp_path / "k", durable=False)
    rules: list[dict[str, Any]] = [
        {"reshape": "head/kernel$", "shape": [4, 5, 3, -1]},
        {"permute": "head/kernel$", "axes": [2, 0, 1, 3]},
        {"reshape": "head/kernel$", "shape": [60, -1]},
        {"preset": "keras-to-torch"},
        {"rename": "conv2d\\.", "to": "0."},
        {"rename": "head\\.", "to": "2."},
    ]
    ckt.restore({"m": t}, ckptfmt.open_foreign(tmp_path / "k", rules=rules))
    with torch.no_grad():
        got = t(torch.from_numpy(np.ascontiguousarray(to_channels_first(x)))).numpy()
    assert np.abs(k(x).numpy() - got).max() < 1e-5


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_every_kind_of_file_that_keras_writes_is_a_source(tmp_path: Path) -> None:
    import tensorflow as tf

    k = keras.Sequential([L.Input((7, 6)), L.LSTM(5, return_sequences=True), L.GRU(4), L.Dense(3)])
    t = N.ModuleDict({"lstm": N.LSTM(6, 5, batch_first=True), "gru": N.GRU(5, 4, batch_first=True),
                      "dense": N.Linear(4, 3)})  # fmt: skip
    x = np.random.default_rng(0).standard_normal((2, 7, 6)).astype(np.float32)
    k.save(tmp_path / "m.keras")
    k.save_weights(tmp_path / "m.weights.h5")
    tf.train.Checkpoint(model=k).write(str(tmp_path / "ckpt"))
    for name in ("m.keras", "m.weights.h5", "ckpt"):
        with torch.no_grad():
            for parameter in t.parameters():
                parameter.zero_()
            ckt.restore({"model": t}, ckptfmt.translate(tmp_path / name, {"model": t}))
            made = t["dense"](t["gru"](t["lstm"](torch.from_numpy(x))[0])[0][:, -1])
        assert np.abs(k(x).numpy() - made.numpy()).max() < 1e-5, name
