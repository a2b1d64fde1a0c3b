"""Accelerate: all that an `Accelerator` has prepared and registered, as one tree.

`accelerator.save_state` pickles optimizers, schedulers, samplers, random generators and custom
objects, also where hooks take the models from it. Spec: 08-protocol.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptfmt.engine import Store, api
from ckptfmt.errors import UsageError
from ckptfmt.reports import RestoreReport
from ckptfmt.torch.rank_rng import RankGenerators
from ckptfmt.torch.rng import set_rng_state
from ckptfmt.types import CheckpointInfo, Plain, StrPath

_OWN_WAYS = ("FSDP", "DEEPSPEED", "MEGATRON_LM", "XLA", "TP")
_NOTHING: Mapping[str, Any] = {}


class _Loader:
    """Where a prepared dataloader stands: its pass, its sampler's seed, a stateful one's position."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def _parts(self) -> tuple[Any, Any]:
        """(sampler, its generator), either None."""
        sampler = self._loader.get_sampler() if hasattr(self._loader, "get_sampler") else None
        return sampler, getattr(sampler, "generator", None)

    def state_dict(self) -> dict[str, Any]:
        sampler, generator = self._parts()
        state: dict[str, Any] = {"iteration": getattr(self._loader, "iteration", 0)}
        if hasattr(sampler, "initial_seed"):
            state["initial_seed"] = sampler.initial_seed
        if generator is not None:
            state["generator"] = generator.get_state()
        if getattr(self._loader, "use_stateful_dataloader", False):
            state["position"] = self._loader.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        sampler, generator = self._parts()
        if hasattr(sampler, "initial_seed") and "initial_seed" in state:
            sampler.initial_seed = state["initial_seed"]
        if generator is not None and "generator" in state:
            generator.set_state(state["generator"])
        if "position" in state:
            self._loader.load_state_dict(state["position"])
        if hasattr(self._loader, "set_epoch"):
            self._loader.set_epoch(state["iteration"])


class _Counter:
    """`accelerator.step`: where in an accumulation of gradients it stands."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._accelerator.step, "iteration": self._accelerator.save_iteration}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._accelerator.step = state["step"]
        self._accelerator.project_configuration.iteration = state["iteration"]


def accelerator_state(accelerator: Any) -> dict[str, Any]:
    """The tree of an `Accelerator`, for `ckptfmt.torch.save`, `save_async` and parts of it.

    Every rank calls it (the generators of all are gathered); one rank saves.

    Returns:
        models, optimizers, schedulers, dataloaders and custom: what was prepared or registered,
        under its number, "0" on; scaler, if there is one; counter; and rng.
    Raises:
        UsageError: FSDP, DeepSpeed, Megatron-LM or XLA own the state.
    """
    kind = str(getattr(accelerator.distributed_type, "name", accelerator.distributed_type))
    if kind in _OWN_WAYS:
        raise UsageError(
            "this kind of training keeps its state in parts on all ranks",
            reason="accelerate-distributed",
            found=kind,
            do="save with ckptfmt.torch.dcp",
        )
    tree: dict[str, Any] = {
        "models": _numbered(accelerator._models),
        # The optimizers and schedulers themselves: wrappers hide whose parameters they have.
        "optimizers": _numbered(getattr(o, "optimizer", o) for o in accelerator._optimizers),
        "schedulers": _numbered(getattr(s, "scheduler", s) for s in accelerator._schedulers),
        "dataloaders": _numbered(_Loader(loader) for loader in accelerator._dataloaders),
        "custom": _numbered(accelerator._custom_objects),
        "counter": _Counter(accelerator),
        "rng": RankGenerators(accelerator.process_index, accelerator.num_processes),
    }
    if accelerator.scaler is not None:
        tree["scaler"] = accelerator.scaler
    return {key: item for key, item in tree.items() if item != {}}


def save_state(
    accelerator: Any,
    where: StrPath | Store,
    *,
    step: int | None = None,
    metadata: Mapping[str, Plain] = _NOTHING,
    metrics: Mapping[str, float] = _NOTHING,
) -> CheckpointInfo | None:
    """Save all that an `Accelerator` knows; every rank calls, the main one writes.

    Args:
        accelerator: After `prepare` and `register_for_checkpointing`.
        where: A store; steps share its data, so what did not change is not written again.
        step: How many steps are finished; None: `main`.
        metadata, metrics: As in `ckptfmt.save`.
    Returns:
        None on the other ranks.
    Raises:
        UsageError: A state cannot be stored without pickle, or lies in parts on all ranks.
        Else as `ckptfmt.save`.
    """
    tree = accelerator_state(accelerator)
    info = None
    try:
        if accelerator.is_main_process:
            info = api.save(tree, where, step=step, metadata=metadata, metrics=metrics)
    finally:
        accelerator.wait_for_everyone()  # nobody goes on to load what is not there yet
    return info


def load_state(
    accelerator: Any, where: StrPath | Store, *, step: int | None = None, strict: bool = True
) -> RestoreReport:
    """Restore what `save_state` saved into an `Accelerator` that has prepared the same objects.

    Every rank calls. To go on in the middle of an epoch, shuffle with `use_seedable_sampler` (of
    Accelerate's `DataLoaderConfiguration`), call `set_epoch`, and either skip with
    `accelerate.skip_first_batches` or have `use_stateful_dataloader`, which keeps the position.

    Raises:
        MismatchError: Other models, optimizers or numbers of them; nothing was touched.
        NotFoundError: There is no such checkpoint.
    """
    tree = accelerator_state(accelerator)
    report = api.restore(tree, where, step=step, strict=strict)
    generators = tree["rng"].mine()
    if generators is not None:
        set_rng_state(generators)  # last: what was restored before it may have drawn
    return report


def use_hooks(accelerator: Any) -> tuple[Any, Any]:
    """Let `accelerator.save_state` and `load_state` keep the models in a store of their folder.

    The rest (optimizers, schedulers, generators) stays Accelerate's, and pickled: `save_state` of
    this module keeps all of it.

    Returns:
        The handles of the two hooks; `handle.remove()` takes one away.
    """

    def save(models: list[Any], weights: list[Any], folder: str) -> None:
        if accelerator.is_main_process:
            api.save({"models": _numbered(models)}, Store(folder))
        weights.clear()

    def load(models: list[Any], folder: str) -> None:
        api.restore({"models": _numbered(models)}, Store(folder))
        models.clear()

    return (
        accelerator.register_save_state_pre_hook(save),
        accelerator.register_load_state_pre_hook(load),
    )


def _numbered(objects: Any) -> dict[str, Any]:
    return {str(number): obj for number, obj in enumerate(objects)}
