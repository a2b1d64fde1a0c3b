"""torch tensors: to host arrays at save, from arrays at load, and overwritten in place at restore.

Bytes move as integers of the element's width, so that every pattern (NaN payloads, -0.0, types
without a copy kernel) arrives as it left.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ckptfmt.engine import Comparison, Staged, TensorSource
from ckptfmt.errors import UsageError
from ckptfmt.torch.cuda import CUDA, fill, is_far
from ckptfmt.torch.dtypes import ATTRIBUTE, CARRIED, X2, Carried, name_of, numpy_dtype, torch_dtype
from ckptfmt.torch.facts import COMPOSITE, cure_of, text_of_facts
from ckptfmt.torch.host_memory import BITS, host_array, lent, lies_plainly

if TYPE_CHECKING:
    from numpy.typing import NDArray

MEMORY_FORMAT = "torch.memory_format"
REQUIRES_GRAD = "torch.requires_grad"

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_FREED = (
    "a tensor whose storage was freed or is too small for it",
    "take it while it has its data (outside the sharding wrapper that frees it), or a clone",
)
_FORMATS = {
    "channels_last": (4, torch.channels_last),
    "channels_last_3d": (5, torch.channels_last_3d),
}


def check(tensor: Any, name: str, *, meta: bool = False) -> Carried:
    """Refuse what cannot be carried, by the leaf's name. `meta`: a meta tensor is welcome.

    Raises:
        UsageError: A subclass, layout or dtype that is not plain strided data.
    """
    found, do = _refusal(tensor, meta)
    if found:
        raise UsageError(
            "tensor cannot be carried", reason="torch-tensor", where=name, found=found, do=do
        )
    return CARRIED[tensor.dtype]


def _refusal(tensor: Any, meta: bool) -> tuple[str, str]:
    cls = type(tensor)
    if isinstance(tensor, torch.nn.parameter.UninitializedTensorMixin):
        return "an uninitialized (lazy) tensor", "run one forward pass first"
    if cls.__name__ == "DTensor" and cls.__module__.startswith("torch."):
        return (
            "a DTensor, of which this process holds a part, within another object",
            "give it a leaf of its own, or gather it first: tensor.full_tensor()",
        )
    if cls not in _PLAIN and not _is_plain_buffer(cls):
        return (
            f"the tensor subclass {cls.__module__}.{cls.__qualname__}",
            "take its plain parts, or tensor.as_subclass(torch.Tensor), into the tree"
            + ("" if not hasattr(cls, "__tensor_flatten__") else "; or register_tensor_class(it)"),
        )
    if tensor.layout is not torch.strided or tensor.is_nested:
        return f"a tensor of the layout {tensor.layout}", "take tensor.to_dense() into the tree"
    if tensor.is_meta and not meta:
        return "a meta tensor, which has no data", "materialize it first: module.to_empty(...)"
    if not tensor.is_meta and lacks_memory(tensor):
        return _FREED
    if tensor.dtype not in CARRIED:
        return f"dtype {tensor.dtype}", "convert it to a dtype with plain elements"
    if CARRIED[tensor.dtype].name == X2 and tensor.dim() == 0:
        return f"a 0-d tensor of {tensor.dtype}", "give it a dimension: tensor.reshape(1)"
    return "", ""


def refuse_freed(tensor: Any, name: str) -> None:
    """
    Raises:
        UsageError: It has not the memory that its elements would lie in.
    """
    if lacks_memory(tensor):
        found, do = _FREED
        raise UsageError(
            "tensor cannot be carried", reason="torch-tensor", where=name, found=found, do=do
        )


def lacks_memory(tensor: Any) -> bool:
    """`UntypedStorage.resize_` shrinks a storage under its tensors; a zero tensor of forward-mode
    differentiation has none."""
    if not tensor.numel():
        return False
    if tensor._is_zerotensor():
        return True
    if tensor.is_contiguous():
        last = tensor.numel() - 1
    else:
        last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    needed = (tensor.storage_offset() + last + 1) * tensor.element_size()
    return bool(tensor.untyped_storage().nbytes() < needed)


def _is_plain_buffer(cls: type) -> bool:
    # nn.Buffer makes plain tensors, but is a class of its own in some releases.
    return cls is getattr(torch.nn, "Buffer", None)


def stored_shape(tensor: Any) -> tuple[int, ...]:
    """The shape in the format's elements: twice the last axis for `float4_e2m1fn_x2`."""
    shape = tuple(int(n) for n in tensor.shape)
    if CARRIED[tensor.dtype].name == X2 and shape:
        return (*shape[:-1], 2 * shape[-1])
    return shape


def source(tensor: Any, name: str) -> TensorSource:
    """A tensor leaf at save. Nothing is copied before `fetch`."""
    carried = check(tensor, name)
    attributes: dict[str, object] = dict(carried.attributes)
    memory_format = memory_format_of(tensor)
    if memory_format:
        attributes[MEMORY_FORMAT] = memory_format
    if tensor.requires_grad and not isinstance(tensor, torch.nn.Parameter):
        attributes[REQUIRES_GRAD] = True
    # A narrow type's spare bits are looked at on the host.
    far = is_far(tensor) and not carried.narrow
    return TensorSource(
        dtype=carried.stored,
        shape=stored_shape(tensor),
        fetch=lambda: to_array(tensor, name),
        identity=identity_of(tensor),
        attributes=attributes,
        keep=tensor,
        device=CUDA if far else None,
        copy_async=partial(CUDA.copy_async, tensor.device.index, partial(flat, tensor))
        if far
        else None,
    )


def identity_of(tensor: Any) -> Hashable | None:
    """Equal for two tensors that are one: same memory, offset, shape, strides, dtype, device."""
    if tensor.numel() == 0:
        return None
    if tensor.is_meta:
        return ("torch.meta", id(tensor))
    return (
        "torch",
        tensor.device,
        tensor.data_ptr(),
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
        tensor.is_conj(),
        tensor.is_neg(),
    )


def memory_format_of(tensor: Any) -> str:
    """`channels_last`, `channels_last_3d`, or "" where the values lie in C order or in none."""
    if tensor.is_contiguous():
        return ""
    for name, (ndim, memory_format) in _FORMATS.items():
        if tensor.dim() == ndim and tensor.is_contiguous(memory_format=memory_format):
            return name
    return ""


def memory_format_named(name: object) -> Any:
    """torch's memory format, or None for what is no name of one."""
    return _FORMATS[str(name)][1] if str(name) in _FORMATS else None


def bits(tensor: Any) -> Any:
    """The same memory as integers, strides kept; as it is where torch has no such view of it."""
    tensor = tensor.detach()
    lazy = tensor.is_conj() or tensor.is_neg()
    width = None if lazy else BITS.get(tensor.element_size())
    return tensor if width is None else tensor.view(width)


def flat(tensor: Any) -> Any:
    """The values in C order as one row of bytes, where they are; a view where it can be."""
    plain = bits(tensor.detach().resolve_conj().resolve_neg())
    return plain.contiguous().reshape(-1).view(torch.uint8)


def plain_array(tensor: Any) -> NDArray[Any] | None:
    """The array over a tensor that a `TensorSource` would say nothing else about; None for others,
    and for what `check` refuses."""
    plain = (
        type(tensor) in _PLAIN
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and lies_plainly(tensor)
        and not CARRIED[tensor.dtype].attributes
        and not lacks_memory(tensor)
    )
    return lent(tensor) if plain else None


def to_array(tensor: Any, name: str = "") -> NDArray[Any]:
    """The values as a C-contiguous host array; a view of the tensor's memory where it can be.

    Raises:
        UsageError: A narrow integer type holds a byte outside its range.
    """
    if lies_plainly(tensor):
        return lent(tensor)
    carried = CARRIED[tensor.dtype]
    plain = tensor.detach().resolve_conj().resolve_neg()
    raw = host_array(bits(plain).cpu().contiguous())
    dtype = numpy_dtype(carried.stored)
    if carried.narrow:
        return _narrow(raw, dtype, carried.name, name)
    if carried.name == X2:
        return _unpack_pairs(raw, dtype)
    return raw.view(dtype)


def _narrow(raw: NDArray[Any], dtype: np.dtype[Any], torch_name: str, name: str) -> NDArray[Any]:
    whole = raw.view(np.uint8 if torch_name.startswith("u") else np.int8)
    narrow = whole.astype(dtype)
    # torch does not say what the spare bits of its bytes mean; only what comes back is carried.
    if not np.array_equal(narrow.astype(whole.dtype), whole):
        raise UsageError(
            "tensor holds bytes outside its dtype's range",
            reason="torch-narrow-range",
            where=name,
            expected=f"values of {torch_name}",
            found="spare bits in use",
            do="view it as torch.uint8 if the bytes are packed data",
        )
    return narrow


def _unpack_pairs(raw: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    low, high = raw & 0x0F, raw >> 4
    pairs = np.stack([low, high], axis=-1).reshape(*raw.shape[:-1], 2 * raw.shape[-1])
    return pairs.view(dtype)


def from_array(
    array: NDArray[Any], attributes: Mapping[str, object] | None = None, name: str = ""
) -> Any:
    """A CPU tensor over the array's memory where torch can hold it as it lies.

    Whatever the default device or dtype is, the tensor is on the CPU and has the stored dtype.

    Raises:
        UnsupportedError: torch has no such dtype.
        UsageError: An odd last axis of 4-bit floats: torch holds them in pairs.
    """
    attributes = attributes or {}
    dtype = torch_dtype(name_of(array.dtype), attributes)
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if not (array.flags.c_contiguous and array.flags.writeable):
        array = array.copy(order="C")
    tensor = torch.from_numpy(_as_bits(array, CARRIED[dtype], name))
    if tensor.dtype != dtype:
        tensor = tensor.view(dtype)
    memory_format = _FORMATS.get(str(attributes.get(MEMORY_FORMAT)))
    if memory_format and tensor.dim() == memory_format[0]:
        tensor = bits(tensor).contiguous(memory_format=memory_format[1]).view(dtype)
    return tensor


def _as_bits(array: NDArray[Any], carried: Carried, name: str) -> NDArray[Any]:
    if carried.narrow:
        return array.astype(np.uint8 if carried.name.startswith("u") else np.int8).view(np.uint8)
    if carried.name == X2:
        if array.ndim == 0 or array.shape[-1] % 2:
            raise UsageError(
                "4-bit floats come in pairs in torch",
                reason="torch-float4-odd",
                where=name,
                expected="an even last axis",
                found=f"shape {array.shape}",
                do="load it with ckptfmt.load, which returns NumPy arrays",
            )
        raw = array.view(np.uint8) & 0x0F
        return np.ascontiguousarray(raw[..., 0::2] | (raw[..., 1::2] << 4))
    if array.itemsize in BITS and array.dtype != np.bool_:
        return array.view(f"i{array.itemsize}" if array.itemsize > 1 else np.uint8)
    return array


def make_like(like: Any, array: NDArray[Any]) -> Any:
    """A new tensor of `like`'s class, device and memory format with the array's values and dtype."""
    carried = check(like, "like", meta=True)
    own = carried.attributes if numpy_dtype(carried.stored) == array.dtype else None
    memory_format = memory_format_of(like) if like.dim() == array.ndim else ""
    attributes = {**(own or {}), MEMORY_FORMAT: memory_format}
    made = from_array(array, attributes).to("cpu" if like.is_meta else like.device)
    grad = like.requires_grad and (made.is_floating_point() or made.is_complex())
    if isinstance(like, torch.nn.Parameter):
        return torch.nn.Parameter(made, requires_grad=grad)
    return made.requires_grad_(True) if grad else made


def writing(tensor: Any) -> AbstractContextManager[Any]:
    """What an in-place write to this tensor needs around it."""
    context: AbstractContextManager[Any] = (
        torch.inference_mode() if tensor.is_inference() else torch.no_grad()
    )
    return context


def host_copy(tensor: Any) -> Any:
    """A copy of a tensor's memory on the host (the device may be full), as `bits` has it."""
    raw = bits(tensor)
    return raw.clone() if tensor.device.type == "cpu" else raw.cpu()


_ADOPTED_NBYTES_MIN = 64 << 10
"""What is smaller is copied: torch cannot resize memory that it is lent, as observers resize their
buffers, and a small tensor would keep the whole buffer that it was read in."""


class Overwrite:
    """Gives a tensor new values and, if asked, its old ones back, bit for bit.

    The object, its storage, device, strides and requires_grad stay. A meta tensor becomes real: the
    object stays, its inside is exchanged. A tensor whose elements overlap (expanded) cannot be
    written in place: it gets a storage of its own.
    """

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor
        self._undo: Callable[[], None] | None = None

    def apply(self, value: Any, *, keep: bool = True) -> None:
        """`value` has the tensor's shape; another dtype is converted by value.

        A large meta tensor takes the value's own memory, if the elements lie there as it wants them.

        Args:
            keep: Keep the old values for `undo`: as much host memory again.
        """
        tensor = self.tensor
        if value.dtype != tensor.dtype:
            value = value.to(tensor.dtype)
        if tensor.is_meta:
            self._materialize(value)
        elif torch._debug_has_internal_overlap(tensor) == 1:
            old = tensor.data
            self._undo = lambda: setattr(tensor, "data", old)
            tensor.data = value.to(tensor.device, copy=True)
        else:
            if keep:
                old = host_copy(tensor)
                self._undo = lambda: _copy(tensor, old.view(tensor.dtype))
            _copy(tensor, value)

    def follow(self, first: Any) -> None:
        """The tensor is one with `first`, which has its value: where that got another storage, so
        does this one."""
        tensor = self.tensor
        if tensor is not first and tensor.data_ptr() != first.data_ptr():
            old = tensor.data
            self._undo = lambda: setattr(tensor, "data", old)
            tensor.data = first.data

    def _materialize(self, value: Any) -> None:
        meta = self.tensor
        fresh = value.detach()
        if fresh.stride() != meta.stride() or fresh.nbytes < _ADOPTED_NBYTES_MIN:
            like = bits(meta)
            fresh = torch.empty_strided(like.size(), like.stride(), dtype=like.dtype, device="cpu")
            fresh.copy_(bits(value))
            fresh = fresh.view(meta.dtype)
        if isinstance(meta, torch.nn.Parameter):
            fresh = torch.nn.Parameter(fresh, requires_grad=meta.requires_grad)
        elif meta.requires_grad:
            fresh.requires_grad_(True)
        fresh.__dict__.update(meta.__dict__)
        try:
            torch.utils.swap_tensors(meta, fresh)
        except RuntimeError as error:
            raise UsageError(
                "a meta tensor cannot become real in place",
                reason="torch-meta-held",
                found=str(error),
                do="restore before the model is compiled or used, or call to_empty() first",
            ) from error
        self._undo = lambda: torch.utils.swap_tensors(meta, fresh)

    def undo(self) -> None:
        if self._undo is not None:
            self._undo()
            self._undo = None


def _copy(tensor: Any, value: Any) -> None:
    with writing(tensor):
        if tensor.is_conj() or tensor.is_neg():
            tensor.detach().copy_(value)
        else:
            fill(bits(tensor), bits(value))


def ask(
    comparison: Comparison,
    name: str,
    tensor: Any,
    stored: Mapping[str, Any],
    *,
    source: str | None = None,
    rule: str = "",
) -> bool:
    """Ask for the values of a tensor of the target; True if they are there and fit."""
    carried = check(tensor, name, meta=True)
    leaf = stored.get(source or name)
    facts = comparison.attributes(source or name).get(COMPOSITE) if leaf is None else None
    if facts is not None:
        found = text_of_facts(facts) + cure_of(facts)
        comparison.mismatch(name, f"tensor {carried.stored} {list(stored_shape(tensor))}", found)
        comparison.take(source or name)
        return False
    own = leaf.attributes.get(ATTRIBUTE) if leaf is not None else None
    expected = carried.attributes.get(ATTRIBUTE)
    if leaf is not None and leaf.dtype and own != expected:
        # Not "dtype": no cast settles it.
        comparison.mismatch(
            name, f"dtype {expected or carried.stored}", f"dtype {own or leaf.dtype}"
        )
        return False
    return comparison.tensor(name, carried.stored, stored_shape(tensor), source=source, rule=rule)


def _dtype_only(attributes: Mapping[str, object]) -> dict[str, object]:
    # The target keeps its own memory format: no detour through the stored one.
    return {k: v for k, v in attributes.items() if k == ATTRIBUTE}


def staged_tensor(
    staged: Staged, name: str, attributes: Mapping[str, object], tensor: Any = None
) -> Any:
    """The staged values of one asked name as a CPU tensor in C order.

    A meta `tensor` will keep them, so that the state is in memory once; others copy.
    """
    array = staged.own(name) if tensor is not None and tensor.is_meta else staged[name]
    return from_array(array, _dtype_only(attributes), name)
