"""DCP directories: what `torch.distributed.checkpoint.load` reads.

The values are files of `torch.save`, one after another in one file, written as `pytorch` writes
them; a large tensor in pieces, as if several ranks had held it. `.metadata` is a pickle of torch's
own classes, of which only the names are needed here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ckptfmt.errors import UnsupportedError
from ckptfmt.foreign.exporters.base import Exporter, ExportPlan
from ckptfmt.foreign.exporters.names import joined_names
from ckptfmt.foreign.exporters.pickle_writer import Call, Instance, Named, pack_pickle
from ckptfmt.foreign.exporters.record import note_keys, record_of
from ckptfmt.foreign.exporters.staging import Staging
from ckptfmt.foreign.exporters.stream import ExportStream
from ckptfmt.foreign.exporters.torch_layout import Layout, torch_dtype, torch_shape, write_archive
from ckptfmt.foreign.exporters.torch_values import plain
from ckptfmt.foreign.exporters.tree import ExportTree, boxes
from ckptfmt.foreign.pytorch.dcp_metadata import RECORD_ATTRIBUTE
from ckptfmt.foreign.pytorch.dtypes import TorchDtype
from ckptfmt.format import parse_key, split_name

if TYPE_CHECKING:
    from numpy.typing import NDArray

_DATA, _METADATA, _TOP = "__0_0.distcp", ".metadata", "archive"
_VERSION = "1.0.0"
_CLASSES = "torch.distributed.checkpoint.metadata"
_PLACE = "torch.distributed.checkpoint.filesystem._StorageInfo"


@dataclass(slots=True)
class _Item:
    """A piece of a tensor, or a value: where it stands in the data file. Offsets in torch's elements."""

    name: str
    offsets: tuple[int, ...] | None
    sizes: tuple[int, ...]
    start: int
    nbytes: int


@dataclass(slots=True)
class _Items:
    """Dtypes of the tensors, the values' pickles, and what was written."""

    dtypes: dict[str, TorchDtype] = field(default_factory=dict)
    pickles: dict[str, bytes] = field(default_factory=dict)
    written: list[_Item] = field(default_factory=list)


class DcpExporter(Exporter):
    """Row `dcp` of EXPORTERS."""

    format = "dcp"
    shape = "folder"

    def is_own(self, path: str) -> bool:
        return os.path.isfile(os.path.join(path, _METADATA))

    def plan(self, tree: ExportTree, options: Mapping[str, Any]) -> ExportPlan:
        plan = ExportPlan(tree, state=_Items())
        if "" in tree.leaves:
            raise UnsupportedError(
                "a checkpoint of torch.distributed is a dict",
                reason="export-name",
                where=tree.title,
                found="a tree that is one leaf",
                do="put it into a dict",
            )
        joined = joined_names(tree.leaves, ".")
        for tensor in tree.tensors:
            dtype = torch_dtype(tensor)
            if isinstance(dtype, str):
                plan.skip(tensor, dtype)
                continue
            # The format knows no ties: a tensor is written under each of its names.
            for name in tensor.names:
                plan.tensors.append(replace(tensor, names=[name]))
                plan.names[name] = joined[name]
                plan.state.dtypes[name] = dtype
                if name != tensor.name:
                    plan.transformed[name] = f"a copy of {tensor.name}"
        for name, value in plan.values():
            try:
                made, remark = plain(value)
                plan.state.pickles[name] = pack_pickle(made)
            except UnsupportedError:  # code, for torch
                plan.carry_in_record(name)
                continue
            plan.names[name] = joined[name]
            if remark:
                plan.transformed[name] = remark
        note_keys(plan)
        return plan

    def write(self, plan: ExportPlan, staging: Staging) -> Sequence[tuple[str, str]]:
        items: _Items = plan.state
        with staging.stream(_DATA, plan.nbytes) as stream:
            for name, data in items.pickles.items():
                start = stream.position
                write_archive(stream, _TOP, data, [])
                items.written.append(_Item(name, None, (), start, stream.position - start))
            for tensor, pieces in plan.tree.read(plan.tensors):
                dtype = items.dtypes[tensor.name]
                itemsize = tensor.numpy_dtype.itemsize
                for box, piece in zip(boxes(tensor.shape, itemsize), pieces, strict=True):
                    items.written.append(_put(stream, tensor.name, (box, piece), dtype))
        staging.put(_METADATA, pack_pickle(_metadata(plan)))
        return []


def _put(
    stream: ExportStream,
    name: str,
    values: tuple[tuple[slice, ...], NDArray[Any]],
    dtype: TorchDtype,
) -> _Item:
    box, piece = values
    layout = Layout(piece.shape, dtype)
    offsets = torch_shape(tuple(side.start for side in box), dtype)
    start = stream.position
    data = [(layout.nbytes, layout.bytes_of([piece]))]
    write_archive(stream, _TOP, pack_pickle(layout.call("0")), data)
    return _Item(name, offsets, layout.shape, start, stream.position - start)


def _metadata(plan: ExportPlan) -> Instance:
    """torch's `Metadata`: what there is, how it is nested, and where it stands; and as an attribute
    that torch does not look at, what an import reads beside."""
    record = record_of(plan, is_plain=lambda name, fqn: False)
    state: dict[str, Instance] = {}
    rows: list[tuple[Instance, Instance]] = []
    pieces: dict[str, list[Instance]] = {}
    for item in plan.state.written:
        fqn = plan.names[item.name]
        if item.offsets is None:
            state[fqn] = Instance(f"{_CLASSES}.BytesStorageMetadata", {})
            index: dict[str, Any] = {"fqn": fqn, "offset": None, "index": None}
        else:
            found = pieces.setdefault(fqn, [])
            index = {"fqn": fqn, "offset": _size(item.offsets), "index": len(found)}
            chunk = {"offsets": _size(item.offsets), "sizes": _size(item.sizes)}
            found.append(Instance(f"{_CLASSES}.ChunkStorageMetadata", chunk))
        place = {"relative_path": _DATA, "offset": item.start, "length": item.nbytes}
        rows.append((Instance(f"{_CLASSES}.MetadataIndex", index), Instance(_PLACE, place)))
    for tensor in plan.tensors:
        dtype = plan.state.dtypes[tensor.name]
        fqn = plan.names[tensor.name]
        layout = Call("torch.serialization._get_layout", ("torch.strided",))
        contiguous = Call(f"{_CLASSES}._MEM_FORMAT_ENCODING", (0,))
        properties = (Named(f"torch.{dtype.name}"), layout, False, contiguous, False)
        described = {
            "properties": Instance(f"{_CLASSES}.TensorProperties", properties),
            "size": _size(torch_shape(tensor.shape, dtype)),
            "chunks": pieces[fqn],
        }
        state[fqn] = Instance(f"{_CLASSES}.TensorStorageMetadata", described)
    return Instance(
        f"{_CLASSES}.Metadata",
        {
            "state_dict_metadata": state,
            "planner_data": {
                fqn: _path(plan.tree, name) for name, fqn in plan.names.items() if fqn in state
            },
            "storage_data": dict(rows),
            "storage_meta": None,
            "version": _VERSION,
            **({RECORD_ATTRIBUTE: record} if record else {}),
        },
    )


def _size(sizes: tuple[int, ...]) -> Call:
    return Call("torch.Size", (sizes,))


def _path(tree: ExportTree, name: str) -> tuple[str | int, ...]:
    """The keys that lead to a leaf: texts, and positions of lists."""
    made: list[str | int] = []
    above = ""
    for part in split_name(name):
        kind = tree.containers.get(above, ("dict", b""))[0]
        is_position = kind in ("list", "tuple", "namedtuple")
        made.append(int(part) if is_position else str(parse_key(part)))
        above = f"{above}/{part}" if above else part
    return tuple(made)
