"""Case 23: an asynchronous save is of the moment of the call, whatever changes right after it."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ckptfmt
import ckptfmt.torch as ckt
from ckptfmt.storage import Writer
from ckptfmt.storage.memory import MemoryBackend
from ckptfmt.types import Key

RUNS = 50


class Slow(MemoryBackend):
    """A store whose data files take a while to begin."""

    def create(self, key: Key, nbytes: int | None = None) -> Writer:
        time.sleep(0.02)
        return super().create(key, nbytes)


class Plain:
    """A user's object that hands out what it holds, and changes it in place."""

    def __init__(self) -> None:
        self.held: dict[str, Any] = {"seen": [0], "mean": np.zeros(5)}

    def state_dict(self) -> dict[str, Any]:
        return self.held

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.held = state


def state_of() -> dict[str, Any]:
    model = nn.Linear(40, 40)
    optimizer = torch.optim.Adam(model.parameters())
    return {
        "model": model,
        "opt": optimizer,
        "step": torch.tensor(0),
        "count": np.array(0),
        "big": np.zeros(300_000),
        "nested": {"list": [0, [0]], "text": "0"},
        "object": Plain(),
        "generator": torch.Generator(),
    }


def advance(tree: dict[str, Any], step: int) -> None:
    """Everything in place, to values that tell the step."""
    for parameter in tree["model"].parameters():
        parameter.grad = torch.full_like(parameter, 1.0)
        with torch.no_grad():
            parameter.fill_(float(step))
    tree["opt"].step()
    with torch.no_grad():
        for parameter in tree["model"].parameters():
            parameter.fill_(float(step))
    tree["step"].fill_(step)
    tree["count"][...] = step
    tree["big"][:] = step
    tree["nested"]["list"][0] = step
    tree["nested"]["list"][1][0] = step
    tree["nested"]["text"] = str(step)
    tree["object"].held["seen"][0] = step
    tree["object"].held["mean"][:] = step
    tree["generator"].manual_seed(step)


def test_each_of_many_saves_is_of_its_moment_for_every_kind_of_leaf() -> None:
    store: Any = ckptfmt.Store(Slow("memory://case-23"))  # type: ignore[arg-type]
    tree = state_of()
    advance(tree, 1)
    for step in range(1, RUNS + 1):
        future = ckptfmt.save_async(tree, store, step=step)
        assert future.staged
        advance(tree, step + 1)  # the writer has not begun
        future.result()
    for step in range(1, RUNS + 1):
        found = ckt.load(store, step=step)
        seen = {
            float(found["model"]["weight"].min()), float(found["model"]["bias"].max()),
            float(found["opt"]["state"]["weight"]["step"]), float(found["step"]),
            float(found["count"]), float(found["big"].min()), float(found["big"].max()),
            float(found["nested"]["list"][0]), float(found["nested"]["list"][1][0]),
            float(found["nested"]["text"]), float(found["object"]["seen"][0]),
            float(found["object"]["mean"].max()),
        }  # fmt: skip
        assert seen == {float(step)}
        seeded = torch.Generator().manual_seed(step)
        assert torch.equal(found["generator"]["state"], seeded.get_state())


def test_a_variable_of_tensorflow_is_of_its_moment() -> None:
    tf = pytest.importorskip("tensorflow")
    store: Any = ckptfmt.Store(Slow("memory://case-23-tf"))  # type: ignore[arg-type]
    variable = tf.Variable(tf.ones([1000]))
    for step in range(5):
        variable.assign(tf.fill([1000], float(step)))
        future = ckptfmt.save_async({"v": variable}, store, step=step)
        variable.assign(tf.fill([1000], -1.0))
        future.result()
    for step in range(5):
        assert set(ckptfmt.load(store, step=step)["v"].tolist()) == {float(step)}
