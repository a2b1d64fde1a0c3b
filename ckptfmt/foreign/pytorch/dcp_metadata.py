"""`.metadata` of a DCP directory: a pickle of a few dataclasses, read as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ckptfmt.errors import CorruptError, UnsupportedError
from ckptfmt.foreign.mapping import corrupt
from ckptfmt.foreign.pickle_builders import PLAIN_BUILDERS, typed
from ckptfmt.foreign.pickle_machine import Global, PickleMachine, Record, Settable, illegal
from ckptfmt.foreign.pytorch.builders import dtype_of, ints, layout_builder, size_builder
from ckptfmt.foreign.pytorch.dtypes import TorchDtype

FORM = "dcp"
RECORD_ATTRIBUTE = "ckptfmt_tree"
_INDEX = "torch.distributed.checkpoint.metadata.MetadataIndex"
_NDIM_MAX = 64
_NUMEL_MAX = 1 << 62


@dataclass(frozen=True, slots=True)
class Place:
    """Where an item's bytes are."""

    file: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor, and where its values are."""

    box: tuple[slice, ...]
    place: Place


@dataclass(frozen=True, slots=True)
class TensorItem:
    dtype: TorchDtype
    shape: tuple[int, ...]
    requires_grad: bool
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class Items:
    """All items by name. `paths`: name -> keys and positions that lead to it, where they are told;
    `record`: what an export of ours has to say beside."""

    tensors: dict[str, TensorItem]
    values: dict[str, Place]
    paths: dict[str, tuple[str | int, ...]]
    record: str | None = None


class _Index(Settable):
    """A key of the storage table, compared by identity until it is complete."""

    def __init__(self) -> None:
        self.name, self.offset = "", None

    name: str
    offset: tuple[int, ...] | None

    def set_state(self, state: Any) -> None:
        fields = typed(state, dict)
        self.name = typed(fields.get("fqn"), str)
        offset = fields.get("offset")
        self.offset = None if offset is None else ints(offset)


def _index(args: tuple[Any, ...]) -> _Index:
    if args:
        raise illegal("an index with arguments")
    return _Index()


class _Machine(PickleMachine):
    def key(self, key: Any) -> Any:
        return key if type(key) is _Index else super().key(key)


def parse_metadata(data: bytes, where: str) -> Items:
    """The items of a checkpoint.

    Raises:
        CorruptError: The metadata does not hold; UnsupportedError: an item was transformed.
    """
    machine = _Machine(
        data,
        0,
        len(data),
        where=where,
        reason=FORM,
        builders={
            **PLAIN_BUILDERS,
            _INDEX: _index,
            "torch.Size": size_builder,
            "torch.serialization._get_layout": layout_builder,
        },
    )
    root = _fields(machine.load(), "Metadata", where)
    places = _places(root.get("storage_data"), where)
    tensors: dict[str, TensorItem] = {}
    values: dict[str, Place] = {}
    table = root.get("state_dict_metadata")
    if not isinstance(table, dict):
        raise corrupt(FORM, "no table of items", "metadata", where)
    for name, item in table.items():
        at = f"{where}, {ascii(name)[:200]}"
        if type(name) is not str or type(item) is not Record:
            raise corrupt(FORM, "an item of no known kind", "metadata", at)
        if item.name.endswith(".BytesStorageMetadata"):
            values[name] = _place(places, (name, None), at)
        else:
            tensors[name] = _tensor(name, item, places, at)
    record = root.get(RECORD_ATTRIBUTE)
    if record is not None and type(record) is not str:
        raise corrupt(FORM, "a record that is no text", "metadata", where)
    return Items(tensors, values, _paths(root.get("planner_data"), where), record)


def _fields(obj: Any, kind: str, where: str) -> dict[Any, Any]:
    """The fields of a dataclass of torch."""
    if type(obj) is not Record or obj.name.rpartition(".")[2] != kind:
        raise corrupt(FORM, f"no {kind}", "metadata", where)
    if not isinstance(obj.state, dict):
        raise corrupt(FORM, f"a {kind} without fields", "metadata", where)
    return obj.state


_Key = tuple[str, tuple[int, ...] | None]


def _places(table: Any, where: str) -> dict[_Key, Place]:
    if not isinstance(table, dict):
        raise corrupt(FORM, "no table of places", "metadata", where)
    made: dict[_Key, Place] = {}
    for index, info in table.items():
        if type(index) is not _Index:
            raise corrupt(FORM, "a place of no item", "metadata", where)
        at = f"{where}, {ascii(index.name)[:200]}"
        fields = _fields(info, "_StorageInfo", at)
        file, start, nbytes = (fields.get(n) for n in ("relative_path", "offset", "length"))
        if fields.get("transform_descriptors"):
            raise UnsupportedError(
                "an item that an extension has transformed",
                reason=f"{FORM}-transform",
                where=at,
                found=ascii(fields["transform_descriptors"])[:80],
                do="save it again without extensions",
            )
        if type(file) is not str or type(start) is not int or type(nbytes) is not int:
            raise corrupt(FORM, "a place that is none", "metadata", at)
        if not (0 <= start < _NUMEL_MAX and 0 <= nbytes < _NUMEL_MAX):
            raise corrupt(FORM, "a place that is none", "metadata", at, (start, nbytes))
        made[index.name, index.offset] = Place(file, start, start + nbytes)
    return made


def _place(places: dict[_Key, Place], key: _Key, where: str) -> Place:
    found = places.get(key)
    if found is None and key[1] == ():
        found = places.get((key[0], None))
    if found is None:
        raise corrupt(FORM, "an item that is nowhere", "metadata", where)
    return found


def _tensor(name: str, item: Record, places: dict[_Key, Place], where: str) -> TensorItem:
    fields = _fields(item, "TensorStorageMetadata", where)
    properties = fields.get("properties")
    if type(properties) is not Record:
        raise corrupt(FORM, "a tensor without properties", "metadata", where)
    state = properties.state
    if isinstance(state, dict):  # of a release before the state became a tuple
        dtype, layout, wants = (state.get(n) for n in ("dtype", "layout", "requires_grad"))
    elif type(state) is tuple and len(state) == 5:
        dtype, layout, wants = state[:3]
    else:
        raise corrupt(FORM, "a tensor without properties", "metadata", where)
    if "strided" not in (layout.name if type(layout) is Global else str(layout)):
        raise corrupt(FORM, "a tensor that is not strided", "metadata", where)
    try:
        kind, shape = dtype_of(dtype), ints(fields.get("size"))
        chunks = [_fields(c, "ChunkStorageMetadata", where) for c in typed(fields["chunks"], list)]
        boxes = [(ints(c.get("offsets")), ints(c.get("sizes"))) for c in chunks]
    except (CorruptError, KeyError) as error:
        what = error.what if isinstance(error, CorruptError) else "no chunks"
        raise corrupt(FORM, "a malformed tensor", "metadata", where, what) from error
    _check_boxes(shape, boxes, where)
    made = []
    for offsets, sizes in boxes:
        box = tuple(slice(o, o + n) for o, n in zip(offsets, sizes))
        made.append(Chunk(box, _place(places, (name, offsets), where)))
    made.sort(key=lambda chunk: tuple(side.start for side in chunk.box))
    return TensorItem(kind, shape, wants is True, tuple(made))


def _check_boxes(
    shape: tuple[int, ...], boxes: list[tuple[tuple[int, ...], tuple[int, ...]]], where: str
) -> None:
    total = 1
    for n in shape:
        total *= max(n, 1)
    if len(shape) > _NDIM_MAX or min((0, *shape)) < 0 or total >= _NUMEL_MAX:
        raise corrupt(FORM, "not a shape", "shape", where, shape[:8])
    for offsets, sizes in boxes:
        inside = len(offsets) == len(sizes) == len(shape) and all(
            0 <= o <= o + n <= dim for o, n, dim in zip(offsets, sizes, shape)
        )
        if not inside:
            raise corrupt(FORM, "a chunk lies outside of its tensor", "chunk", where, offsets[:8])


def _paths(table: Any, where: str) -> dict[str, tuple[str | int, ...]]:
    """Name -> the keys and positions that lead to it; nothing where the planner told none."""
    if not isinstance(table, dict):
        return {}
    made = {}
    for name, path in table.items():
        if type(name) is not str or type(path) is not tuple or not path:
            raise corrupt(FORM, "a path of no item", "metadata", where)
        if not all(type(key) in (str, int) for key in path):
            raise corrupt(FORM, "a path of other than keys and positions", "metadata", where)
        made[name] = path
    return made
