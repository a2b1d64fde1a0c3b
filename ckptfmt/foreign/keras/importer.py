"""Which of Keras's formats a file is, and its tree: `{"model": ..., "optimizer": ...}`."""

from __future__ import annotations

import mmap
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckptfmt.errors import CheckpointError, UnsupportedError
from ckptfmt.foreign.base import ForeignTensor, ForeignTree, Importer, like, tree_of
from ckptfmt.foreign.hdf5 import SIGNATURE, Group, read_hdf5
from ckptfmt.foreign.keras.legacy import is_legacy, name_legacy
from ckptfmt.foreign.keras.naming import VARIABLES, Keys, name_variables, numbered
from ckptfmt.foreign.keras.optimizer import ITERATIONS, constants_of, name_numbered
from ckptfmt.foreign.mapping import corrupt, map_file, starts_with
from ckptfmt.foreign.optimizers import CONSTANTS
from ckptfmt.foreign.shards import check_inside
from ckptfmt.foreign.strict_json import SMALL_NBYTES_MAX, parse_small_json
from ckptfmt.foreign.tree_record import RECORD_KEY, with_record
from ckptfmt.foreign.zip_archive import MAGIC as ZIP_MAGIC
from ckptfmt.foreign.zip_archive import StoredEntry, ZipArchive

if TYPE_CHECKING:
    from numpy.typing import NDArray

FORMAT = REASON = "keras"
CONFIG, WEIGHTS, SHARDED = "config.json", "model.weights.h5", ".weights.json"
MODEL, OPTIMIZER = "model", "optimizer"
_INFLATED_NBYTES_MAX = 256 << 20


class KerasImporter(Importer):
    """Row `keras` of IMPORTERS."""

    def detect(self, path: str) -> bool:
        if starts_with(path, SIGNATURE) or _is_sharded(path):
            return True
        if not starts_with(path, ZIP_MAGIC):
            return False
        try:
            entries = ZipArchive(os.path.realpath(path), path, REASON).entries
        except CheckpointError:
            return False
        return CONFIG in entries and any(name.startswith("model.weights") for name in entries)

    def read(self, path: str) -> ForeignTree:
        where, real = os.path.basename(path), os.path.realpath(path)
        if starts_with(path, ZIP_MAGIC):
            return _read_keras(ZipArchive(real, where, REASON))
        if _is_sharded(path):
            root, skipped = _read_shards(real, where)
            return _tree(_weights(root, None, None), skipped)
        data, nbytes = map_file(real, where, REASON)
        if data[: len(SIGNATURE)] != SIGNATURE:
            raise corrupt(REASON, "no file of Keras", "magic", where, ascii(data[:8]))
        root, skipped = read_hdf5(data, (0, nbytes), where)
        if RECORD_KEY in root.tensors:
            text = root.tensors.pop(RECORD_KEY).fetch().tobytes().decode("utf-8", "replace")
            tensors = {"/".join(keys): tensor for keys, tensor in _flat(root)}
            made = {n: like(t, name=n, foreign_name=n) for n, t in tensors.items()}
            return with_record(ForeignTree(FORMAT, made, skipped=skipped), where, text)
        if is_legacy(root):
            return _tree(name_legacy(root, where), skipped)
        if _is_weights(root):
            return _tree(_weights(root, None, None), skipped)
        return tree_of(_plain(root), FORMAT, skipped=skipped)


def _read_keras(archive: ZipArchive) -> ForeignTree:
    """A `.keras` file: configuration and weights in one archive."""
    if CONFIG not in archive.entries:
        raise archive.corrupt(f"no {CONFIG}", "archive")
    text = archive.read(archive.entries[CONFIG], SMALL_NBYTES_MAX)
    config = parse_small_json(text, f"{archive.where}, {CONFIG}", REASON)
    entry = archive.entries.get(WEIGHTS)
    if entry is None:
        others = [name for name in archive.entries if name.startswith("model.weights")]
        raise UnsupportedError(
            "the weights are of another format",
            reason=f"{REASON}-weights",
            where=archive.where,
            expected=WEIGHTS,
            found=", ".join(others)[:200] or "none",
            do="save the model again with Keras",
        )
    where = f"{archive.where}, {WEIGHTS}"
    data: mmap.mmap | bytes
    stored = StoredEntry(archive, entry) if archive.is_stored(entry) else None
    if stored is not None:
        data, span = archive.data, (stored.start, stored.start + entry.nbytes)
    else:
        data = archive.read(entry, _INFLATED_NBYTES_MAX)
        span = (0, len(data))
    root, skipped = read_hdf5(data, span, where)
    compiled = config.get("compile_config") if isinstance(config, dict) else None
    optimizer = compiled.get("optimizer") if isinstance(compiled, dict) else None
    weights = _weights(root, config, optimizer)
    if stored is not None:
        weights = {keys: _checked(tensor, stored) for keys, tensor in weights.items()}
    return _tree(weights, skipped)


def _checked(tensor: ForeignTensor, stored: StoredEntry) -> ForeignTensor:
    """A tensor whose values are given once the entry that holds them was compared."""

    def fetch() -> NDArray[Any]:
        stored.check()
        return tensor.fetch()

    def read(sides: tuple[slice, ...]) -> NDArray[Any]:
        assert tensor.box is not None
        stored.check()
        return tensor.box(sides)

    return like(tensor, fetch=fetch, box=None if tensor.box is None else read)


def _is_sharded(path: str) -> bool:
    """Whether a file lists the files of weights that are in several."""
    return path.endswith(SHARDED) and starts_with(path, b"{")


def _read_shards(path: str, where: str) -> tuple[Group, dict[str, str]]:
    """The groups of all files that an index names, as if they were one's."""
    with open(path, "rb") as file:
        found = parse_small_json(file.read(SMALL_NBYTES_MAX + 1), where, REASON)
    table = found.get("weight_map") if isinstance(found, dict) else None
    rows = table.values() if isinstance(table, dict) else [None]
    names: dict[str, None] = {}
    for name in (n for row in rows for n in (row if isinstance(row, list) else [row])):
        if not isinstance(name, str):
            raise corrupt(REASON, "no table of files", "index", where)
        names[name] = None
    root, skipped = Group(""), dict[str, str]()
    for name in names:
        real = check_inside(os.path.dirname(path), name, where=where)
        data, nbytes = map_file(real, name, REASON)
        group, left_out = read_hdf5(data, (0, nbytes), name)
        _merge(root, group, where)
        skipped |= left_out
    return root, skipped


def _merge(into: Group, group: Group, where: str) -> None:
    into.attributes |= group.attributes
    for name, tensor in group.tensors.items():
        if name in into.tensors:
            at = f"{where}, {ascii(group.path)[1:-1][:200]}/{ascii(name)[1:-1][:80]}"
            raise corrupt(REASON, "a variable stands in two files", "duplicate", at)
        into.tensors[name] = tensor
    for name, child in group.groups.items():
        _merge(into.groups.setdefault(name, Group(child.path)), child, where)


def _is_weights(root: Group) -> bool:
    """Whether variables stand in groups `vars`, numbered."""

    def holds(group: Group) -> bool:
        return VARIABLES in group.groups or any(map(holds, group.groups.values()))

    return not root.tensors and holds(root)


def _weights(root: Group, config: Any, optimizer: Any) -> dict[Keys, ForeignTensor]:
    """The variables of a model and of its optimizer."""
    named = name_variables(root, config, (OPTIMIZER,))
    made = {(MODEL, *keys): tensor for keys, tensor in named.tensors.items()}
    inner = root.below(f"{OPTIMIZER}/{VARIABLES}")
    rows = numbered(inner.tensors) if inner is not None else []
    keys = name_numbered([tensor for _, tensor in rows], named.trained, optimizer)
    for at, (number, tensor) in enumerate(rows):
        place = keys[at] if keys is not None else (VARIABLES, number)
        if place == (ITERATIONS,):
            tensor = like(
                tensor, attributes={**tensor.attributes, CONSTANTS: constants_of(optimizer)}
            )
        made[OPTIMIZER, *place] = tensor
    other = root.groups.get(OPTIMIZER)
    if other is not None:
        for key, tensor in _flat(replace(other, groups={**other.groups, VARIABLES: Group("")})):
            made[OPTIMIZER, *key] = tensor
    return made


def _flat(group: Group) -> list[tuple[Keys, ForeignTensor]]:
    made: list[tuple[Keys, ForeignTensor]] = [((n,), t) for n, t in group.tensors.items()]
    for name, child in group.groups.items():
        made += [((name, *keys), tensor) for keys, tensor in _flat(child)]
    return made


def _plain(group: Group) -> dict[str, Any]:
    """Any other HDF5 file: groups are dicts."""
    return {**group.tensors, **{name: _plain(child) for name, child in group.groups.items()}}


def _tree(tensors: dict[Keys, ForeignTensor], skipped: dict[str, str]) -> ForeignTree:
    root: dict[str, Any] = {}
    for keys, tensor in tensors.items():
        node = root
        for key in keys[:-1]:
            node = node.setdefault(key, {})
            if not isinstance(node, dict):
                raise UnsupportedError(
                    "a variable and a layer would have one name",
                    reason=f"{REASON}-name",
                    where="/".join(keys)[:200],
                )
        if keys[-1] in node:
            raise UnsupportedError(
                "two variables would have one name",
                reason=f"{REASON}-name",
                where="/".join(keys)[:200],
            )
        node[keys[-1]] = tensor
    return tree_of(root, FORMAT, skipped=skipped)
