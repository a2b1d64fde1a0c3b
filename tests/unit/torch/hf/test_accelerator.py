"""What an Accelerator has prepared and registered, saved and restored in its place."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ckptfmt
import ckptfmt.torch as ckt
from ckptfmt import Store

accelerate: Any = pytest.importorskip("accelerate")
from accelerate.state import AcceleratorState, GradientState, PartialState  # noqa: E402
from accelerate.utils import DataLoaderConfiguration  # noqa: E402

from ckptfmt.torch import hf  # noqa: E402

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # torchdata's own use of torch
]
DATA = TensorDataset(torch.randn(32, 4, generator=torch.Generator().manual_seed(3)))
BATCHES = 8  # of an epoch


class Average:
    """A registered object: tensors, an array, plain values."""

    def __init__(self) -> None:
        self.mean, self.seen, self.last = torch.zeros(1), 0, np.zeros(2)

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean, "seen": self.seen, "last": self.last}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mean, self.seen, self.last = state["mean"], state["seen"], state["last"]


class Run:
    """A training loop over a prepared model, optimizer, scheduler and loader."""

    def __init__(self, seed: int, *, width: int = 8, scaler: bool = False, **config: Any) -> None:
        for shared in (AcceleratorState, GradientState, PartialState):
            shared._reset_state()
        torch.manual_seed(seed)
        self.accelerator = accelerate.Accelerator(
            cpu=True,
            gradient_accumulation_steps=2,
            dataloader_config=DataLoaderConfiguration(**config),
        )
        if scaler:
            self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=4.0 + seed)
        self.stateful = bool(config.get("use_stateful_dataloader"))
        model = nn.Sequential(nn.Linear(4, width), nn.Dropout(0.5), nn.Linear(width, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        # The loader draws from a generator of its own, so that making its iterator again in the
        # middle of an epoch takes no number from dropout.
        loader = DataLoader(
            DATA, 4, shuffle=True, generator=torch.Generator().manual_seed(seed + 1)
        )
        self.model, self.optimizer, self.scheduler, self.loader = self.accelerator.prepare(
            model, optimizer, scheduler, loader
        )
        self.average = Average()
        self.accelerator.register_for_checkpointing(self.average)

    def batches(self, done: int) -> Iterator[Any]:
        """From the batch after `done` of them on."""
        for epoch in itertools.count(done // BATCHES):
            skip = done % BATCHES if epoch == done // BATCHES and not self.stateful else 0
            self.loader.set_epoch(epoch)
            yield from accelerate.skip_first_batches(self.loader, skip) if skip else self.loader

    def train(self, done: int, until: int) -> None:
        for (inputs,) in itertools.islice(self.batches(done), until - done):
            with self.accelerator.accumulate(self.model):
                loss = self.model(inputs).square().mean()
                self.accelerator.backward(loss)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            self.average.mean = self.average.mean * 0.9 + loss.detach() * 0.1
            self.average.seen += 1
            self.average.last = self.average.last + 1

    def outcome(self, live: Any) -> dict[str, Any]:
        found = live(self.model, self.optimizer, self.scheduler)
        return {**found, "mean": self.average.mean, "seen": self.average.seen}


@pytest.mark.parametrize("at", [8, 10], ids=["end of epoch", "middle of epoch"])
@pytest.mark.parametrize("stateful", [False, True], ids=["seedable", "stateful"])
def test_a_resumed_run_equals_an_uninterrupted_one(
    tmp_path: Path, live: Any, same: Any, at: int, stateful: bool
) -> None:
    if stateful:
        pytest.importorskip("torchdata")
    config = {"use_stateful_dataloader": stateful, "use_seedable_sampler": True}
    straight = Run(0, **config)
    straight.train(0, 20)
    begun = Run(0, **config)
    begun.train(0, at)
    info = hf.save_state(begun.accelerator, tmp_path, step=at, metadata={"epoch": 1})
    assert info is not None
    assert (info.step, info.metadata) == (at, {"epoch": 1})
    resumed = Run(7, **config)
    report = hf.load_state(resumed.accelerator, tmp_path)
    assert report.clean
    resumed.train(report.step, 20)
    assert same(resumed.outcome(live), straight.outcome(live))
    assert isinstance(resumed.average.last, np.ndarray)
    assert not same(begun.outcome(live), straight.outcome(live))


def test_nothing_is_pickled_and_parameters_have_their_names(tmp_path: Path) -> None:
    run = Run(0, scaler=True)
    hf.save_state(run.accelerator, tmp_path)
    tree = ckt.load(tmp_path)
    assert set(tree) == {
        *("models", "optimizers", "schedulers", "dataloaders", "custom", "scaler", "counter"),
        "rng",
    }
    run.model.train()
    run.train(0, 4)
    hf.save_state(run.accelerator, tmp_path)
    assert "0.weight" in ckt.load(tmp_path)["optimizers"]["0"]["state"]
    other = Run(3, scaler=True)
    assert other.accelerator.scaler.get_scale() == 7.0
    hf.load_state(other.accelerator, tmp_path)
    assert other.accelerator.scaler.get_scale() == 4.0


def test_a_state_for_another_model_is_refused_and_nothing_changes(tmp_path: Path) -> None:
    hf.save_state(Run(0).accelerator, tmp_path)
    wider = Run(1, width=9)
    before, random = wider.model[0].weight.clone(), torch.get_rng_state()
    with pytest.raises(ckptfmt.MismatchError, match=r"models/0/0\.weight"):
        hf.load_state(wider.accelerator, tmp_path)
    assert torch.equal(wider.model[0].weight, before)
    assert torch.equal(torch.get_rng_state(), random)


def test_the_tree_may_be_saved_in_the_background_and_in_part(tmp_path: Path) -> None:
    run = Run(0)
    future = ckptfmt.save_async(hf.accelerator_state(run.accelerator), tmp_path, step=1)
    assert future.result().step == 1
    fresh = Run(5)
    tree = hf.accelerator_state(fresh.accelerator)
    ckt.restore({"models": tree["models"]}, tmp_path, names="models")
    assert torch.equal(fresh.model[0].weight, run.model[0].weight)


def test_hooks_keep_the_models_of_save_state(tmp_path: Path) -> None:
    run = Run(0)
    handles = hf.use_hooks(run.accelerator)
    run.accelerator.save_state(str(tmp_path))
    assert not list(tmp_path.glob("*.safetensors"))
    assert "0.weight" in ckptfmt.load(Store(tmp_path))["models"]["0"]
    fresh = Run(5)
    hf.use_hooks(fresh.accelerator)
    fresh.accelerator.load_state(str(tmp_path))
    assert torch.equal(fresh.model[0].weight, run.model[0].weight)
    for handle in handles:
        handle.remove()
    run.accelerator.save_state(str(tmp_path / "own"))
    assert list((tmp_path / "own").glob("*.safetensors"))


def test_state_in_parts_is_refused(tmp_path: Path) -> None:
    run = Run(0)
    run.accelerator.state.distributed_type = accelerate.DistributedType.FSDP
    with pytest.raises(ckptfmt.UsageError, match=r"FSDP.*ckptfmt\.torch\.dcp"):
        hf.save_state(run.accelerator, tmp_path)


def test_what_needs_pickle_is_refused_by_its_key(tmp_path: Path) -> None:
    run = Run(0)
    run.average.seen = len  # type: ignore[assignment]
    with pytest.raises(ckptfmt.UsageError, match="custom/0/seen"):
        hf.save_state(run.accelerator, tmp_path)


def test_other_numbers_of_ranks_are_told(tmp_path: Path) -> None:
    run = Run(0)
    tree = hf.accelerator_state(run.accelerator)
    tree["rng"]._states *= 2
    ckt.save(tree, tmp_path)
    with pytest.warns(ckptfmt.CkptWarning, match="random states of 2 ranks"):
        hf.load_state(run.accelerator, tmp_path)
