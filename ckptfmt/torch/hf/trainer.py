"""Transformers' `Trainer`: its checkpoints in ckptfmt stores, nothing of them pickled.

Each `checkpoint-<step>` folder becomes a store of one checkpoint, `main`; beside it lies Trainer's
own `trainer_state.json`, which Trainer reads before it asks anybody. Spec: 08-protocol.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from pathlib import Path
from typing import Any, TypeVar

from transformers.trainer_callback import ExportableState

from ckptfmt.engine import Store, api
from ckptfmt.errors import NotFoundError, UsageError, warn
from ckptfmt.torch.in_flight import InFlight
from ckptfmt.torch.named import named
from ckptfmt.torch.rank_rng import RankGenerators, rng_of_rank
from ckptfmt.torch.rng import set_rng_state
from ckptfmt.types import StrPath

M = TypeVar("M")

STATE_FILE = "trainer_state.json"
_FOLDER = re.compile(r"checkpoint-(\d+)")


class TrainerMixin:
    """Put before `Trainer`: `class MyTrainer(TrainerMixin, Trainer)`; all else stays as it is.

    Saves model, optimizer, scheduler, scaler, the generators of every rank and Trainer's own state,
    callbacks' included. `train(resume_from_checkpoint=True)` takes the newest whole checkpoint, and
    a path that Trainer itself wrote is resumed as Trainer does. `save_model()` still writes what
    `from_pretrained` reads.

    Attributes:
        background_saves: Write in the background; training goes on once the state is staged. An
            error is raised by the next save, or when training ends. Set it on the class.
    """

    background_saves = False
    _saves_in_flight: InFlight | None = None

    @property
    def _saves(self) -> InFlight:
        if self._saves_in_flight is None:
            self._saves_in_flight = InFlight(background=self.background_saves, options={})
        return self._saves_in_flight

    def train(
        self: Any, resume_from_checkpoint: StrPath | bool | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """`Trainer.train`; when it returns, every checkpoint is durable.

        Raises:
            NotFoundError: `True`, and there is no whole checkpoint in `args.output_dir`.
            UsageError: FSDP, DeepSpeed and the like, or `push_to_hub` of checkpoints.
        """
        self._refuse_other_ways()
        if resume_from_checkpoint is True:
            folder = self.args.output_dir
            resume_from_checkpoint = latest(folder)
            if resume_from_checkpoint is None:
                raise NotFoundError(
                    "there is no whole checkpoint to resume from",
                    reason="checkpoint",
                    where=os.fspath(folder),
                    do="leave resume_from_checkpoint out for a new run",
                )
        try:
            done = super().train(resume_from_checkpoint, *args, **kwargs)  # type: ignore[misc]
        except BaseException:
            self._saves.drain()  # its error, if any, is told by the next call
            raise
        self._durable_on_all_ranks()
        return done

    def _durable_on_all_ranks(self: Any) -> None:
        """What rank 0 writes in the background is there, also for ranks that go on to read it."""
        self._saves.finish()
        self.accelerator.wait_for_everyone()

    def _refuse_other_ways(self: Any) -> None:
        found = [
            name
            for name in ("is_deepspeed_enabled", "is_fsdp_enabled", "is_fsdp_xla_enabled")
            if getattr(self, name, False)
        ]
        found += ["push_to_hub"] if self.args.push_to_hub else []
        if found:
            raise UsageError(
                "this Trainer saves in a way that stores of one rank cannot take",
                reason="trainer-backend",
                found=", ".join(found),
                do="use Trainer without the mixin, or ckptfmt.torch.dcp; push with save_model()",
            )

    def _save_checkpoint(self: Any, model: Any, trial: Any) -> None:
        """In the place of Trainer's: the same contents, one commit."""
        if self.hp_search_backend is None and trial is None:
            self.store_flos()
        folder = self._get_output_dir(trial=trial)
        path = os.path.join(folder, f"checkpoint-{self.state.global_step}")
        if self.state.best_global_step:
            best = os.path.join(folder, f"checkpoint-{self.state.best_global_step}")
            if best == path or os.path.isdir(best):
                self.state.best_model_checkpoint = best
        generators = RankGenerators(self.args.process_index, self.args.world_size)
        if not self.args.should_save:
            return
        self._export_callbacks()
        state = json.loads(json.dumps(dataclasses.asdict(self.state)))
        tree: dict[str, Any] = {"model": self.model, "trainer": state}
        if hasattr(self.model, "config"):
            tree["config"] = self.model.config.to_json_string(use_diff=False)
        if not self.args.save_only_model:
            tree |= {**self._training_state(), "rng": generators}
        os.makedirs(path, exist_ok=True)
        # Before the commit, so that a whole checkpoint has it; a copy without it makes it again.
        self.state.save_to_json(os.path.join(path, STATE_FILE))
        self._saves.save(tree, path, self.state.global_step)
        for old in self._too_many(folder, path):
            self._saves.remove(old)

    def _export_callbacks(self: Any) -> None:
        """What callbacks and `control` hand to Trainer's state, as Trainer asks for it."""
        exported: dict[str, Any] = {}
        for callback in [*self.callback_handler.callbacks, self.control]:
            if isinstance(callback, ExportableState):
                name = type(callback).__name__
                exported.setdefault(name, []).append(callback.state())
        for name, states in exported.items():
            many = isinstance(self.state.stateful_callbacks.get(name), list) or len(states) > 1
            self.state.stateful_callbacks[name] = states if many else states[0]

    def _training_state(self: Any) -> dict[str, Any]:
        """Optimizer, scheduler and scaler themselves: a wrapper hides whose parameters it has."""
        tree = {
            "optimizer": named(getattr(self.optimizer, "optimizer", self.optimizer), self.model),
            "scheduler": getattr(self.lr_scheduler, "scheduler", self.lr_scheduler),
        }
        if self.accelerator.scaler is not None:
            tree["scaler"] = self.accelerator.scaler
        return tree

    def _too_many(self: Any, folder: str, newest: str) -> list[str]:
        """Checkpoints over `save_total_limit`, oldest first; never the best one."""
        limit = self.args.save_total_limit
        if limit is None or limit <= 0:
            return []
        kept = {newest, self.state.best_model_checkpoint}
        others = [path for path in _folders(folder) if path not in kept]
        return others[: max(0, len(others) + len({*kept} - {None}) - limit)]

    def _load_from_checkpoint(self: Any, resume_from_checkpoint: str, model: Any = None) -> None:
        if not _is_ours(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]
            return
        self._saves.finish()
        store = Store(resume_from_checkpoint)
        target = {"model": self.model if model is None else model}
        api.restore(target, store, names="model")
        state_file = Path(resume_from_checkpoint, STATE_FILE)
        state = api.load(store, names="trainer")["trainer"]
        if not state_file.exists() or json.loads(state_file.read_text("utf-8")) != state:
            state_file.write_text(json.dumps(state, indent=2, sort_keys=True) + "\n", "utf-8")

    def _load_best_model(self: Any) -> None:
        self._durable_on_all_ranks()
        best = self.state.best_model_checkpoint
        if not _is_ours(best):
            super()._load_best_model()  # type: ignore[misc]
            return
        api.restore({"model": self.model}, Store(best), names="model")

    def _load_optimizer_and_scheduler(self: Any, checkpoint: str | None) -> None:
        if checkpoint is None or not _is_ours(checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
            return
        with api.open(Store(checkpoint)) as stored:
            has = {name.partition("/")[0] for name in stored.names()}
        if "optimizer" not in has:
            warn(f"{checkpoint} was saved with save_only_model: optimizer and scheduler start anew")
            return
        state = self._training_state()
        api.restore(state, Store(checkpoint), names=list(state))

    def _load_scaler(self: Any, checkpoint: str | None) -> None:
        if checkpoint is None or not _is_ours(checkpoint):
            super()._load_scaler(checkpoint)  # type: ignore[misc]

    def _load_rng_state(self: Any, checkpoint: str | None) -> None:
        if checkpoint is None or not _is_ours(checkpoint):
            super()._load_rng_state(checkpoint)  # type: ignore[misc]
            return
        with api.open(Store(checkpoint)) as stored:
            if not stored.names("rng"):
                return
        states = api.load(Store(checkpoint), names="rng")["rng"]["ranks"]
        mine = rng_of_rank(states, self.args.process_index, self.args.world_size)
        if mine is not None:
            set_rng_state(mine)


def latest(folder: StrPath) -> str | None:
    """The newest `checkpoint-<step>` in a Trainer's output folder that is whole; None: there is none.

    Args:
        folder: A local directory. What a killed save left behind is passed over.
    """
    for path in reversed(_folders(folder)):
        if _is_ours(path) and Store(path, read_only=True).latest() is not None:
            return path
    return None


def load_model(cls: type[M], path: StrPath, *, strict: bool = True) -> M:
    """Make a Transformers model from a checkpoint of `TrainerMixin`: config and weights.

    Args:
        cls: A `PreTrainedModel` class, as for `from_pretrained`; not an `Auto...` class.
        path: Of a `checkpoint-<step>` folder.
        strict: False: names that only one side has are left out.
    Raises:
        NotFoundError: There is no checkpoint, or it was not saved from such a model.
        MismatchError: The class has other parameters than the stored model.
    """
    store = Store(os.fspath(path))
    config = json.loads(api.load(store, names="config")["config"])
    kind: Any = cls
    model = kind(kind.config_class.from_dict(config))
    api.restore({"model": model}, store, names="model", strict=strict)
    model.train(False)
    made: M = model
    return made


def _is_ours(path: StrPath | None) -> bool:
    return path is not None and os.path.isfile(os.path.join(path, "ckptfmt.json"))


def _folders(folder: StrPath) -> list[str]:
    """`checkpoint-<step>` folders, by step."""
    found = []
    for entry in os.scandir(folder) if os.path.isdir(folder) else ():
        match = _FOLDER.fullmatch(entry.name)
        if match is not None and entry.is_dir():
            found.append((int(match[1]), entry.path))
    return [path for _, path in sorted(found)]
