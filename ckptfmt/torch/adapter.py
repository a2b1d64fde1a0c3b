"""The torch adapter: what the engine asks about torch objects (`engine/adapter.py`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ckptfmt.engine import Captured, ObjectKind, Target, TensorSource
from ckptfmt.errors import UnsupportedError
from ckptfmt.torch import composites, loaders, modules, optimizers, rng, schedulers, tensors
from ckptfmt.torch.composite_targets import CompositeTarget, copied
from ckptfmt.torch.composites import kind_of
from ckptfmt.torch.dtensor import DTensorTarget, is_dtensor, sharded_source
from ckptfmt.torch.facts import COMPOSITE
from ckptfmt.torch.layers import layers_of
from ckptfmt.torch.named import NamedOptimizer
from ckptfmt.torch.optimizer_target import OptimizerTarget
from ckptfmt.torch.rng import RngState
from ckptfmt.torch.targets import TensorTarget

if TYPE_CHECKING:
    from numpy.typing import NDArray

_VALUES = (torch.Size, torch.dtype, torch.device)
_STATEFUL = (
    torch.nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.Generator,
    RngState, NamedOptimizer,
)  # fmt: skip


class TorchAdapter:
    """Tensors, modules, optimizers, schedulers, loaders, generators. Stateless."""

    def kind(self, obj: object) -> ObjectKind:
        if isinstance(obj, torch.Tensor):
            return "composite" if kind_of(obj) else "tensor"
        if isinstance(obj, _STATEFUL) or loaders.is_loader(obj):
            return "stateful"
        if isinstance(obj, _VALUES):
            return "value"
        return "unknown"

    def is_generator(self, obj: object) -> bool:
        return isinstance(obj, torch.Generator | RngState)

    def layers(self, obj: object) -> list[tuple[str, str, dict[str, float]]]:
        return layers_of(obj) if isinstance(obj, torch.nn.Module) else []

    def groups(
        self, obj: object, name: str, peers: Sequence[tuple[str, object]]
    ) -> list[dict[str, Any]]:
        own = isinstance(obj, torch.optim.Optimizer)
        return optimizers.groups_of(obj, name, peers) if own else []

    def keep_generators(self) -> Callable[[], None]:
        return rng.keep_generators()

    def source(self, obj: Any, name: str) -> TensorSource:
        if is_dtensor(obj):
            return sharded_source(obj, name)
        return tensors.source(obj, name)

    def capture(self, obj: Any, name: str, peers: Sequence[tuple[str, object]]) -> Captured:
        if isinstance(obj, torch.Tensor):
            return composites.capture(obj)
        if isinstance(obj, torch.nn.Module):
            return modules.capture(obj, name)
        if isinstance(obj, torch.optim.Optimizer):
            return optimizers.capture(obj, name, peers)
        if isinstance(obj, NamedOptimizer):
            return obj.capture(name)
        if isinstance(obj, torch.optim.lr_scheduler.LRScheduler):
            return schedulers.capture(obj, name)
        if loaders.is_loader(obj):
            return loaders.capture(obj)
        if isinstance(obj, torch.Generator):
            return rng.capture_generator(obj)
        return rng.capture(obj)

    def target(self, obj: Any, name: str, peers: Sequence[tuple[str, object]]) -> Target:
        if isinstance(obj, torch.Tensor) and kind_of(obj):
            return CompositeTarget(obj, name)
        if is_dtensor(obj):
            return DTensorTarget(obj, name)
        if isinstance(obj, torch.Tensor):
            tensors.check(obj, name, meta=True)
            return TensorTarget(obj, name)
        if isinstance(obj, torch.nn.Module):
            return modules.module_target(obj, name)
        if isinstance(obj, torch.optim.Optimizer):
            return OptimizerTarget(obj, name, peers)
        if isinstance(obj, NamedOptimizer):
            return obj.target(name)
        if isinstance(obj, torch.optim.lr_scheduler.LRScheduler):
            return schedulers.SchedulerTarget(obj, name)
        if loaders.is_loader(obj):
            return loaders.LoaderTarget(obj, name)
        if isinstance(obj, torch.Generator):
            return rng.GeneratorTarget(obj, name)
        return rng.RngTarget(obj, name)

    def pack_value(self, obj: Any) -> tuple[str, object]:
        if isinstance(obj, torch.Size):
            return "torch.Size", [int(n) for n in obj]
        if isinstance(obj, torch.dtype):
            return "torch.dtype", str(obj).removeprefix("torch.")
        return "torch.device", str(obj)

    def unpack_value(self, tag: str, payload: Any) -> object:
        if tag == "torch.Size":
            return torch.Size(payload)
        if tag == "torch.dtype" and isinstance(payload, str):
            dtype = getattr(torch, payload, None)
            if isinstance(dtype, torch.dtype):
                return dtype
        if tag == "torch.device" and isinstance(payload, str):
            try:
                return torch.device(payload)
            except RuntimeError:
                pass
        raise UnsupportedError(
            "this torch knows no such value",
            reason="torch-value",
            where=tag,
            found=repr(payload)[:80],
            do="load it with the torch release that saved it",
        )

    def tensor(self, array: NDArray[Any], attributes: Mapping[str, object]) -> object:
        return tensors.from_array(array, attributes)

    def compose(self, attributes: Mapping[str, object], name: str) -> Callable[[Any], Any] | None:
        if COMPOSITE not in attributes:
            return None
        return composites.joiner(attributes[COMPOSITE], name)

    def copy(self, obj: Any) -> object:
        return copied(obj)

    def make(self, like: Any, array: NDArray[Any]) -> object:
        return tensors.make_like(like, array)


ADAPTER = TorchAdapter()
