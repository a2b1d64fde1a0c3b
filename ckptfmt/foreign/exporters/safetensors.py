"""`.safetensors`: one file, or a folder of shards with its `*.index.json`. Our own writer.

Names are keys joined by dots, as models are named there. A tied tensor stands once; the metadata
maps its other names to that one, as the format's library does for torch. What that leaves out of a
tree stands in the metadata too (`tree_record`), so that an import gives the same tree again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from ckptfmt.errors import UnsupportedError
from ckptfmt.foreign.exporters.base import IN_RECORD, Exporter, ExportPlan
from ckptfmt.foreign.exporters.names import joined_names
from ckptfmt.foreign.exporters.record import record_of
from ckptfmt.foreign.exporters.staging import Staging
from ckptfmt.foreign.exporters.tree import ExportTensor, ExportTree, packed_halves, raw_bytes
from ckptfmt.foreign.safetensors_header import DTYPES, HEADER_NBYTES_MAX, LENGTH_NBYTES
from ckptfmt.foreign.tree_record import RECORD_KEY

SUFFIX = ".safetensors"
INDEX = "model.safetensors.index.json"
_NAMES = {ours: name for name, (ours, bits) in DTYPES.items() if bits != 6}
_BITS = dict(DTYPES.values())
_RECORD_NBYTES_MAX = 12 << 20
"""Below what an importer takes of a file's metadata."""
_METADATA_NAME = "__metadata__"


class SafetensorsExporter(Exporter):
    """Row `safetensors` of EXPORTERS. A destination without the suffix is a folder."""

    format = "safetensors"
    keeps_composites = True

    def __init__(self, dst: str) -> None:
        super().__init__(dst)
        self.shape = "file" if dst.lower().endswith(SUFFIX) else "folder"

    def plan(self, tree: ExportTree, options: Mapping[str, Any]) -> ExportPlan:
        plan = ExportPlan(tree, state=int(options["shard_nbytes"]))
        for tensor in tree.tensors:
            if tensor.dtype not in _NAMES:
                plan.skip(tensor, f"the format has no dtype {tensor.dtype}")
            elif tensor.size * _BITS[tensor.dtype] % 8:
                plan.skip(tensor, f"an odd number of elements of {tensor.dtype}")
            elif tensor.name == _METADATA_NAME:
                plan.skip(tensor, "a name that the header keeps for its metadata")
            else:
                plan.tensors.append(tensor)
        carried = [name for tensor in plan.tensors for name in tensor.names]
        joined = joined_names(carried, ".")
        for tensor in plan.tensors:
            for name in tensor.names:
                plan.names[name] = joined[tensor.name]
                if name != tensor.name:
                    plan.transformed[name] = f"a note that it is {joined[tensor.name]}"
        plan.names.update({name: IN_RECORD for name, _ in plan.values()})
        plan.metadata = _metadata(plan, joined)
        return plan

    def write(self, plan: ExportPlan, staging: Staging) -> Sequence[tuple[str, str]]:
        if self.shape == "file":
            _write_file(plan, plan.tensors, staging, self.name, plan.metadata)
            return [(self.name, self.name)]
        shards = _shards(plan)
        names = [f"model-{n:05}-of-{len(shards):05}.safetensors" for n in range(1, len(shards) + 1)]
        if len(shards) == 1:
            names = ["model.safetensors"]
        for number, (name, shard) in enumerate(zip(names, shards)):
            head = plan.metadata if number == 0 else {"format": plan.metadata["format"]}
            _write_file(plan, shard, staging, name, head)
        if len(shards) > 1:
            index = {
                "metadata": {"total_size": sum(_nbytes(t) for t in plan.tensors)},
                "weight_map": {
                    plan.names[tensor.name]: name
                    for name, shard in zip(names, shards)
                    for tensor in shard
                },
            }
            staging.put(INDEX, json.dumps(index, indent=2).encode())
        return []


def _metadata(plan: ExportPlan, joined: Mapping[str, str]) -> dict[str, str]:
    made = {
        key: value if isinstance(value, str) else json.dumps(value, default=str)
        for key, value in plan.tree.metadata.items()
        if not key.startswith("ckptfmt.")  # the format's own
    }
    made.setdefault("format", "pt")
    for tensor in plan.tensors:
        for name in tensor.names[1:]:
            made.setdefault(joined[name], joined[tensor.name])
    record = record_of(plan, nbytes_max=_RECORD_NBYTES_MAX, has_texts=True)
    if record:
        made[RECORD_KEY] = record
    if sum(len(text.encode()) for text in made.values()) > _RECORD_NBYTES_MAX:
        raise UnsupportedError(
            "names, values and metadata are too long for a header of safetensors",
            reason="export-metadata",
            where=plan.tree.title,
            expected=f"at most {_RECORD_NBYTES_MAX} bytes",
            do="choose a part: names= or root=",
        )
    return made


def _nbytes(tensor: ExportTensor) -> int:
    return tensor.size * _BITS[tensor.dtype] // 8


def _shards(plan: ExportPlan) -> list[list[ExportTensor]]:
    """Neighbours together, up to the size that was asked for."""
    limit: int = plan.state
    shards: list[list[ExportTensor]] = [[]]
    left = limit
    for tensor in plan.tensors:
        if shards[-1] and _nbytes(tensor) > left:
            shards.append([])
            left = limit
        shards[-1].append(tensor)
        left -= _nbytes(tensor)
    return shards


def _write_file(
    plan: ExportPlan,
    tensors: Sequence[ExportTensor],
    staging: Staging,
    name: str,
    metadata: Mapping[str, str],
) -> None:
    # Wide elements first: all are aligned then, without gaps, which the format forbids.
    ordered = sorted(tensors, key=lambda t: -_BITS[t.dtype])
    starts, position = {}, 0
    for tensor in ordered:
        starts[tensor.row] = position
        position += _nbytes(tensor)
    header: dict[str, Any] = {_METADATA_NAME: dict(metadata)}
    for tensor in tensors:
        start = starts[tensor.row]
        header[plan.names[tensor.name]] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, start + _nbytes(tensor)],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % LENGTH_NBYTES)
    if len(text) > HEADER_NBYTES_MAX:
        raise UnsupportedError(
            "the header is too long",
            reason="export-metadata",
            where=os.path.basename(name),
            expected=f"at most {HEADER_NBYTES_MAX} bytes",
            found=len(text),
            do="choose a part: names= or root=",
        )
    with staging.stream(name, LENGTH_NBYTES + len(text) + position) as stream:
        stream.put(len(text).to_bytes(LENGTH_NBYTES, "little"))
        stream.put(text)
        for tensor, pieces in plan.tree.read(ordered):
            for raw in packed_halves(pieces) if _BITS[tensor.dtype] == 4 else pieces:
                stream.put_values(raw_bytes(raw))
