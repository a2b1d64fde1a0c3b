"""Transformers' trainer with our mixin: what it writes, keeps and resumes."""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptfmt
import ckptfmt.torch as ckt
from ckptfmt import Store

transformers: Any = pytest.importorskip("transformers")
from ckptfmt.torch import hf  # noqa: E402

pytestmark = pytest.mark.integration
transformers.utils.logging.set_verbosity_error()
EXAMPLE = Path(__file__).resolve().parents[4] / "docs/examples/hf_trainer.py"


class Ours(hf.TrainerMixin, transformers.Trainer):
    pass


class InBackground(Ours):
    background_saves = True


class Stop(transformers.TrainerCallback):
    """Ends a run after a step, with a checkpoint, as an interruption would."""

    def __init__(self, step: int | None) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            control.should_save = control.should_training_stop = True


@pytest.fixture
def build(rows: Any, make_model: Any) -> Callable[..., Any]:
    """build(folder, kind=Ours, stop=None, **arguments) -> a trainer of three epochs of 3 steps."""

    def make(
        folder: Path, kind: Any = Ours, *, stop: int | None = None, callbacks: Any = (), **more: Any
    ) -> Any:
        arguments = {
            "max_steps": 9,
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 2,
            "learning_rate": 1e-2,
            "save_steps": 4,
            "report_to": [],
            "disable_tqdm": True,
            "use_cpu": True,
            "logging_steps": 100,
            "seed": 5,
        } | more
        return kind(
            make_model(),
            transformers.TrainingArguments(str(folder), **arguments),
            train_dataset=rows,
            eval_dataset=rows[:4],
            callbacks=[Stop(stop), *callbacks],
        )

    return make


def native_files(folder: Path) -> list[str]:
    """Files of Trainer's own kinds that hold weights or pickles."""
    kinds = (".bin", ".pt", ".pth", ".pkl", ".safetensors")
    return [p.name for p in folder.rglob("*") if p.name.endswith(kinds)]


@pytest.mark.parametrize("kind", [Ours, InBackground])
@pytest.mark.parametrize("stop", [3, 5], ids=["end of epoch", "middle of epoch"])
def test_a_resumed_run_equals_an_uninterrupted_one(
    tmp_path: Path, build: Any, live: Any, same: Any, kind: Any, stop: int
) -> None:
    def outcome(trainer: Any) -> dict[str, Any]:
        found: dict[str, Any] = live(trainer.model, trainer.optimizer, trainer.lr_scheduler)
        return found

    straight = build(tmp_path / "a", kind, save_strategy="no")
    straight.train()
    build(tmp_path / "b", kind, stop=stop).train()
    assert native_files(tmp_path / "b") == []
    resumed = build(tmp_path / "b", kind)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 9
    assert same(outcome(resumed), outcome(straight))
    fresh = build(tmp_path / "c", kind, stop=stop)
    fresh.train()
    assert not same(outcome(fresh), outcome(straight))


def test_the_oldest_checkpoints_go_and_the_best_stays(tmp_path: Path, build: Any) -> None:
    scores = iter([3.0, 1.0, 2.0, 2.5])
    trainer = build(
        tmp_path,
        InBackground,
        save_steps=2,
        eval_strategy="steps",
        eval_steps=2,
        save_total_limit=2,
        load_best_model_at_end=True,
        metric_for_best_model="eval_score",
        greater_is_better=False,
        max_steps=8,
    )
    evaluate = trainer.evaluate

    def scored(*args: Any, **kwargs: Any) -> dict[str, float]:
        metrics: dict[str, float] = {**evaluate(*args, **kwargs), "eval_score": next(scores)}
        return metrics

    trainer.evaluate = scored
    trainer.train()
    assert {p.name for p in tmp_path.iterdir()} == {"checkpoint-4", "checkpoint-8"}
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-4")
    best = ckt.load(tmp_path / "checkpoint-4", names="model")["model"]
    assert all(torch.equal(best[k], v) for k, v in trainer.model.state_dict().items())
    assert hf.latest(tmp_path) == str(tmp_path / "checkpoint-8")


def test_a_checkpoint_that_is_not_whole_is_passed_over(tmp_path: Path, build: Any) -> None:
    build(tmp_path, stop=5).train()
    torn = tmp_path / "checkpoint-7"
    shutil.copytree(tmp_path / "checkpoint-5", torn)
    shutil.rmtree(torn / "checkpoints")
    assert hf.latest(tmp_path) == str(tmp_path / "checkpoint-5")
    resumed = build(tmp_path)
    resumed.train(resume_from_checkpoint=True)
    assert Store(tmp_path / "checkpoint-9").latest() is not None
    with pytest.raises(ckptfmt.NotFoundError, match="no whole checkpoint to resume from"):
        build(tmp_path / "empty").train(resume_from_checkpoint=True)
    with pytest.raises(ckptfmt.NotFoundError):
        build(tmp_path).train(resume_from_checkpoint=str(torn))


def test_trainers_own_state_comes_from_the_store(tmp_path: Path, build: Any) -> None:
    patience = transformers.EarlyStoppingCallback(early_stopping_patience=7)
    more = {"eval_strategy": "steps", "eval_steps": 4, "metric_for_best_model": "eval_loss"}
    more |= {"load_best_model_at_end": True, "callbacks": [patience]}
    build(tmp_path, stop=5, **more).train()
    path = tmp_path / "checkpoint-5"
    written = json.loads((path / "trainer_state.json").read_text())
    stored = ckptfmt.load(path, names="trainer")["trainer"]
    assert stored == written
    assert stored["stateful_callbacks"]["EarlyStoppingCallback"]["args"] == {
        "early_stopping_patience": 7,
        "early_stopping_threshold": 0.0,
    }
    (path / "trainer_state.json").unlink()
    resumed = build(tmp_path, **more)
    resumed.train(resume_from_checkpoint=str(path))
    assert resumed.state.global_step == 9
    assert json.loads((path / "trainer_state.json").read_text()) == written


def test_a_run_of_trainers_own_is_taken_over(tmp_path: Path, build: Any, live: Any) -> None:
    build(tmp_path, transformers.Trainer, stop=5).train()
    assert native_files(tmp_path)
    straight = build(tmp_path / "a", save_strategy="no")
    straight.train()
    resumed = build(tmp_path)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    weights = resumed.model.state_dict()
    assert all(torch.equal(weights[k], v) for k, v in straight.model.state_dict().items())
    assert native_files(tmp_path / "checkpoint-9") == []


def test_a_model_alone_starts_its_optimizer_anew_and_says_so(tmp_path: Path, build: Any) -> None:
    build(tmp_path, stop=5, save_only_model=True).train()
    assert set(ckptfmt.load(tmp_path / "checkpoint-5")) == {"model", "trainer", "config"}
    with pytest.warns(ckptfmt.CkptWarning, match="save_only_model"):
        build(tmp_path).train(resume_from_checkpoint=True)


def test_a_model_is_made_from_its_checkpoint(tmp_path: Path, build: Any) -> None:
    trainer = build(tmp_path, stop=5)
    trainer.train()
    path = tmp_path / "checkpoint-5"
    made = hf.load_model(transformers.GPT2LMHeadModel, path)
    assert not made.training
    tokens = torch.arange(6)[None]
    assert torch.equal(made(tokens).logits, trainer.model.eval()(tokens).logits)
    assert made.lm_head.weight is made.transformer.wte.weight
    with pytest.raises(ckptfmt.MismatchError, match="lm_head"):
        hf.load_model(transformers.GPT2Model, path)


def test_a_model_that_differs_is_refused_before_training(tmp_path: Path, build: Any) -> None:
    build(tmp_path, stop=5).train()
    other = build(tmp_path)
    other.model.transformer.ln_f.register_parameter("gain", torch.nn.Parameter(torch.ones(1)))
    before = {k: v.clone() for k, v in other.model.state_dict().items()}
    with pytest.raises(ckptfmt.MismatchError, match=r"model/transformer\.ln_f\.gain"):
        other.train(resume_from_checkpoint=True)
    assert all(torch.equal(before[k], v) for k, v in other.model.state_dict().items())


def test_a_failed_save_in_the_background_ends_the_run(
    tmp_path: Path, build: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = os.link

    def broken(source: str, target: str, **options: Any) -> None:
        if "checkpoints" in target:
            raise OSError(5, "Input/output error")
        link(source, target, **options)

    monkeypatch.setattr(os, "link", broken)
    with pytest.raises(ckptfmt.StorageError, match="Input/output error"):
        build(tmp_path, InBackground).train()
    assert hf.latest(tmp_path) is None


def test_what_the_mixin_cannot_do_is_refused_before_training(tmp_path: Path, build: Any) -> None:
    trainer = build(tmp_path)
    trainer.args.push_to_hub = True
    with pytest.raises(ckptfmt.UsageError, match="push_to_hub"):
        trainer.train()
    trainer.args.push_to_hub = False
    trainer.is_fsdp_enabled = True
    with pytest.raises(ckptfmt.UsageError, match="is_fsdp_enabled"):
        trainer.train()


@pytest.mark.parametrize("stop", [3, 5], ids=["end of epoch", "middle of epoch"])
def test_the_callback_keeps_what_trainer_would_pickle(
    tmp_path: Path, build: Any, live: Any, same: Any, stop: int
) -> None:
    def trainer(folder: Path, **more: Any) -> Any:
        callback = hf.CkptfmtCallback(folder / "store")
        return build(
            folder, transformers.Trainer, callbacks=[callback], save_only_model=True, **more
        )

    straight = trainer(tmp_path / "a")
    straight.train()
    trainer(tmp_path / "b", stop=stop).train()
    resumed = trainer(tmp_path / "b", save_total_limit=1)
    resumed.train(resume_from_checkpoint=str(tmp_path / f"b/checkpoint-{stop}"))
    left, right = (
        live(each.model, each.optimizer, each.lr_scheduler) for each in (resumed, straight)
    )
    assert same(left, right)
    assert Store(tmp_path / "a/store").steps() == [4, 8, 9]
    stored = ckptfmt.load(tmp_path / "a/store")
    assert set(stored) == {"optimizer", "scheduler", "rng"}
    assert "transformer.wte.weight" in stored["optimizer"]["state"]
    assert Store(tmp_path / "b/store").steps() == [9]  # the others went with their folders
    assert set(native_files(tmp_path / "a/checkpoint-9")) == {
        "model.safetensors",
        "training_args.bin",
    }
    Store(tmp_path / "a/store").delete(4)
    again = trainer(tmp_path / "a")
    with pytest.raises(ckptfmt.NotFoundError):
        again.train(resume_from_checkpoint=str(tmp_path / "a/checkpoint-4"))


def test_a_run_killed_in_the_middle_of_a_save_resumes_exactly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def here(folder: Path) -> tuple[str, str]:
        monkeypatch.setattr(sys, "argv", [str(EXAMPLE), "--folder", str(folder)])
        runpy.run_path(str(EXAMPLE), run_name="__main__")
        output = capsys.readouterr().out
        found = re.search(r"resumed from (.*)\nweights after 24 steps: (\w+)", output)
        assert found is not None, output
        return Path(found[1]).name, found[2]

    program = f"""
import os, runpy, signal, sys
begun = set()
def audit(event, arguments):
    if event == "os.link" and "checkpoints" in str(arguments[1]):
        begun.add(arguments[1])
        if len(begun) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(audit)
sys.argv = [{str(EXAMPLE)!r}, "--folder", {str(tmp_path / "killed")!r}]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # as here
    died = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment
    )
    assert died.returncode == -9, died.stderr
    assert (tmp_path / "killed/checkpoint-15").exists()  # begun, and not committed
    begun, weights = here(tmp_path / "killed")
    assert begun == "checkpoint-10"
    assert weights == here(tmp_path / "straight")[1]


def in_two_processes(program: str) -> list[str]:
    """What each of two ranks prints."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            env={
                **os.environ,
                **shared,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "OMP_NUM_THREADS": "1",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    done = [rank.communicate(timeout=280) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], done
    return [output for output, _ in done]


@pytest.mark.slow
def test_two_processes_save_once_and_resume_exactly(tmp_path: Path) -> None:
    def program(folder: str, stop: int) -> str:
        return f"""
import sys
import transformers
sys.path.insert(0, {str(EXAMPLE.parent)!r})
import hf_trainer

class Stop(transformers.TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == {stop}:
            control.should_save = control.should_training_stop = True

own = hf_trainer.SafeTrainer.__init__
def with_stop(self, *args, **kwargs):
    own(self, *args, **kwargs)
    self.add_callback(Stop())
hf_trainer.SafeTrainer.__init__ = with_stop
sys.argv = ["hf_trainer.py", "--folder", {str(tmp_path / folder)!r}, "--steps", "12"]
hf_trainer.main()
"""

    def weights(outputs: list[str]) -> set[str]:
        return {re.findall(r"weights after 12 steps: (\w+)", output)[0] for output in outputs}

    straight = weights(in_two_processes(program("straight", 99)))
    assert len(straight) == 1  # DDP keeps the ranks equal
    in_two_processes(program("resumed", 7))
    again = in_two_processes(program("resumed", 99))
    assert all(f"resumed from {tmp_path / 'resumed/checkpoint-7'}" in each for each in again)
    assert weights(again) == straight
    stored = ckptfmt.load(tmp_path / "resumed/checkpoint-12", names="rng")["rng"]["ranks"]
    assert len(stored) == 2
