"""Lightning: checkpoints of a `Trainer` (or of Fabric) in ckptfmt stores, without pickle.

`CkptfmtIO` is a `CheckpointIO` plugin: each path that Lightning chooses (`epoch=3.ckpt`) becomes a
store of one checkpoint, `main`, whose step is Lightning's `global_step`. With `async_save=True` it
saves in the background, and a removal waits for the commits that came before it: at no moment is
there no durable checkpoint. `load_module` stands for `load_from_checkpoint`, which reads pickles
behind the plugin's back. `RandomState` makes a resumed run draw the numbers that the uninterrupted
one would have drawn. Spec: 08-protocol.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from ckptfmt.engine import Store
from ckptfmt.errors import MissingExtraError, UsageError
from ckptfmt.torch.in_flight import InFlight, OnCommit
from ckptfmt.torch.loading import load_state
from ckptfmt.torch.rank_rng import rng_of_all_ranks, rng_of_rank
from ckptfmt.torch.rng import set_rng_state
from ckptfmt.types import DigestName, StrPath

M = TypeVar("M")

RNG_KEY = "ckptfmt.rng"
_HOMES = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}
"""Two distributions of one code, whose classes are strangers to each other."""


def _packages() -> list[Any]:
    """The Lightning that this process has loaded, else all that are installed."""
    loaded = [home for home in _HOMES.values() if home in sys.modules]
    found = loaded or [home for top, home in _HOMES.items() if importlib.util.find_spec(top)]
    if not found:
        raise MissingExtraError(
            "Lightning is not installed",
            reason="missing",
            where="ckptfmt.torch.lightning",
            do='pip install "ckptfmt[lightning]"',
        )
    return [importlib.import_module(home) for home in found]


_found = _packages()
_IO: Any = types.new_class("_IO", tuple(p.plugins.io.CheckpointIO for p in _found))
_Callback: Any = types.new_class("_Callback", tuple(p.Callback for p in _found))


@dataclass(frozen=True, slots=True)
class _Dump:
    """What a trainer dumped, as the state of one object: which arrays are torch's is recorded."""

    tree: dict[str, Any]

    def state_dict(self) -> dict[str, Any]:
        return self.tree

    def load_state_dict(self, tree: dict[str, Any]) -> None:
        self.tree.update(tree)


class CkptfmtIO(_IO):  # type: ignore[misc]
    """A `CheckpointIO`: pass it as `Trainer(plugins=[CkptfmtIO()])`. Do not wrap it.

    Args:
        async_save: Return from a save once the state is staged and write in the background. Saves
            of one training step run side by side; the next step's wait for them. An error is raised
            by the next call of the trainer, at the latest when it tears down.
        on_commit: Called with the path and the info of each checkpoint once it is durable: in the
            background thread, if `async_save`. It must not call the plugin.
        codec, digest, durable: As in `ckptfmt.save`.
    """

    def __init__(
        self,
        *,
        async_save: bool = False,
        on_commit: OnCommit | None = None,
        codec: str | Mapping[str, str] = "raw",
        digest: DigestName = "xxh3-128",
        durable: bool = True,
    ) -> None:
        self._saves = InFlight(
            background=async_save,
            on_commit=on_commit,
            options={"codec": codec, "digest": digest, "durable": durable},
        )

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: StrPath, storage_options: Any = None
    ) -> None:
        """Save what a trainer dumped.

        Args:
            checkpoint: Tensors and plain values; also objects with `state_dict`.
            path: Becomes a store. One that is there already gets the next generation of its
                checkpoint, and loses the old one once the new one is durable.
            storage_options: Of `ckptfmt.Store`.
        Raises:
            UsageError: A value cannot be stored without pickle; the message names its key.
            Else as `ckptfmt.save`; in the background, what an earlier save raised.
        """
        self._saves.save(
            _Dump(checkpoint),
            os.fspath(path),
            checkpoint.get("global_step"),
            storage_options=storage_options,
        )

    def load_checkpoint(
        self, path: StrPath, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """The dict that was saved, its tensors on the CPU unless `map_location` names a device.

        Waits for saves in flight. `weights_only` makes no difference: no code is ever loaded.

        Raises:
            UsageError: `map_location` is a function or a mapping of devices, or Lightning itself
                wrote this file.
            NotFoundError: There is no whole checkpoint at this path.
        """
        if os.path.isfile(path):
            raise UsageError(
                "a file of Lightning's own",
                reason="lightning-file",
                where=os.fspath(path),
                do="save it once as a store: save_checkpoint(torch.load(path, weights_only=True), ...)",
            )
        self._saves.finish()
        loaded: dict[str, Any] = load_state(Store(os.fspath(path)), device=_device(map_location))
        return loaded

    def remove_checkpoint(self, path: StrPath) -> None:
        """Remove a checkpoint; in the background, once all saves that began before are durable."""
        self._saves.remove(os.fspath(path))

    def teardown(self) -> None:
        """Wait for saves in flight, and raise what went wrong with one."""
        self._saves.finish()


def latest(folder: StrPath) -> str | None:
    """The path of the newest whole checkpoint in a folder of `ModelCheckpoint`, for `ckpt_path=`.

    Args:
        folder: A local directory. Of each store in it the checkpoint `main` is looked at; what a
            killed save left behind is none.
    Returns:
        The one with the highest `global_step`; of several, the last by name. None: there is none.
    """
    found = []
    for entry in os.scandir(folder) if os.path.isdir(folder) else ():
        info = Store(entry.path, read_only=True).latest() if entry.is_dir() else None
        if info is not None:
            found.append((info.step or 0, entry.path))
    return max(found)[1] if found else None


def load_module(
    cls: type[M], path: StrPath, *, device: Any = None, strict: bool | None = None, **kwargs: Any
) -> M:
    """Make a `LightningModule` or `LightningDataModule` from a checkpoint that `CkptfmtIO` saved.

    What `cls.load_from_checkpoint` does, which goes around the plugin.

    Args:
        cls: Made from the hyperparameters in the checkpoint.
        path: Of the checkpoint.
        device: Where its tensors go; None: the CPU.
        strict: As in `load_from_checkpoint`; None: as the module says.
        kwargs: Arguments of `cls` beside the stored hyperparameters, or instead of them.
    Raises:
        NotFoundError: There is no whole checkpoint at this path.
        UsageError: `cls` is neither kind of class.
    """
    home = next(
        (p for p in _found if issubclass(cls, p.LightningModule | p.LightningDataModule)), None
    )
    if home is None:
        raise UsageError(
            "load_module makes LightningModules and LightningDataModules",
            reason="lightning-class",
            found=cls.__qualname__,
            do="for other modules: ckptfmt.torch.load(path, names='state_dict')",
        )
    checkpoint = load_state(Store(os.fspath(path)), device=device)
    # Not public, but older than 2.0; what it does must not differ from load_from_checkpoint.
    saving = importlib.import_module(f"{home.__name__}.core.saving")
    migration = importlib.import_module(f"{home.__name__}.utilities.migration.utils")
    checkpoint = migration._pl_migrate_checkpoint(checkpoint)
    key = cls.CHECKPOINT_HYPER_PARAMS_KEY  # type: ignore[attr-defined]
    checkpoint[key] = {**checkpoint.get(key, {}), **kwargs}
    extra = {} if issubclass(cls, home.LightningDataModule) else {"strict": strict}
    made = saving._load_state(cls, checkpoint, **extra, **kwargs)
    if device is not None and isinstance(made, torch.nn.Module):
        made = made.to(device)
    found: M = made
    return found


class RandomState(_Callback):  # type: ignore[misc]
    """A callback that keeps the random generators of every rank in the checkpoint.

    Lightning stores none, so a resumed run shuffles and drops out other things than it would have.
    Put back before the first batch is fetched; another number of ranks is a CkptWarning, and the
    generators stay as they are.
    """

    def __init__(self) -> None:
        self._state: Mapping[str, Any] | None = None

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint[RNG_KEY] = rng_of_all_ranks(trainer.world_size)

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        states = checkpoint.get(RNG_KEY, ())
        self._state = rng_of_rank(states, trainer.global_rank, trainer.world_size)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        # The iterator over the data is made next, which draws.
        if self._state is not None:
            set_rng_state(self._state)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        # In the middle of an epoch the uninterrupted run makes no iterator here.
        if self._state is not None and trainer.fit_loop.restarted_mid_epoch:
            set_rng_state(self._state)
        self._state = None


def _device(map_location: Any) -> Any:
    if map_location is None or isinstance(map_location, str | torch.device):
        return map_location
    raise UsageError(
        "map_location is a device here",
        reason="lightning-map-location",
        expected='"cpu", "cuda:0", torch.device(...) or None',
        found=type(map_location).__name__,
        do="load to the CPU and move what you need",
    )
