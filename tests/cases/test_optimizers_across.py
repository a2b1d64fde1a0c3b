"""Case 18 for optimizers: a run that goes on in the other framework goes on as it would have."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import keras.layers as L
import keras.optimizers as O
import numpy as np
import pytest
import tensorflow as tf
import torch
import torch.nn as N

import ckptfmt
import ckptfmt.tensorflow as ckf
import ckptfmt.torch as ckt
from ckptfmt import CkptWarning, UnsupportedError

pytestmark = pytest.mark.filterwarnings("ignore:.*epsilon is 1e-05:ckptfmt.CkptWarning")

_RNG = np.random.default_rng(0)
X = _RNG.integers(0, 11, (12, 4, 5))
Y = _RNG.standard_normal((12, 4, 3)).astype(np.float32)


class KerasNet(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body, self.head = L.Embedding(11, 8), L.Dense(6), L.Dense(3)
        self.norm = L.LayerNormalization(epsilon=1e-5)

    def call(self, x: Any) -> Any:
        return self.head(self.norm(self.body(keras.ops.mean(self.embed(x), 1))))

    def advance(self, optimizer: Any, steps: range) -> None:
        for step in steps:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(X[step]) - Y[step]) ** 2)
            weights = self.trainable_variables
            gradients = [tf.convert_to_tensor(g) for g in tape.gradient(loss, weights)]
            optimizer.apply(gradients, weights)

    def values(self) -> list[Any]:
        return [weight.numpy() for weight in self.trainable_variables]


class TorchNet(N.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body = N.Embedding(11, 8), N.Linear(8, 6)
        self.norm, self.head = N.LayerNorm(6), N.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.head(self.norm(self.body(self.embed(x).mean(1))))
        return made

    def advance(self, optimizer: Any, steps: range) -> None:
        for step in steps:
            optimizer.zero_grad()
            loss = ((self(torch.from_numpy(X[step])) - torch.from_numpy(Y[step])) ** 2).mean()
            loss.backward()
            optimizer.step()


def in_keras(t: TorchNet, folder: Path) -> list[Any]:
    """The weights of the module as Keras has them."""
    k = KerasNet()
    k(X[0])
    ckt.save({"model": t}, folder, durable=False)
    ckf.restore({"model": k}, ckptfmt.translate(folder, {"model": k}))
    return k.values()


def gap(a: list[Any], b: list[Any]) -> float:
    return max(float(np.abs(x - y).max()) for x, y in zip(a, b, strict=True))


# Epsilon is added elsewhere: one that is too small to matter shows that all else is equal.
TINY = 1e-12
KINDS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], float]] = {
    "adam": (lambda: O.Adam(3e-3, 0.8, 0.99, TINY), torch.optim.Adam, 2e-5),
    "amsgrad": (lambda: O.Adam(3e-3, amsgrad=True, epsilon=TINY),
                lambda p: torch.optim.Adam(p, amsgrad=True), 2e-5),
    "adamw": (lambda: O.AdamW(3e-3, 0.1, epsilon=TINY), torch.optim.AdamW, 2e-5),
    "sgd": (lambda: O.SGD(0.05), lambda p: torch.optim.SGD(p, lr=1), 1e-5),
    "momentum": (lambda: O.SGD(0.05, 0.9), lambda p: torch.optim.SGD(p, lr=1, momentum=0.3), 1e-5),
    "nesterov": (lambda: O.SGD(0.05, 0.9, nesterov=True),
                 lambda p: torch.optim.SGD(p, lr=1, momentum=0.9, nesterov=True), 1e-5),
    "rmsprop": (lambda: O.RMSprop(2e-4, epsilon=TINY), torch.optim.RMSprop, 2e-4),
    "centered": (lambda: O.RMSprop(1e-3, momentum=0.5, centered=True, epsilon=1e-4),
                 lambda p: torch.optim.RMSprop(p, momentum=0.1, centered=True), 2e-3),
    "adagrad": (lambda: O.Adagrad(0.05), torch.optim.Adagrad, 1e-5),
    "adamax": (lambda: O.Adamax(5e-3, epsilon=TINY), torch.optim.Adamax, 2e-5),
    "nadam": (lambda: O.Nadam(5e-3), torch.optim.NAdam, 1e-5),
}  # fmt: skip


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(
            k,
            marks=[pytest.mark.slow]
            * (k in ("amsgrad", "adamw", "nesterov", "centered", "adamax")),
        )
        for k in KINDS
    ],
)
@pytest.mark.filterwarnings("ignore:.*counts no steps:ckptfmt.CkptWarning")
def test_training_goes_on_in_the_other_framework_and_back(kind: str, tmp_path: Path) -> None:
    make_keras, make_torch, tolerance = KINDS[kind]
    keras.utils.set_random_seed(1)
    k, o = KerasNet(), make_keras()
    k.advance(o, range(4))
    ckf.save({"model": k, "optimizer": o}, tmp_path / "k", durable=False)

    t = TorchNet()
    p = make_torch(t.parameters())
    target = {"model": t, "optimizer": p}
    ckt.restore(target, ckptfmt.translate(tmp_path / "k", target))
    k.advance(o, range(4, 8))
    t.advance(p, range(4, 8))
    assert gap(k.values(), in_keras(t, tmp_path / "middle")) < tolerance

    ckt.save(target, tmp_path / "t", durable=False)
    again, fresh = KerasNet(), make_keras()
    again(X[0])
    back = {"model": again, "optimizer": fresh}
    ckf.restore(back, ckptfmt.translate(tmp_path / "t", back), build=True)
    assert int(fresh.iterations) == (8 if "step" in next(iter(p.state.values()), ()) else 0)
    again.advance(fresh, range(8, 12))
    t.advance(p, range(8, 12))
    assert gap(again.values(), in_keras(t, tmp_path / "end")) < tolerance


def _moments_as_weights(optimizer: Any, model: Any) -> None:
    optimizer.build(model.trainable_variables)
    for slot, weight in zip(optimizer._momentums, model.trainable_variables, strict=True):
        slot.assign(weight)


class KerasZoo(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.depth = L.Conv2D(8, 3), L.DepthwiseConv2D(2)
        self.up, self.bn = (
            L.Conv2DTranspose(8, 2, use_bias=False),
            L.BatchNormalization(epsilon=1e-5),
        )
        self.two, self.att = (
            L.Bidirectional(L.GRU(4, return_sequences=True)),
            L.MultiHeadAttention(2, 4),
        )

    def call(self, x: Any) -> Any:
        x = self.bn(self.up(self.depth(self.conv(x))))
        x = self.two(keras.ops.reshape(x, (1, -1, 8)))
        return self.att(x, x)


def test_moments_lie_as_their_weights_do_in_every_kind_of_layer(tmp_path: Path) -> None:
    k, o = KerasZoo(), O.Adam()
    k(np.zeros((1, 6, 6, 3), np.float32))
    _moments_as_weights(o, k)
    ckf.save({"model": k, "optimizer": o}, tmp_path / "k", durable=False)
    t = N.ModuleDict({
        "conv": N.Conv2d(3, 8, 3), "depth": N.Conv2d(8, 8, 2, groups=8),
        "up": N.ConvTranspose2d(8, 8, 2, bias=False), "bn": N.BatchNorm2d(8),
        "two": N.GRU(8, 4, batch_first=True, bidirectional=True),
        "att": N.MultiheadAttention(8, 2, batch_first=True),
    })  # fmt: skip
    p = torch.optim.Adam(t.parameters())
    target = {"model": t, "optimizer": p}
    ckt.restore(target, ckptfmt.translate(tmp_path / "k", target))
    for name, parameter in t.named_parameters():
        assert torch.equal(p.state[parameter]["exp_avg"], parameter), name
    steps = [entry["step"] for entry in p.state.values()]
    assert len({step.data_ptr() for step in steps}) == len(steps)  # each is counted for itself

    # And back, bit for bit.
    ckt.save(target, tmp_path / "t", durable=False)
    for slot in o._momentums:
        slot.assign(np.zeros(slot.shape))
    ckf.restore(
        {"model": k, "optimizer": o},
        ckptfmt.translate(tmp_path / "t", {"model": k, "optimizer": o}),
    )
    for slot, weight in zip(o._momentums, k.trainable_variables, strict=True):
        assert slot.numpy().tobytes() == weight.numpy().tobytes(), weight.path


class Lstm(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = L.LSTM(4)

    def call(self, x: Any) -> Any:
        return self.rnn(x)


def test_the_one_bias_of_an_lstm_has_its_moment_in_both_of_pytorchs(tmp_path: Path) -> None:
    k, o = Lstm(), O.Adam()
    k(np.zeros((1, 2, 3), np.float32))
    _moments_as_weights(o, k)
    ckf.save({"model": k, "optimizer": o}, tmp_path / "k", durable=False)
    t = N.ModuleDict({"rnn": N.LSTM(3, 4, batch_first=True)})
    rnn: Any = t["rnn"]
    p = torch.optim.Adam(t.parameters())
    ckt.restore(
        {"model": t, "optimizer": p},
        ckptfmt.translate(tmp_path / "k", {"model": t, "optimizer": p}),
    )
    for bias in (rnn.bias_ih_l0, rnn.bias_hh_l0):
        assert torch.equal(p.state[bias]["exp_avg"], rnn.bias_ih_l0)
    # Where the second one is frozen, training is that of Keras.
    rnn.bias_hh_l0.requires_grad_(False)
    p = torch.optim.Adam([x for x in t.parameters() if x.requires_grad])
    target = {"model": t, "optimizer": p}
    with pytest.warns(CkptWarning, match=r"does not optimize rnn\.bias_hh_l0"):
        ckt.restore(target, ckptfmt.translate(tmp_path / "k", target))
    assert rnn.bias_hh_l0 not in p.state


def _saved(folder: Path, optimizer: Any) -> KerasNet:
    k = KerasNet()
    k.advance(optimizer, range(1))
    ckf.save({"model": k, "optimizer": optimizer}, folder, durable=False)
    return k


def test_what_has_no_equal_is_named_and_left_out_only_if_asked(tmp_path: Path) -> None:
    schedule = O.schedules.CosineDecay(0.1, 100)
    for at, optimizer, match in (
        ("ema", O.Adam(use_ema=True), "optimizer/state/./average: PyTorch's Adam keeps no such"),
        ("decay", O.Adagrad(weight_decay=0.1), "weight_decay: 0.1 of each variable in Keras, of its"),
        ("schedule", O.SGD(schedule, momentum=0.9), "momentum: the learning rate is in it"),
        ("lion", O.Lion(), "PyTorch has no equal of Keras's Lion"),
    ):  # fmt: skip
        _saved(tmp_path / at, optimizer)
        t = TorchNet()
        cls = {"Adagrad": torch.optim.Adagrad, "SGD": torch.optim.SGD}.get(
            type(optimizer).__name__, torch.optim.Adam
        )
        target = {"model": t, "optimizer": cls(t.parameters())}
        with pytest.raises(UnsupportedError, match=f"could not carry: .*({match})"):
            ckptfmt.translate(tmp_path / at, target)
        with pytest.warns(CkptWarning, match="could not carry"):
            ckptfmt.translate(tmp_path / at, target, allow_partial=True)
        with pytest.raises(UnsupportedError, match="optimizer"):
            ckptfmt.convert(tmp_path / at, tmp_path / "n", rules=[{"preset": "keras-to-torch"}])
        assert not (tmp_path / "n").exists()
        with pytest.warns(CkptWarning, match="the rules could not carry optimizer"):
            ckptfmt.open_foreign(tmp_path / at, rules=[{"preset": "keras-to-torch"}])


def test_what_keras_has_once_is_refused_where_groups_differ(tmp_path: Path) -> None:
    t = TorchNet()
    halves: list[Any] = [
        {"params": t.body.parameters()},
        {"params": t.head.parameters(), "lr": 0.5},
    ]
    for p, match in (
        (torch.optim.Adam(halves), "lr: Keras has one for all variables: 0.001 and 0.5"),
        (torch.optim.SGD(t.parameters(), lr=1, momentum=0.9, dampening=0.5), "dampening"),
        (torch.optim.Adam(t.parameters(), weight_decay=0.1), "of the gradient in PyTorch"),
        (torch.optim.NAdam(t.parameters()), "momentum_decay: Keras's Nadam has none: 0.004"),
        (torch.optim.RAdam(t.parameters()), "Keras has no equal of it"),
    ):
        ckt.save({"model": t, "optimizer": p}, tmp_path / "t", durable=False)
        k = KerasNet()
        k(X[0])
        made: Any = {"SGD": O.SGD(momentum=0.9), "NAdam": O.Nadam()}.get(type(p).__name__, O.Adam())
        with pytest.raises(UnsupportedError, match=match):
            ckptfmt.translate(tmp_path / "t", {"model": k, "optimizer": made})


def test_other_constants_of_a_keras_optimizer_are_told(tmp_path: Path) -> None:
    t = TorchNet()
    p = torch.optim.Adam(t.parameters(), betas=(0.9, 0.95))
    t.advance(p, range(1))
    ckt.save({"model": t, "optimizer": p}, tmp_path / "t", durable=False)
    k, o = KerasNet(), O.Adam()
    k(X[0])
    with pytest.warns(CkptWarning, match=r"build Keras's Adam with beta_2=0\.95, epsilon=1e-08"):
        ckptfmt.translate(tmp_path / "t", {"model": k, "optimizer": o})


def test_presets_carry_optimizers_without_live_models_and_back(tmp_path: Path) -> None:
    k = _saved(tmp_path / "k", O.AdamW(2e-3, 0.05, beta_1=0.8))
    ckptfmt.convert(
        tmp_path / "k", tmp_path / "t", rules=[{"preset": "keras-to-torch"}], durable=False
    )
    t = TorchNet()
    p = torch.optim.AdamW(t.parameters())
    ckt.restore({"model": t, "optimizer": p}, tmp_path / "t")
    group = p.param_groups[0]
    assert (group["lr"], group["betas"], group["weight_decay"]) == (2e-3, (0.8, 0.999), 0.05)
    assert int(p.state[t.head.weight]["step"]) == 1

    report = ckptfmt.convert(
        tmp_path / "t", tmp_path / "k2", rules=[{"preset": "torch-to-keras"}], durable=False
    )
    assert any("build Keras's Adam with beta_1=0.8" in note for note in report.notes)
    with ckptfmt.open(tmp_path / "k") as old, ckptfmt.open(tmp_path / "k2") as new:
        assert set(new) == set(old)
        assert len(old) > 20
        for name in old:
            assert new[name].dtype == old[name].dtype, name
            assert new[name].read().tobytes() == old[name].read().tobytes(), name
    # What Keras's optimizer was built with is known again, beside AdamW's own name.
    ckptfmt.convert(
        tmp_path / "k2", tmp_path / "t2", rules=[{"preset": "keras-to-torch"}], durable=False
    )
    with ckptfmt.open(tmp_path / "t") as old, ckptfmt.open(tmp_path / "t2") as new:
        assert new["optimizer/param_groups"] == old["optimizer/param_groups"]
    del k


def test_state_that_two_optimizers_may_have_is_asked_for(tmp_path: Path) -> None:
    """A file that does not say its optimizer's class: a TensorFlow checkpoint."""
    k, o = KerasNet(), O.RMSprop(momentum=0.5)
    k.advance(o, range(1))
    tf.train.Checkpoint(model=k, optimizer=o).write(str(tmp_path / "ckpt"))
    preset: dict[str, Any] = {"preset": "keras-to-torch"}
    with pytest.raises(UnsupportedError, match=r"Adam or RMSprop: say which, layers="):
        ckptfmt.convert(tmp_path / "ckpt", tmp_path / "t", rules=[preset], allow_partial=False)
    for told in ({"^optimizer$": "RMSprop"}, {"^optimizer$": "keep"}):
        rules = [{**preset, "layers": told}]
        report = ckptfmt.convert(tmp_path / "ckpt", tmp_path / "t", rules=rules, allow_partial=True)
        kept = "optimizer/state/head/kernel/momentum" in report.loaded
        assert kept == ("keep" in told.values())
        assert ("optimizer/state/head.weight/momentum_buffer" in report.loaded) != kept
    # A live target says it.
    t = TorchNet()
    target = {"model": t, "optimizer": torch.optim.RMSprop(t.parameters(), momentum=0.5)}
    ckt.restore(target, ckptfmt.translate(tmp_path / "ckpt", target), allow_unexpected="**")
    assert "momentum_buffer" in target["optimizer"].state[t.head.weight]


def test_state_follows_layers_of_other_names(tmp_path: Path) -> None:
    k = _saved(tmp_path / "k", O.Adam())
    t = TorchNet()
    t.reader, t.body = t.body, N.Identity()
    p = torch.optim.Adam(t.parameters())
    target = {"net": t, "opt": p}
    rename = {"model": "net", "net/body": "net/reader", "optimizer": "opt"}
    ckt.restore(target, ckptfmt.translate(tmp_path / "k", target, rename=rename))
    reader: Any = t.reader
    assert p.state[reader.weight]["exp_avg_sq"].abs().sum() > 0
    del k


def test_positions_are_not_taken_for_names_but_given_names_are(tmp_path: Path) -> None:
    t = TorchNet()
    k, o = KerasNet(), O.Adam()
    k(X[0])
    target = {"model": k, "optimizer": o}
    for p, named in (
        (torch.optim.Adam(t.parameters()), False),
        (torch.optim.Adam(t.named_parameters()), True),
    ):
        t.advance(p, range(1))
        torch.save({"model": t.state_dict(), "optimizer": p.state_dict()}, tmp_path / "t.pt")
        if not named:
            with pytest.raises(UnsupportedError, match="saved by position"):
                ckptfmt.translate(tmp_path / "t.pt", target)
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CkptWarning)
            source = ckptfmt.translate(tmp_path / "t.pt", target)
        ckf.restore(target, source, build=True)
        moment = p.state[t.head.weight]["exp_avg"].T.numpy()
        at = [v.path for v in k.trainable_variables].index(k.head.kernel.path)
        assert o._momentums[at].numpy().tobytes() == np.ascontiguousarray(moment).tobytes()


def test_the_optimizer_within_one_that_scales_the_loss_is_carried(
    tmp_path: Path,
) -> None:
    k, o = KerasNet(), O.LossScaleOptimizer(O.Adam())
    k.advance(o, range(1))
    ckf.save({"model": k, "optimizer": o}, tmp_path / "k", durable=False)
    t = TorchNet()
    p = torch.optim.Adam(t.parameters())
    target = {"model": t, "optimizer": p}
    with pytest.raises(UnsupportedError, match="optimizer/dynamic_scale: PyTorch scales the loss"):
        ckptfmt.translate(tmp_path / "k", target)
    with pytest.warns(CkptWarning, match="could not carry: optimizer/dynamic_scale"):
        source = ckptfmt.translate(tmp_path / "k", target, allow_partial=True)
    ckt.restore(target, source)
    assert p.state[t.head.weight]["step"] == 1


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_a_keras_file_says_which_optimizer_it_has(tmp_path: Path) -> None:
    k = keras.Sequential([keras.Input((4,)), L.Dense(3, name="head")])
    k.compile(O.RMSprop(2e-3, rho=0.8, momentum=0.5), "mse")
    k.fit(np.ones((2, 4), np.float32), np.ones((2, 3), np.float32), verbose=0)
    k.save(tmp_path / "m.keras")
    rules = [{"preset": "keras-to-torch"}]
    ckptfmt.convert(tmp_path / "m.keras", tmp_path / "t", rules=rules, durable=False)
    t = N.ModuleDict({"head": N.Linear(4, 3)})
    p = torch.optim.RMSprop(t.parameters(), momentum=0.1)
    ckt.restore({"model": t, "optimizer": p}, tmp_path / "t")
    group = p.param_groups[0]
    assert (group["lr"], group["alpha"], group["momentum"]) == (2e-3, 0.8, 0.5)
    assert all("momentum_buffer" in entry for entry in p.state.values())


def test_a_module_on_a_meta_device_is_a_target_as_well(tmp_path: Path) -> None:
    _saved(tmp_path / "k", O.Adam())
    with torch.device("meta"):
        t = TorchNet()
    source = ckptfmt.translate(tmp_path / "k", {"model": t, "rest": object()})
    ckt.restore({"model": t}, source, names="model")
    assert not t.head.weight.is_meta
    p = torch.optim.Adam(t.parameters(), lr=torch.tensor(0.5))
    target = {"model": t, "optimizer": p}
    ckt.restore(target, ckptfmt.translate(tmp_path / "k", target))
    assert isinstance(p.param_groups[0]["lr"], torch.Tensor)
    assert float(p.param_groups[0]["lr"]) == pytest.approx(1e-3)
