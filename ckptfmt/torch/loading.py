"""`ckptfmt.torch.load`: a checkpoint as a tree of torch tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from ckptfmt.engine import FRAMEWORK, Checkpoint, Matcher, Store, StoredLeaf, api
from ckptfmt.errors import UsageError
from ckptfmt.events import Progress
from ckptfmt.torch.adapter import ADAPTER
from ckptfmt.torch.composites import kind_of
from ckptfmt.torch.cuda import to_device
from ckptfmt.torch.dtypes import holds
from ckptfmt.torch.facts import COMPOSITE
from ckptfmt.torch.tensors import REQUIRES_GRAD, from_array
from ckptfmt.types import At, Mode, Select, StrPath

if TYPE_CHECKING:
    from numpy.typing import NDArray

Where: TypeAlias = "StrPath | Store"
Compose: TypeAlias = "Callable[[Mapping[str, object], str], Callable[[Any], Any] | None]"
Device: TypeAlias = "torch.device | str | int"


def load(
    path: Where | Checkpoint,
    *,
    device: Device | Mapping[str, Device] | None = None,
    dtype: torch.dtype | Mapping[str, torch.dtype] | None = None,
    mode: Mode = "auto",
    like: Any = None,
    step: int | None = None,
    at: At | None = None,
    names: Select | None = None,
    verify: bool = True,
    max_nbytes: int | None = None,
    progress: Progress = False,
) -> Any:
    """Load a checkpoint as a tree of torch tensors, on the CPU and in the stored dtypes by default.

    Names that were tied when saved are one tensor again. The process's default device and dtype
    take no part. Arrays of NumPy's own kinds (strings, dates) stay NumPy arrays.

    Args:
        path: As in `ckptfmt.load`, and so are the arguments not named here.
        device: Where the tensors go: one device, or {select: device}, first match wins.
        dtype: Convert floating-point tensors: one dtype, or {select: dtype}. Integers, complex
            numbers and the state of random generators are never converted.
        like: A tree whose tensors give classes and devices; excludes `device` and `dtype`.
    Returns:
        The tree, its tensors private to the caller.
    """
    if like is not None:
        if device is not None or dtype is not None:
            raise UsageError(
                "like= settles devices and dtypes",
                reason="torch-load",
                found="device= or dtype= beside it",
                do="leave them out, or make like= with those",
            )
        if isinstance(path, Checkpoint):
            if step is not None or at is not None:
                raise UsageError(
                    "step= and at= choose a checkpoint of a store",
                    reason="selector",
                    found="a Checkpoint, which is chosen already",
                    do="leave them out",
                )
            return path.load(
                names=names,
                like=like,
                mode=mode,
                verify=verify,
                max_nbytes=max_nbytes,
                progress=progress,
            )
        return api.load(
            path, mode=mode, like=like, step=step, at=at, names=names, verify=verify,
            max_nbytes=max_nbytes, progress=progress,
        )  # fmt: skip
    device_of, dtype_of = _choice(device), _choice(dtype)
    for chosen in dtype.values() if isinstance(dtype, Mapping) else (dtype,):
        _check_dtype(chosen)
    for place in device.values() if isinstance(device, Mapping) else (device,):
        _check_device(place)
    convert, compose = _converter(device_of, dtype_of)
    return api.load_as(
        convert, path, mode=mode, step=step, at=at, names=names, verify=verify,
        max_nbytes=max_nbytes, progress=progress, compose=compose,
        fused=device is not None or dtype is not None,
    )  # fmt: skip


def load_state(path: Where, *, device: Any = None) -> Any:
    """What an object gave as its state, which is the whole tree: its arrays stay NumPy arrays."""
    _check_device(device)
    with api.open(path) as checkpoint:
        # Without a mark anywhere no object gave it: a dict that was saved, or a converted file.
        mark = FRAMEWORK if FRAMEWORK in checkpoint.index.tree.leaf_attributes else ""
        convert, compose = _converter(_choice(device), _choice(None), mark)
        return api.load_as(convert, checkpoint, compose=compose)


def _converter(
    device_of: Callable[[str], Any], dtype_of: Callable[[str], Any], mark: str = ""
) -> tuple[Callable[[NDArray[Any], StoredLeaf], Any], Compose]:
    """`convert` and `compose` for `load_as`; leaves without the attribute `mark` stay arrays."""
    made: dict[tuple[Any, ...], Any] = {}

    def convert(array: NDArray[Any], leaf: StoredLeaf) -> Any:
        if not holds(array.dtype) or (mark and not leaf.part and mark not in leaf.attributes):
            return array
        if leaf.part:  # what becomes of it is its composite's affair
            where, kind = None, None
        else:
            where, kind = device_of(leaf.name), dtype_of(leaf.name)
        key = (leaf.tensor, where, kind)
        if key not in made:
            made[key] = _moved(from_array(array, leaf.attributes, leaf.name), where, kind, leaf)
        return made[key]

    def compose(attributes: Mapping[str, object], name: str) -> Callable[[Any], Any] | None:
        join = ADAPTER.compose(attributes, name)
        if join is None:
            return None
        leaf = StoredLeaf(name, attributes={REQUIRES_GRAD: _grad(attributes)})

        def composed(parts: Any) -> Any:
            where, kind = device_of(name), dtype_of(name)
            key = (where, kind, *_identity_of_parts(parts))
            if key not in made:
                made[key] = parts, _moved(join(parts).detach(), where, kind, leaf)
            return made[key][1]

        return composed

    return convert, compose


def _grad(attributes: Mapping[str, object]) -> bool:
    facts = attributes.get(COMPOSITE)
    return isinstance(facts, Mapping) and facts.get("requires_grad") is True


def _identity_of_parts(parts: Any) -> list[object]:
    """Equal for composites whose parts were tied: they become one tensor again."""
    if not isinstance(parts, dict):
        return [id(parts)]
    return [
        (key, id(item) if isinstance(item, torch.Tensor) else repr(item))
        for key, item in parts.items()
    ]


def _moved(tensor: Any, device: Any, dtype: Any, leaf: StoredLeaf) -> Any:
    """On the device and in the dtype asked for."""
    floating = tensor.is_floating_point()
    if dtype is not None and floating and tensor.dtype != dtype:
        tensor = _converted(tensor, dtype, leaf.name)
    if device is not None:
        tensor = tensor.to(device) if kind_of(tensor) else to_device(tensor, device)
    if leaf.attributes.get(REQUIRES_GRAD) and (floating or tensor.is_complex()):
        tensor.requires_grad_(True)
    return tensor


def _converted(tensor: Any, dtype: Any, name: str) -> Any:
    try:
        return tensor.to(dtype)
    except (RuntimeError, NotImplementedError) as error:
        raise UsageError(
            "torch does not convert this dtype",
            reason="torch-load",
            where=name,
            expected=str(dtype),
            found=str(tensor.dtype),
            do="give dtype= as a mapping {select: dtype} that leaves this leaf out",
        ) from error


def _choice(setting: Any) -> Callable[[str], Any]:
    """The device or dtype for a leaf's name."""
    if not isinstance(setting, Mapping):
        return lambda name: setting
    rules = [(Matcher(select), value) for select, value in setting.items()]
    return lambda name: next((value for matches, value in rules if matches(name)), None)


def _check_device(device: Any) -> None:
    """Before anything is read: is it a device, and is it there?"""
    if device is None:
        return
    try:
        torch.empty(0, device=device)
    except (RuntimeError, TypeError, AssertionError, ValueError) as error:
        raise UsageError(
            "device= is no device of this process",
            reason="torch-load",
            expected='"cpu", "cuda:0", torch.device(...), as this build of torch has them',
            found=f"{device!r}: " + (str(error).splitlines() or [type(error).__name__])[0][:160],
            do='choose another, or leave it out: "cpu"',
        ) from error


def _check_dtype(dtype: Any) -> None:
    if dtype is None:
        return
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise UsageError(
            "dtype= converts floating-point tensors to a floating dtype",
            reason="torch-load",
            expected="torch.bfloat16, torch.float32, ...",
            found=repr(dtype),
            do="convert other tensors after load",
        )
