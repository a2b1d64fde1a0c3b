"""What an adapter is: it knows its framework and nothing about bytes on disk.

The engine walks a tree and asks the adapter of an object's framework (ADAPTERS in `engine/tree`,
by the root modules of the type's MRO) what the object is. At save an adapter turns a framework
tensor into a `TensorSource` and a stateful object (module, optimizer) into a plain tree. At restore
it makes a `Target` per object, which says what it expects and later takes the staged arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


ObjectKind = Literal["tensor", "composite", "stateful", "value", "unknown"]
"""composite: a tensor that is stored as a container of its parts."""
MatchBy = Literal["name", "position"]

Box: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
"""Origin and extent, per axis, in elements."""

SPARE = "ckptfmt.spare"
"""Attribute of a leaf that a strict restore does without where nobody asks for it. Spec: 07-index."""

ORDER_USER_CODE, ORDER_OPTIMIZER, ORDER_TENSOR, ORDER_RNG = 0, 1, 2, 3


class Device(Protocol):
    """A kind of accelerator, as staging sees it: one object of an adapter for all of its tensors.

    Staging registers an arena, issues every copy, and waits once: no byte is looked at, and no call
    returns, before that. The registration stays until the memory is given up.
    """

    def register(self, ptr: int, nbytes: int) -> None:
        """Pin host memory that copies go to; once for each allocation. What cannot be pinned is
        copied to all the same, only slower: no error."""

    def unregister(self, ptr: int) -> None:
        """Before registered memory is given up; no copy is on its way to it."""

    def wait(self) -> None:
        """Until all copies that this thread has issued are complete, or have failed.

        Raises: what the first of them failed with.
        """


class CopyAsync(Protocol):
    """Issues a copy of a tensor's packed bytes, as they are now, into host memory."""

    def __call__(self, out: NDArray[np.uint8], start: int = 0, stride: int = 0) -> None:
        """Row i of `out` (rows, width) gets the bytes [start + i * stride, ... + width), once
        `Device.wait` has returned. The tensor may be written to afterwards, not before."""


@dataclass(slots=True)
class TensorSource:
    """A tensor leaf at save.

    Attributes:
        dtype: Name in the format (spec 04): `float32`, `bfloat16`, `float4_e2m1fn`.
        shape: In elements.
        fetch: Gives the values as a C-contiguous host array of that dtype's NumPy / ml_dtypes type
            (types under 8 bits: one byte an element, as ml_dtypes has them), zero-copy if possible.
        identity: Equal and not None for two sources that are one tensor (same memory, offset, shape,
            strides, dtype): a tie. None for tensors without elements.
        attributes: Dotted key -> plain value, kept with the leaf, ignorable: `torch.memory_format`.
        keep: Anything that must stay alive while the identity is compared.
        device: Where the tensor is, if staging is to copy it by `copy_async` instead of `fetch`;
            only if the packed bytes (spec 05) are the tensor's own, in C order.
        parts: The boxes of it that this rank holds, which may be none; None: all of it, as every
            rank does that has it. `fetch` is not called for a tensor in parts.
        beside: Suffix -> a leaf that is put behind this one under its name with that suffix, if it
            stands in a dict.
    """

    dtype: str
    shape: tuple[int, ...]
    fetch: Callable[[], NDArray[Any]]
    identity: Hashable | None = None
    attributes: Mapping[str, object] = field(default_factory=dict)
    keep: object = None
    device: Device | None = None
    copy_async: CopyAsync | None = None
    parts: Sequence[Part] | None = None
    beside: Mapping[str, TensorSource] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Part:
    """A box of a tensor that this rank holds: where it begins, per axis, and its own source."""

    origin: tuple[int, ...]
    source: TensorSource


@dataclass(slots=True)
class Captured:
    """The state of a stateful object: a tree of dicts, lists, values and tensors of any framework.

    `attributes`: name relative to the object ("" is the object itself, as a container; else a leaf's
    relative name) -> dotted key -> plain value.
    """

    tree: object
    attributes: Mapping[str, Mapping[str, object]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StoredLeaf:
    """A stored leaf as a target sees it. `dtype` is "" for a plain value, which is in `value`.

    `tensor` is the tensor's row: equal rows are tied. `origin` is the name before `rename=`, where
    that changed it. `part`: of a composite, at a load.
    """

    name: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    tensor: int = -1
    value: object = None
    attributes: Mapping[str, object] = field(default_factory=dict)
    origin: str = ""
    part: bool = False


@dataclass(frozen=True, slots=True)
class Memory:
    """Where the values of one target will lie, so that the engine sees which targets share bytes.

    Attributes:
        name: As in `Comparison.tensor`.
        space: The device whose addresses these are: "cpu", "cuda:0".
        address: Of the first element.
        shape, strides: In elements, and in bytes.
        itemsize: Bytes of an element as it lies there.
        encode: Staged array -> C-order array of that shape whose elements are the bytes that are
            written: the types under 8 bits, conjugated views and the like have others there.
        identity: As in `Target.identities`; equal ones are a tie.
    """

    name: str
    space: str
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    encode: Callable[[NDArray[Any]], NDArray[Any]]
    identity: Hashable | None = None


class Comparison(Protocol):
    """Collects what matches and what does not; the engine's `Comparison` in `engine/bind`.

    Names are absolute names in the *target's* tree. What is stored and never asked for becomes
    `unexpected` by itself.
    """

    matched_by: dict[str, str]
    """Name -> the rule that matched it, where it was not the name itself: for the report."""

    match_by: MatchBy
    """"position": the state of an object is taken in its order, whatever its names are."""

    def wanted(self, name: str) -> bool:
        """Whether a name takes part: the caller's `names=`."""

    def renamed(self, name: str) -> str:
        """What the caller's `rename=` makes of a stored name."""

    def stored(self, below: str) -> Mapping[str, StoredLeaf]:
        """All stored leaves at or below a name, by absolute name (renames applied)."""

    def attributes(self, name: str) -> Mapping[str, object]:
        """Attributes of the stored container at a name; empty where there is none."""

    def tensor(
        self,
        name: str,
        dtype: str,
        shape: Sequence[int],
        *,
        source: str | None = None,
        rule: str = "",
        boxes: Sequence[Box] | None = None,
    ) -> bool:
        """Ask for a tensor leaf; True if it is there and fits (or may be cast).

        `boxes`: what of it this rank holds, and reads: `Staged.parts` has it then.
        `source`: the stored name, where it differs (an alias); `rule` says why, for `matched_by`.
        Else a missing / shape / dtype / kind entry is made.
        """

    def value(self, name: str, *, source: str | None = None, rule: str = "") -> bool:
        """Ask for a plain value leaf."""

    def subtree(self, name: str) -> bool:
        """Ask for everything stored at and below a name, to be replaced whole."""

    def moved(self, name: str, to: str) -> None:
        """What is stored below `name` goes to another name of the target: for `renamed`."""

    def leave(self, name: str) -> None:
        """What is stored at and below a name is somebody else's: not unexpected, not read."""

    def surplus(self, name: str) -> None:
        """Something is stored that the target has no place for, and it has no leaf of its own."""

    def take(self, name: str) -> None:
        """What is stored at and below a name has been told of: it is no longer unexpected."""

    def in_parts(self, stored: str, boxes: Sequence[Box]) -> None:
        """Of a tensor in a subtree this rank takes some boxes only: it comes as a `Sharded`."""

    def missing(self, name: str, *, spare: bool = False) -> None:
        """Something in the target is not stored; `spare`: a strict restore does without."""

    def mismatch(self, name: str, expected: str, found: str, *, what: str = "kind") -> None:
        """`what`: "shape", "dtype" or "kind". It always raises, strict or not."""

    def pending(self, name: str, *, source: str | None = None) -> None:
        """A stored leaf for an object that does not exist yet: it is read and handed to `bind`."""

    def tie(self, name: str, what: str) -> None: ...


class Staged(Protocol):
    """Checked values for the names that a target asked for.

    `undoable` is False where memory is bounded and what was bound cannot be put back: a target
    need not keep the old values of plain tensors then.
    """

    undoable: bool

    def __getitem__(self, name: str) -> Any:
        """NumPy array (C-order, this process alone owns it; a view of nothing the file backs
        writably) or plain value, by the absolute name that was asked for."""

    def own(self, name: str) -> Any:
        """The same array for the target to keep: nobody else is given its memory."""

    def __contains__(self, name: object) -> bool: ...
    def parts(self, name: str) -> list[NDArray[Any]]:
        """The boxes of a tensor that was asked for in boxes, in their order."""

    def subtree(self, name: str) -> Any:
        """What `Comparison.subtree` asked for, as the tree that was saved: a deep copy of its own."""


class Target(Protocol):
    """An object of the caller's tree that a restore fills."""

    name: str
    order: int
    # Optional: `identities: Mapping[str, Hashable]`, name -> the memory it will be written to. Two
    # names with one identity take one value, and a stored tie whose names have two is reported.
    # Optional, after `compare`: `memory() -> Sequence[Memory]`, where values are written as they
    # are stored. Targets that share bytes take values that agree there, or nothing is touched.

    def compare(self, comparison: Comparison) -> None:
        """Say what is expected. Touches nothing. May be called for `plan` alone."""

    def bind(self, staged: Staged) -> None:
        """Take the values. If it raises after it has changed something, `undo` is called too."""

    def undo(self) -> None:
        """Put back, bit for bit, what `bind` changed (also if it changed only a part)."""


class Adapter(Protocol):
    """One per framework, stateless: `ADAPTER` in `ckptfmt.torch`, `ckptfmt.tensorflow`."""

    # Optional: `is_generator(obj) -> bool`, for objects that are captured after all others;
    # `keep_generators() -> Callable[[], None]`: the framework's own generators as they are now, and
    # what puts them back; `layers(obj) -> list[tuple[str, str, dict[str, float]]]`: path below it,
    # the framework's own class and constants of each layer of a model; `groups(obj, name, peers) ->
    # list[dict[str, Any]]`: constants and parameters, by name, of an optimizer (`live_layers`).

    def kind(self, obj: object) -> ObjectKind:
        """What the object is. "unknown": the engine goes on with duck typing (`state_dict` and
        `load_state_dict`, `get_state` and `set_state`), then refuses."""

    def source(self, obj: Any, name: str) -> TensorSource:
        """For kind "tensor". UsageError names `name` if the tensor cannot be carried."""

    def capture(self, obj: Any, name: str, peers: Sequence[tuple[str, object]]) -> Captured:
        """For kind "stateful" and "composite". `peers`: (name, object) of all stateful objects of this adapter in
        the tree, itself included: an optimizer finds its parameters' names there."""

    def target(self, obj: Any, name: str, peers: Sequence[tuple[str, object]]) -> Target | None:
        """For "tensor", "composite" and "stateful". None for a tensor that cannot be filled: the engine
        then puts another one, from `make`, into the dict or list that holds it. An immutable composite
        has a target with `make(staged)` and `parts`, their names, in place of `bind`, likewise."""

    def pack_value(self, obj: Any) -> tuple[str, object]:
        """For kind "value": (tag, plain payload), e.g. ("torch.Size", [2, 3])."""

    def unpack_value(self, tag: str, payload: Any) -> object:
        """The reverse, for tags that begin with this adapter's root module and a dot."""

    def tensor(self, array: NDArray[Any], attributes: Mapping[str, object]) -> object:
        """A new tensor with these values, on the host: for the state of an object that had this
        framework's tensors. `attributes` are the leaf's."""

    def compose(self, attributes: Mapping[str, object], name: str) -> Callable[[Any], Any] | None:
        """How to make a composite of the container of its parts (tensors of this framework, plain
        values), by the stored container's attributes. None for a container that is none."""

    def copy(self, obj: Any) -> object:
        """A composite of the same values in memory of its own."""

    def make(self, like: Any, array: NDArray[Any]) -> object:
        """A new tensor of `like`'s class, device and sharding with these values (`load(like=)`)."""
