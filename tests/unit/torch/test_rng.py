"""Generators: read when saved, set last when restored, never moved or cast."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckptfmt
import ckptfmt.torch as ckt
from ckptfmt.errors import MismatchError


@pytest.fixture(autouse=True)
def _own_generators() -> Iterator[None]:
    old = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(old[0])
    np.random.set_state(old[1])
    torch.set_rng_state(old[2])


def draws() -> tuple[Any, ...]:
    return (
        [random.random() for _ in range(1000)],
        np.random.standard_normal(1000).tolist(),
        torch.randn(1000, device="cpu", dtype=torch.float32).tolist(),
    )


def seed(n: int) -> None:
    random.seed(n)
    np.random.seed(n)
    torch.manual_seed(n)
    np.random.standard_normal()  # leaves one Gaussian in the cache
    random.gauss(0.0, 1.0)


def test_restoring_the_live_handle_continues_all_generators(tmp_path: Path) -> None:
    seed(1)
    ckt.save({"rng": ckt.rng_state()}, tmp_path / "s")
    expected = draws()
    seed(2)
    assert ckt.restore({"rng": ckt.rng_state()}, tmp_path / "s").clean
    assert draws() == expected


def test_the_handle_reads_at_save_not_when_it_is_made(tmp_path: Path) -> None:
    handle = ckt.rng_state()
    seed(3)
    ckt.save({"rng": handle}, tmp_path / "s")
    expected = draws()
    ckt.restore({"rng": handle}, tmp_path / "s")
    assert draws() == expected


def test_loaded_state_is_set_under_any_default_and_is_never_cast(tmp_path: Path) -> None:
    seed(4)
    generator = torch.Generator().manual_seed(7)
    ckt.save({"rng": ckt.rng_state(), "g": generator, "w": torch.ones(2)}, tmp_path / "s")
    expected, own = draws(), torch.randn(5, generator=generator)
    torch.set_default_device("meta")
    torch.set_default_dtype(torch.float64)
    try:
        loaded = ckt.load(tmp_path / "s", dtype=torch.bfloat16)
        ckt.set_rng_state(loaded["rng"])
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
    state = loaded["rng"]["torch"]
    assert (state.dtype, state.device.type) == (torch.uint8, "cpu")
    assert loaded["g"]["state"].dtype == torch.uint8
    assert loaded["w"].dtype == torch.bfloat16
    version, internal, gauss = loaded["rng"]["python"]
    assert isinstance(loaded["rng"]["python"], tuple)
    assert isinstance(internal, tuple)
    assert version == 3
    assert isinstance(gauss, float)
    assert draws() == expected
    other = torch.Generator()
    other.set_state(loaded["g"]["state"])
    assert torch.equal(torch.randn(5, generator=other), own)


def test_a_generator_in_the_tree_is_set_in_place(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(5)
    torch.randn(3, generator=generator)
    ckt.save({"g": generator}, tmp_path / "s")
    expected = torch.randn(4, generator=generator)
    target = torch.Generator()
    ckt.restore({"g": target}, tmp_path / "s")
    assert torch.equal(torch.randn(4, generator=target), expected)


def test_code_that_draws_during_the_restore_does_not_disturb_it(tmp_path: Path) -> None:
    class Drawing:
        """Draws from every generator when it is given its state."""

        def state_dict(self) -> dict[str, Any]:
            return {"x": 1}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            draws()

    seed(6)
    ckt.save({"rng": ckt.rng_state(), "d": Drawing()}, tmp_path / "s")
    expected = draws()
    ckt.restore({"rng": ckt.rng_state(), "d": Drawing()}, tmp_path / "s")
    assert draws() == expected


def spoil_version(state: dict[str, Any]) -> None:
    state["python"] = (99, *state["python"][1:])


def spoil_numpy(state: dict[str, Any]) -> None:
    state["numpy"] = {**state["numpy"], "bit_generator": "PCG64"}


def spoil_torch(state: dict[str, Any]) -> None:
    state["torch"] = state["torch"][:100]


def spoil_cuda(state: dict[str, Any]) -> None:
    state["cuda"] = {"99": state["torch"]}


@pytest.mark.parametrize("spoil", [spoil_version, spoil_numpy, spoil_torch, spoil_cuda])
def test_a_state_that_does_not_fit_is_refused_before_anything_is_set(
    spoil: Callable[[dict[str, Any]], None], tmp_path: Path
) -> None:
    ckt.save({"rng": ckt.rng_state()}, tmp_path / "s")
    state = ckt.load(tmp_path / "s")["rng"]
    spoil(state)
    seed(8)
    before = random.getstate(), torch.get_rng_state()
    with pytest.raises(MismatchError):
        ckt.set_rng_state(state)
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])


def test_a_spoilt_generator_state_leaves_generators_and_tensors_alone(
    frozen: Callable[[Any], Any], tmp_path: Path
) -> None:
    seed(9)
    ckt.save({"w": torch.ones(2), "rng": ckt.rng_state()}, tmp_path / "good")
    state = ckt.load(tmp_path / "good")
    state["rng"]["numpy"]["bit_generator"] = "PCG64"
    ckt.save(state, tmp_path / "bad")
    target = torch.zeros(2)
    before = random.getstate(), torch.get_rng_state()
    with pytest.raises(MismatchError):
        ckt.restore({"w": target, "rng": ckt.rng_state()}, tmp_path / "bad")
    assert target.tolist() == [0.0, 0.0]
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])


@pytest.mark.parametrize("state", [{}, {"a": 1}, {"state": b""}, 3])
def test_what_is_no_state_of_generators_is_refused(state: Any) -> None:
    with pytest.raises(MismatchError, match="not the state of these generators"):
        ckt.set_rng_state(state)


class Drawing:
    """Draws from torch's generator when it gives its state, as a data loader does."""

    def state_dict(self) -> dict[str, Any]:
        return {"seed": torch.randint(0, 100, ()).item()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def test_generators_are_read_after_every_other_object_wherever_they_stand(tmp_path: Path) -> None:
    tree = {"rng": ckt.rng_state(), "gen": torch.default_generator, "loader": Drawing()}
    ckt.save(tree, tmp_path)
    expected = torch.rand(3)
    torch.manual_seed(99)
    ckt.restore(tree, tmp_path)
    assert torch.equal(torch.rand(3), expected)
    with ckptfmt.open(tmp_path) as ckpt:
        assert ckpt.names()[0].startswith("rng/")  # the order in the file is the tree's
