"""Lightning's trainer on our plugin: what it stores, when it removes, how it goes on."""

from __future__ import annotations

import copy
import logging
import os
import re
import runpy
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ckptfmt
import ckptfmt.torch as ckt
from ckptfmt import Store

pl: Any = pytest.importorskip("pytorch_lightning")
from lightning_fabric.plugins import TorchCheckpointIO  # noqa: E402

from ckptfmt.torch import lightning as ckl  # noqa: E402

pytestmark = [
    pytest.mark.integration,
    # Advice of Lightning's to its users, and its own use of torch.
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*exists and is not empty"),
    pytest.mark.filterwarnings("ignore:.*logging interval"),
]
logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
EXAMPLE = Path(__file__).resolve().parents[3] / "docs/examples/lightning_trainer.py"
DATA = TensorDataset(torch.randn(32, 4, generator=torch.Generator().manual_seed(3)))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The models are tiny: threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Net(pl.LightningModule):
    """Dropout, a tied weight, a momentum optimizer and a scheduler with a Counter in its state."""

    def __init__(self, width: int = 4, lr: float = 0.1, loss: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.first, self.second = nn.Linear(4, width), nn.Linear(4, width)
        self.second.weight = self.first.weight
        self.drop = nn.Dropout(0.5)
        self.loaded: dict[str, Any] = {}

    def loss_of(self, batch: Any) -> torch.Tensor:
        loss: torch.Tensor = self.drop(self.first(batch[0]) - self.second(batch[0] + 1)).square()
        return loss.mean()

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        return self.loss_of(batch)

    def validation_step(self, batch: Any, number: int) -> None:
        self.log("val_loss", self.loss_of(batch))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"])
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 3])
        return {"optimizer": optimizer, "lr_scheduler": scheduler}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.loaded = checkpoint


class Data(pl.LightningDataModule):
    def __init__(self, size: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.passes = 0

    def train_dataloader(self) -> Any:
        self.passes += 1
        return DataLoader(DATA, self.hparams["size"], shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(DATA, self.hparams["size"])

    def state_dict(self) -> dict[str, Any]:
        return {"passes": self.passes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.passes = state["passes"]


class Batches:
    """A loader that knows its place: shuffled, and it goes on in the middle of an epoch."""

    def __init__(self) -> None:
        self.order: list[int] = []
        self.position = 0
        self.resumed = False

    def __iter__(self) -> Iterator[list[torch.Tensor]]:
        if not self.resumed:
            self.order, self.position = torch.randperm(32).tolist(), 0
        self.resumed = False
        while self.position < len(self.order):
            self.position += 8
            yield [DATA.tensors[0][self.order[self.position - 8 : self.position]]]

    def __len__(self) -> int:
        return 4

    def state_dict(self) -> dict[str, Any]:
        return {"order": self.order, "position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order, self.position, self.resumed = state["order"], state["position"], True


def trainer(folder: Path, io: Any, *, epochs: int = 2, **options: Any) -> Any:
    keeping = {"monitor": "val_loss", "save_top_k": 1, "save_last": True, **options.pop("keep", {})}
    best = pl.callbacks.ModelCheckpoint(folder, **keeping)
    return pl.Trainer(
        max_epochs=epochs,
        plugins=[io],
        callbacks=[best, ckl.RandomState()],
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


def fitted(folder: Path, io: Any, *, resume: Any = None, data: Any = None, **options: Any) -> Any:
    """(trainer, model) after training."""
    pl.seed_everything(7, verbose=False)
    made, model = trainer(folder, io, **options), Net()
    if data is None:
        made.fit(model, datamodule=Data(), ckpt_path=resume)
    else:
        made.fit(model, data, DataLoader(DATA, 8), ckpt_path=resume)
    return made, model


def live(made: Any, model: Any) -> dict[str, Any]:
    """All that a run must have equal at its end."""
    optimizer = made.optimizers[0].state_dict()
    return {
        "weights": {k: v.clone() for k, v in model.state_dict().items()},
        "optimizer": copy.deepcopy(optimizer),
        "scheduler": made.lr_scheduler_configs[0].scheduler.state_dict(),
        "random": torch.get_rng_state(),
        "steps": made.global_step,
    }


def same(left: Any, right: Any) -> bool:
    """Equal to the bit and of the same types, all the way down."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and bool(torch.equal(left, right))
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[k], right[k]) for k in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if type(left).__module__ == "numpy":
        return bool((left == right).all())
    return bool(left == right)


def whole(folder: Path) -> set[str]:
    """The checkpoints in a folder that can be loaded."""
    return {p.name for p in folder.iterdir() if Store(p).latest() is not None}


def test_what_a_trainer_dumps_comes_back_with_its_types(tmp_path: Path) -> None:
    dumped: list[dict[str, Any]] = []

    class Watched(ckl.CkptfmtIO):
        def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
            dumped.append(copy.deepcopy(checkpoint))
            super().save_checkpoint(checkpoint, path, storage_options)

    made, _ = fitted(tmp_path, Watched(), epochs=1)
    made.save_checkpoint(tmp_path / "by hand, recall@5=1.ckpt")
    loaded = ckl.CkptfmtIO().load_checkpoint(tmp_path / "by hand, recall@5=1.ckpt")
    assert same(loaded, dumped[-1])
    assert {"callbacks", "loops", "optimizer_states", "lr_schedulers", "Data"} <= loaded.keys()
    assert loaded["hyper_parameters"] == {"width": 4, "lr": 0.1, "loss": None}
    weights = loaded["state_dict"]
    assert weights["first.weight"] is weights["second.weight"]
    files = [p for p in tmp_path.rglob("*") if p.is_file()]
    assert not any(p.read_bytes()[:2] in (b"PK", b"\x80\x02") for p in files)


@pytest.mark.parametrize("background", [False, True], ids=["sync", "async"])
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path, background: bool) -> None:
    straight = live(*fitted(tmp_path / "a", ckl.CkptfmtIO(), epochs=4))
    fitted(tmp_path / "b", ckl.CkptfmtIO(async_save=background), epochs=2)
    io = ckl.CkptfmtIO(async_save=background)
    resumed = live(*fitted(tmp_path / "b", io, epochs=4, resume="last"))
    assert same(resumed, straight)
    other = live(*fitted(tmp_path / "c", ckl.CkptfmtIO(), epochs=2))
    assert not same(other["weights"], straight["weights"])


def test_a_run_resumes_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    keep = {"every_n_train_steps": 3, "save_top_k": -1, "monitor": None, "save_last": False}
    io = ckl.CkptfmtIO(async_save=True)
    straight = live(*fitted(tmp_path, io, epochs=3, keep=keep, data=Batches()))
    middle = next(tmp_path.glob("*step=6.ckpt"))
    resumed = live(*fitted(tmp_path, io, epochs=3, resume=middle, keep=keep, data=Batches()))
    assert same(resumed, straight)


def test_top_k_and_last_are_kept_and_the_others_removed(tmp_path: Path) -> None:
    seen: list[tuple[str, int | None]] = []
    io = ckl.CkptfmtIO(
        async_save=True, on_commit=lambda path, info: seen.append((Path(path).name, info.step))
    )
    made, _ = fitted(tmp_path, io, epochs=4, keep={"save_top_k": 2})
    best = made.checkpoint_callback.best_k_models
    assert {p.name for p in tmp_path.iterdir()} == {"last.ckpt", *(Path(p).name for p in best)}
    assert whole(tmp_path) == {p.name for p in tmp_path.iterdir()}
    assert [step for name, step in seen if name == "last.ckpt"] == [4, 8, 12, 16]
    with Store(tmp_path / "last.ckpt") as store:
        info = store.latest()
        assert info is not None
        assert (info.name, info.step, info.generation) == ("main", 16, 3)
        assert not store.gc(grace_s=0).deleted  # what the older generations had is gone already
        assert store.verify().ok
    assert ckl.latest(tmp_path) == str(tmp_path / "last.ckpt")
    result = made.validate(Net(), datamodule=Data(), ckpt_path="best", verbose=False)
    assert result[0].keys() == {"val_loss"}


def test_removals_wait_for_the_commit_that_makes_them_safe(tmp_path: Path) -> None:
    go, state = threading.Event(), {"w": torch.ones(3), "global_step": 1}
    io = ckl.CkptfmtIO(async_save=True)
    io.save_checkpoint(state, tmp_path / "1.ckpt")
    io.teardown()
    wait_in_commit(go)
    io.save_checkpoint({**state, "global_step": 2}, tmp_path / "2.ckpt")
    io.remove_checkpoint(tmp_path / "1.ckpt")
    assert whole(tmp_path) == {"1.ckpt"}
    go.set()
    assert io.load_checkpoint(tmp_path / "2.ckpt")["global_step"] == 2
    assert {p.name for p in tmp_path.iterdir()} == {"2.ckpt"}


def test_a_save_that_fails_holds_removals_back_until_one_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    io = ckl.CkptfmtIO(async_save=True)
    io.save_checkpoint({"w": torch.ones(3), "global_step": 1}, tmp_path / "1.ckpt")
    io.teardown()
    with monkeypatch.context() as broken:
        broken.setattr(os, "link", refuse_link)
        io.save_checkpoint({"w": torch.ones(3), "global_step": 2}, tmp_path / "2.ckpt")
        io.remove_checkpoint(tmp_path / "1.ckpt")
        with pytest.raises(ckptfmt.StorageError, match="Input/output error"):
            io.teardown()
    assert whole(tmp_path) == {"1.ckpt"}
    io.save_checkpoint({"w": torch.ones(3), "global_step": 3}, tmp_path / "3.ckpt")
    io.teardown()
    assert whole(tmp_path) == {"3.ckpt"}


_link = os.link


def refuse_link(source: str, target: str, **options: Any) -> None:
    """No commit comes through."""
    if "checkpoints" in target:
        raise OSError(5, "Input/output error")
    _link(source, target, **options)


_gate: list[threading.Event] = []


def _audit(event: str, arguments: Any) -> None:
    if event == "os.link" and _gate and "checkpoints" in str(arguments[1]):
        _gate.pop().wait(60)


def wait_in_commit(go: threading.Event) -> None:
    """The next commit waits for `go`, its data written and its index not. (A hook is for ever.)"""
    if not _hooked:
        sys.addaudithook(_audit)
        _hooked.append(True)
    _gate.append(go)


_hooked: list[bool] = []


def test_a_link_is_replaced_and_its_target_kept(tmp_path: Path) -> None:
    io = ckl.CkptfmtIO()
    io.save_checkpoint({"w": torch.ones(3), "global_step": 1}, tmp_path / "1.ckpt")
    (tmp_path / "last.ckpt").symlink_to("1.ckpt")
    io.save_checkpoint({"w": torch.ones(3), "global_step": 2}, tmp_path / "last.ckpt")
    assert io.load_checkpoint(tmp_path / "1.ckpt")["global_step"] == 1
    (tmp_path / "link.ckpt").symlink_to("1.ckpt")
    io.remove_checkpoint(tmp_path / "link.ckpt")
    assert {p.name for p in tmp_path.iterdir()} == {"1.ckpt", "last.ckpt"}


def test_a_tagged_checkpoint_is_kept(tmp_path: Path) -> None:
    io = ckl.CkptfmtIO()
    io.save_checkpoint({"w": torch.ones(3), "global_step": 1}, tmp_path / "1.ckpt")
    Store(tmp_path / "1.ckpt").tag("best", "main")
    with pytest.warns(ckptfmt.CkptWarning, match=r"1\.ckpt is kept: it has the tags best"):
        io.remove_checkpoint(tmp_path / "1.ckpt")
    assert whole(tmp_path) == {"1.ckpt"}


def test_what_lightning_itself_wrote_is_removed_like_any_file(tmp_path: Path) -> None:
    (tmp_path / "old.ckpt").write_bytes(b"PK")
    io = ckl.CkptfmtIO()
    io.remove_checkpoint(tmp_path / "old.ckpt")
    io.remove_checkpoint(tmp_path / "never was.ckpt")
    assert list(tmp_path.iterdir()) == []


def test_a_value_that_needs_pickle_is_refused_by_its_key(tmp_path: Path) -> None:
    pl.seed_everything(7, verbose=False)
    with pytest.raises(ckptfmt.UsageError, match="hyper_parameters/loss"):
        trainer(tmp_path, ckl.CkptfmtIO(), epochs=1).fit(Net(loss=same), datamodule=Data())
    assert not any(tmp_path.glob("*/checkpoints/*"))


def test_a_module_is_made_from_its_checkpoint(tmp_path: Path) -> None:
    made, model = fitted(tmp_path, ckl.CkptfmtIO(), epochs=1)
    last = tmp_path / "last.ckpt"
    with pytest.raises(IsADirectoryError):  # why load_module is there
        Net.load_from_checkpoint(last)
    loaded = ckl.load_module(Net, last, lr=0.5)
    assert dict(loaded.hparams) == {"width": 4, "lr": 0.5, "loss": None}
    assert same(dict(loaded.state_dict()), dict(model.state_dict()))
    assert loaded.loaded["global_step"] == made.global_step
    assert ckl.load_module(Net, last, device="cpu", strict=True).first.weight.device.type == "cpu"
    data = ckl.load_module(Data, last)
    assert (data.passes, data.hparams["size"]) == (1, 8)
    with pytest.raises(RuntimeError, match="size mismatch"):
        ckl.load_module(Net, last, width=5)
    with pytest.raises(ckptfmt.UsageError, match="LightningModules"):
        ckl.load_module(nn.Linear, last)
    with pytest.raises(FileNotFoundError):
        ckl.load_module(Net, tmp_path / "none.ckpt")


def test_map_location_is_a_device(tmp_path: Path) -> None:
    io = ckl.CkptfmtIO()
    io.save_checkpoint({"w": torch.ones(3)}, tmp_path / "1.ckpt")
    assert io.load_checkpoint(tmp_path / "1.ckpt", map_location="meta")["w"].is_meta
    with pytest.raises(ckptfmt.UsageError, match="map_location is a device here"):
        io.load_checkpoint(tmp_path / "1.ckpt", map_location=lambda storage, place: storage)


def test_a_file_that_a_store_replaces_stays_until_the_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "last.ckpt").write_bytes(b"PK")
    io = ckl.CkptfmtIO()
    with monkeypatch.context() as broken:
        broken.setattr(os, "link", refuse_link)
        with pytest.raises(ckptfmt.StorageError):
            io.save_checkpoint({"w": torch.ones(3)}, tmp_path / "last.ckpt")
    assert (tmp_path / "last.ckpt.before").read_bytes() == b"PK"
    io.save_checkpoint({"w": torch.ones(3)}, tmp_path / "last.ckpt")
    assert {p.name for p in tmp_path.iterdir()} == {"last.ckpt"}


def test_a_run_of_lightnings_own_is_taken_over(tmp_path: Path) -> None:
    straight = live(*fitted(tmp_path / "a", ckl.CkptfmtIO(), epochs=4))
    fitted(tmp_path / "b", TorchCheckpointIO(), epochs=2)
    own, taken = tmp_path / "b/last.ckpt", tmp_path / "b/taken.ckpt"
    with pytest.raises(ckptfmt.UsageError, match="a file of Lightning's own"):
        ckl.CkptfmtIO().load_checkpoint(own)
    dumped = torch.load(own, weights_only=False)  # it has arrays of RandomState
    ckl.CkptfmtIO().save_checkpoint(dumped, taken)
    assert same(ckl.CkptfmtIO().load_checkpoint(taken), dumped)
    assert same(live(*fitted(tmp_path / "b", ckl.CkptfmtIO(), epochs=4, resume=taken)), straight)


def test_another_number_of_ranks_is_told(tmp_path: Path) -> None:
    fitted(tmp_path, ckl.CkptfmtIO(), epochs=1)
    state = ckl.CkptfmtIO().load_checkpoint(tmp_path / "last.ckpt")
    state[ckl.RNG_KEY] *= 2
    ckl.CkptfmtIO().save_checkpoint(state, tmp_path / "two.ckpt")
    with pytest.warns(ckptfmt.CkptWarning, match="random states of 2 ranks and this run has 1"):
        fitted(tmp_path, ckl.CkptfmtIO(), resume=tmp_path / "two.ckpt")


def test_fabric_saves_and_loads_through_the_plugin(tmp_path: Path) -> None:
    from lightning_fabric import Fabric

    fabric: Any = Fabric(accelerator="cpu", devices=1, plugins=[ckl.CkptfmtIO()])
    model = nn.Linear(2, 2)
    module, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    fabric.save(tmp_path / "f.ckpt", {"model": module, "optimizer": optimizer, "step": 3})
    assert ckt.load(Store(tmp_path / "f.ckpt"))["step"] == 3
    kept = model.weight.detach().clone()
    nn.init.zeros_(model.weight)
    state = {"model": module, "optimizer": optimizer, "step": 0}
    assert fabric.load(tmp_path / "f.ckpt", state) == {}
    assert torch.equal(model.weight, kept)
    assert state["step"] == 3


def run_example(*arguments: object, kill_at: int = 0) -> subprocess.CompletedProcess[str]:
    """The example in a process of its own; killed before its `kill_at`-th commit, if not 0."""
    program = f"""
import os, runpy, signal, sys
begun = set()
def audit(event, arguments):
    if event == "os.link" and "checkpoints" in str(arguments[1]):
        begun.add(arguments[1])
        if len(begun) == {kill_at}:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(audit)
sys.argv = {[str(EXAMPLE), *map(str, arguments)]}
runpy.run_path(sys.argv[0], run_name="__main__")
"""
    command = [sys.executable, "-W", "error::ckptfmt.CkptWarning", "-c", program]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # as here
    return subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment)


def outcome(output: str) -> tuple[str, str]:
    """What the example says it resumed from, and the digest of its weights."""
    found = re.search(r"resumed from (.*)\nweights after \d+ steps: (\w+)", output)
    assert found is not None, output
    return Path(found[1]).name, found[2]


@pytest.mark.parametrize(
    "kills", [[3], pytest.param(range(1, 9), marks=pytest.mark.slow)], ids=["one", "each"]
)
def test_a_run_killed_in_the_middle_of_a_save_resumes_from_a_good_one(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    kills: list[int],
) -> None:
    def here(folder: Path) -> tuple[str, str]:
        arguments = [str(EXAMPLE), "--folder", str(folder), "--epochs", "4"]
        monkeypatch.setattr(sys, "argv", arguments)
        runpy.run_path(str(EXAMPLE), run_name="__main__")
        return outcome(capsys.readouterr().out)

    begun, straight = here(tmp_path / "straight")
    assert begun == "None"
    for kill in kills:
        folder = tmp_path / f"killed {kill}"
        died = run_example("--folder", folder, "--epochs", 4, kill_at=kill)
        assert died.returncode == -9, died.stderr
        good = whole(folder)
        begun, weights = here(folder)
        assert begun in good if good else begun == "None"
        assert weights == straight, kill


def finished(done: subprocess.CompletedProcess[str]) -> tuple[str, str]:
    assert done.returncode == 0, done.stdout + done.stderr
    return outcome(done.stdout)


@pytest.mark.slow
def test_two_processes_save_once_and_resume_exactly(tmp_path: Path) -> None:
    straight = finished(run_example("--folder", tmp_path / "a", "--epochs", 4, "--devices", 2))
    finished(run_example("--folder", tmp_path / "b", "--epochs", 2, "--devices", 2))
    assert all(Store(p).latest() is not None for p in (tmp_path / "b").iterdir())
    resumed = finished(run_example("--folder", tmp_path / "b", "--epochs", 4, "--devices", 2))
    assert resumed == ("last.ckpt", straight[1])
    assert len(ckt.load(Store(tmp_path / "b/last.ckpt"))[ckl.RNG_KEY]) == 2
