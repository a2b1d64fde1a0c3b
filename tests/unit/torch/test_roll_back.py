"""After a restore that fails, all is as it was: generators, attributes and datasets too."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ckptfmt
import ckptfmt.torch as ckt


class Raises:
    """An object that refuses its new state, and takes its old one back."""

    def __init__(self) -> None:
        self.calls = 0

    def state_dict(self) -> dict[str, Any]:
        return {"a": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls += 1
        if self.calls == 1:
            raise RuntimeError("it does not fit")


class Draws(Raises):
    """An object whose code draws from every global generator, and takes its state."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        draw()


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def fails(target: dict[str, Any], store: Path) -> None:
    with pytest.raises(RuntimeError, match="it does not fit"):
        ckt.restore(target, store)


def seed() -> None:
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)


def test_the_global_generators_are_as_they_were(tmp_path: Path) -> None:
    ckt.save({"draws": Draws(), "raises": Raises()}, tmp_path)
    seed()
    expected = draw()
    seed()
    fails({"draws": Draws(), "raises": Raises()}, tmp_path)
    assert draw() == expected


class Renamed(nn.Module):
    """A hook of it draws, as one does that initializes what an old checkpoint lacks."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))
        self.register_load_state_dict_pre_hook(self._rename)

    def _rename(self, _module: Any, state: dict[str, Any], *_: Any) -> None:
        draw()
        if "old" in state:
            state["weight"] = state.pop("old")


def test_looking_whether_hooks_would_take_a_state_draws_nothing(tmp_path: Path) -> None:
    ckt.save({"model": {"old": torch.ones(3)}}, tmp_path)
    seed()
    expected = draw()
    seed()
    assert ckptfmt.plan({"model": Renamed()}, tmp_path).clean
    assert draw() == expected


class Counts(nn.Module):
    """Its own `load_state_dict` sets plain attributes before its tensors."""

    def __init__(self, epoch: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((2,), float(epoch)))
        self.epoch = epoch
        self.history = [epoch]
        self.seen = {epoch}
        self.table = {"epoch": epoch}
        self.cache = torch.full((3,), float(epoch))
        self.numbers = np.full(2, epoch)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {**super().state_dict(*args, **kwargs), "epoch": self.epoch}

    def load_state_dict(self, state: Any, *args: Any, **kwargs: Any) -> Any:
        state = dict(state)
        self.epoch = state.pop("epoch")
        self.history.append(self.epoch)
        self.seen.add(self.epoch)
        self.table["epoch"] = self.epoch
        self.cache.fill_(self.epoch)
        self.numbers[:] = self.epoch
        self.late = True
        return super().load_state_dict(state, *args, **kwargs)


def test_attributes_that_a_modules_own_code_set_are_put_back(tmp_path: Path) -> None:
    ckt.save({"model": Counts(5), "raises": Raises()}, tmp_path)
    model = Counts(1)
    history, seen, table = model.history, model.seen, model.table
    fails({"model": model, "raises": Raises()}, tmp_path)
    assert model.epoch == 1
    assert model.history is history
    assert history == [1]
    assert model.seen is seen
    assert seen == {1}
    assert model.table is table
    assert table == {"epoch": 1}
    assert torch.equal(model.cache, torch.full((3,), 1.0))
    assert model.numbers.tolist() == [1, 1]
    assert not hasattr(model, "late")
    assert torch.equal(model.weight, torch.ones(2))


class Stream(torch.utils.data.IterableDataset):
    """A dataset that keeps its own position."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[int]:
        while self.position < 20:
            self.position += 1
            yield self.position

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


@pytest.mark.filterwarnings("ignore:.*set_vital.*is deprecated:UserWarning")
def test_the_dataset_and_the_generator_of_a_loader_are_put_back(tmp_path: Path) -> None:
    data = pytest.importorskip("torchdata.stateful_dataloader")

    def started(generator: torch.Generator, count: int) -> tuple[Any, Any]:
        loader = data.StatefulDataLoader(Stream(), batch_size=None, generator=generator)
        iterator = iter(loader)
        assert [next(iterator) for _ in range(count)] == list(range(1, count + 1))
        return loader, iterator

    saved, _ = started(torch.Generator(), 7)
    ckt.save({"data": saved, "raises": Raises()}, tmp_path)
    generator = torch.Generator()
    loader, iterator = started(generator, 3)
    before = generator.get_state()
    fails({"data": loader, "raises": Raises()}, tmp_path)
    assert torch.equal(generator.get_state(), before)
    assert next(iterator) == 4


class Interrupted(Raises):
    """Ctrl-C comes while its old state is put back."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls += 1
        if self.calls == 1:
            raise RuntimeError("it does not fit")
        if self.calls == 2:
            raise KeyboardInterrupt


def test_an_interrupt_does_not_stop_a_roll_back_half_way(tmp_path: Path) -> None:
    ckt.save({"model": Counts(5), "late": Interrupted()}, tmp_path)
    model, late = Counts(1), Interrupted()
    with pytest.raises(KeyboardInterrupt):
        ckt.restore({"model": model, "late": late}, tmp_path)
    assert late.calls == 3
    assert model.epoch == 1
    assert torch.equal(model.weight, torch.ones(2))
