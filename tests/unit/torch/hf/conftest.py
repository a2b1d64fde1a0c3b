"""A tiny language model, its data, and a look at all that training has."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

transformers: Any = pytest.importorskip("transformers")


def _rows() -> list[dict[str, torch.Tensor]]:
    starts = torch.randint(0, 20, (24,), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": (t := s + torch.arange(6)), "labels": t} for s in starts]


def _model(seed: int = 3) -> Any:
    torch.manual_seed(seed)
    config = transformers.GPT2Config(
        vocab_size=30, n_positions=8, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config)  # with dropout, and tied embeddings


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return bool(left.dtype == right.dtype and torch.equal(left, right))
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(_same(left[k], right[k]) for k in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(_same, left, right))
    return bool(left == right)


def _live(model: Any, optimizer: Any, scheduler: Any) -> dict[str, Any]:
    """All that must come out equal, copied from the live objects."""
    return copy.deepcopy(
        {
            "weights": dict(model.state_dict()),
            "optimizer": optimizer.state_dict()["state"],
            "scheduler": scheduler.state_dict(),
            "random": torch.get_rng_state(),
        }
    )


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The models are tiny: threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def rows() -> list[dict[str, torch.Tensor]]:
    return _rows()


@pytest.fixture
def make_model() -> Callable[..., Any]:
    return _model


@pytest.fixture
def same() -> Callable[[Any, Any], bool]:
    return _same


@pytest.fixture
def live() -> Callable[[Any, Any, Any], dict[str, Any]]:
    return _live
