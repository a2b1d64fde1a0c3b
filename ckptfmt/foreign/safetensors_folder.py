"""A folder of safetensors shards, as its `*.index.json` says."""

from __future__ import annotations

from ckptfmt.foreign.base import ForeignTensor, ForeignTree
from ckptfmt.foreign.safetensors import FORMAT, SUFFIX, read_file, tensors_of
from ckptfmt.foreign.safetensors_header import REASON
from ckptfmt.foreign.shards import (
    check_homes,
    ignored_files,
    join_metadata,
    read_index,
    resolve,
    twice,
)


def read_folder(folder: str, index_name: str) -> ForeignTree:
    """The tree that an index describes.

    Raises:
        NotFoundError: Shards are missing; all are named.
        CorruptError: The index leads out of the folder, names a tensor that its shard lacks, or a
            tensor stands in two shards.
    """
    weight_map, info = read_index(folder, index_name, REASON)
    files = list(dict.fromkeys(weight_map.values()))
    paths = resolve(folder, files, index_name)
    tensors, metadata, skipped = _read_shards(paths, weight_map, index_name)
    if info:
        metadata = {**metadata, "index": info}
    # The order of the index, which is that of the model for most writers.
    ordered = {tensors[name].name: tensors[name] for name in weight_map}
    return ForeignTree(
        FORMAT,
        ordered,
        metadata=metadata,
        skipped=skipped,
        ignored=ignored_files(folder, files, index_name, SUFFIX),
        keys={tensor.name: (tensor.foreign_name,) for tensor in ordered.values()},
    )


def _read_shards(
    paths: dict[str, str], weight_map: dict[str, str], index_name: str
) -> tuple[dict[str, ForeignTensor], dict[str, object], dict[str, str]]:
    """(tensors by foreign name, joined metadata, skipped); every header is checked first."""
    tensors: dict[str, ForeignTensor] = {}
    metadata: dict[str, object] = {}
    skipped: dict[str, str] = {}
    homes: dict[str, str] = {}
    for file, path in paths.items():
        header, data = read_file(path, file)
        join_metadata(metadata, header.metadata, file)
        for tensor in tensors_of(header.entries, data, file):
            name = tensor.foreign_name
            if name in homes:
                raise twice(name, (homes[name], file), index_name, REASON)
            homes[name] = file
            if name in weight_map:
                tensors[name] = tensor
            else:
                skipped[name] = f"tensor of {file} that {index_name} does not name"
    check_homes(homes, weight_map, index_name, REASON)
    return tensors, metadata, skipped
