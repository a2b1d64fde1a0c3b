"""A callback for who keeps Transformers' `Trainer` as it is.

With `save_only_model=True` Trainer writes the model as safetensors and its own JSON, and this
callback the rest: optimizer, scheduler and generators, in one store for the run, not pickled.
"""

from __future__ import annotations

import os
from typing import Any

from transformers import TrainerCallback

from ckptfmt.engine import Store, api
from ckptfmt.torch.named import named
from ckptfmt.torch.rank_rng import RankGenerators
from ckptfmt.torch.rng import set_rng_state
from ckptfmt.types import StrPath


class CkptfmtCallback(TrainerCallback):  # type: ignore[misc]
    """Saves at each of Trainer's saves and restores when training resumes.

    The step is Trainer's `global_step`. A step whose `checkpoint-<step>` folder Trainer has rotated
    away goes from the store as well. On one process only; `TrainerMixin` knows ranks.

    Args:
        where: A store for the whole run.
    """

    def __init__(self, where: StrPath | Store) -> None:
        self._store = where if isinstance(where, Store) else Store(os.fspath(where))
        self._generators: Any = None
        self._middle = False

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After Trainer's own save."""
        tree = {**_tree(kwargs), "rng": RankGenerators(args.process_index, args.world_size)}
        api.save(tree, self._store, step=state.global_step, if_exists="replace")
        for step in self._store.steps():
            folder = os.path.join(args.output_dir, f"checkpoint-{step}")
            if step < state.global_step and not os.path.isdir(folder):
                self._store.delete(step)
        self._store.gc(grace_s=0)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Trainer has restored model and position, if it resumes; the rest is restored here."""
        if state.global_step == 0:
            return
        generators = RankGenerators(args.process_index, args.world_size)
        tree = {**_tree(kwargs), "rng": generators}
        api.restore(tree, self._store, step=state.global_step)
        self._generators = generators.mine()

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The iterator over the data is made next, which draws."""
        self._middle = state.epoch is not None and state.epoch % 1 != 0
        if self._generators is not None:
            set_rng_state(self._generators)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """In the middle of an epoch the uninterrupted run makes no iterator here."""
        if self._generators is not None and self._middle:
            set_rng_state(self._generators)
        self._generators = None


def _tree(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Of what Trainer hands to callbacks, all that its own save of a model leaves out."""
    optimizer, scheduler = kwargs["optimizer"], kwargs["lr_scheduler"]
    return {
        "optimizer": named(getattr(optimizer, "optimizer", optimizer), kwargs["model"]),
        "scheduler": getattr(scheduler, "scheduler", scheduler),
    }
