"""`.npz` and `.npy`: what `numpy.load` reads without `allow_pickle`.

An entry of an archive is called as its leaf: `model/encoder.0.weight`. Arrays are aligned in it, so
that an import maps them.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np

from ckptfmt.foreign.base import ForeignTree
from ckptfmt.foreign.exporters.base import IN_RECORD, Exporter, ExportPlan
from ckptfmt.foreign.exporters.record import record_of
from ckptfmt.foreign.exporters.staging import Staging
from ckptfmt.foreign.exporters.tree import ExportTensor, ExportTree, raw_bytes
from ckptfmt.foreign.exporters.zip_writer import COMMENT_NBYTES_MAX, ZipWriter
from ckptfmt.foreign.numpy import RECORD_MAGIC
from ckptfmt.foreign.tree_record import RECORD_KEY
from ckptfmt.format import dtype_named, dtype_of

_SUFFIX = ".npy"


class NumpyExporter(Exporter):
    """Row `numpy` of EXPORTERS."""

    format = "numpy"

    def __init__(self, dst: str) -> None:
        super().__init__(dst)
        self.has_record = not self._is_array

    def plan(self, tree: ExportTree, options: Mapping[str, Any]) -> ExportPlan:
        plan = ExportPlan(tree)
        # The format knows no ties: a tensor is written under each of its names.
        every = [replace(t, names=[name]) for t in tree.tensors for name in t.names]
        plan.carry_scalars(str, lambda tensor: "")
        every += [_as_numpy(tensor) for tensor in plan.tensors]
        notes = {name: place for name, place in plan.names.items() if place == IN_RECORD}
        plan.tensors, plan.names, plan.state = [], dict(notes), {}
        if self._is_array:
            plan.names = {}
            plan.skip_values(notes, "a value: the format holds one array")
        for tensor in every:
            reason = _reason(tensor, is_array=self._is_array, is_first=not plan.tensors)
            if reason and tensor.array is not None and not self._is_array:
                plan.carry_in_record(tensor.name)
                continue
            if reason:
                plan.skip(tensor, reason)
                plan.transformed.pop(tensor.name, None)
                continue
            plan.tensors.append(tensor)
            plan.names[tensor.name] = tensor.name
            if tensor.numpy_dtype.type.__module__ != "numpy":
                plan.state[tensor.name] = tensor.dtype
                plan.transformed[tensor.name] = f"{tensor.dtype} as raw bytes, as NumPy has it"
            first = tree.leaves[tensor.name]
            if isinstance(first, ExportTensor) and first.name != tensor.name:
                plan.transformed[tensor.name] = f"a copy of {first.name}"
        return plan

    @property
    def _is_array(self) -> bool:
        return self.name.lower().endswith(_SUFFIX)

    def write(self, plan: ExportPlan, staging: Staging) -> Sequence[tuple[str, str]]:
        with staging.stream(self.name, plan.nbytes) as stream:
            archive = ZipWriter(stream)
            for tensor, pieces in plan.tree.read(plan.tensors):
                head = _header(tensor.numpy_dtype, tensor.shape)
                if self._is_array:
                    stream.put(head)
                    for piece in pieces:
                        stream.put_values(raw_bytes(piece))
                else:
                    data: Iterator[Any] = chain([head], map(raw_bytes, pieces))
                    archive.add(tensor.name + _SUFFIX, len(head) + tensor.nbytes, data)
            if not self._is_array:
                text = record_of(plan, dtypes=plan.state)
                archive.finish(_put_record(archive, text))
        return [(self.name, self.name)]

    def read_back(self, plan: ExportPlan, staging: Staging) -> ForeignTree:
        found = super().read_back(plan, staging)
        if not self._is_array:
            return found
        return replace(found, tensors=dict(zip(plan.names, found.tensors.values())))


def _put_record(archive: ZipWriter, text: str) -> bytes:
    """Where readers do not look: the archive's comment; an entry if it is too long for that."""
    packed = RECORD_MAGIC + zlib.compress(text.encode()) if text else b""
    if len(packed) <= COMMENT_NBYTES_MAX:
        return packed
    raw = np.frombuffer(packed, np.uint8)
    head = _header(raw.dtype, raw.shape)
    archive.add(RECORD_KEY + _SUFFIX, len(head) + raw.size, [head, raw])
    return b""


def _reason(tensor: ExportTensor, *, is_array: bool, is_first: bool) -> str:
    """Why a tensor cannot be carried, or ""."""
    known = dtype_named(tensor.dtype)
    is_raw = tensor.numpy_dtype.type.__module__ != "numpy"
    if known is None or tensor.is_variable or (is_raw and (is_array or known.bits < 8)):
        return f"numpy.load has no dtype {tensor.dtype} without pickles"
    if is_array:
        return "" if is_first else "a second array: the format holds one"
    if tensor.name == RECORD_KEY:
        return "a name that the archive keeps for itself"
    parts = tensor.name.split("/")
    drive = len(parts[0]) > 1 and parts[0][1] == ":"
    if "\0" in tensor.name or "\\" in tensor.name or drive or "." in parts or ".." in parts:
        return "a name that no entry of an archive may have"
    return ""


def _as_numpy(tensor: ExportTensor) -> ExportTensor:
    """Text as an array of its width; what NumPy would cut (zeros at the end) stays as it is."""
    assert tensor.array is not None
    value = tensor.array[()]
    if not isinstance(value, str | bytes) or value[-1:] in ("\0", b"\0"):
        return tensor
    array = np.asarray(value)
    return replace(tensor, array=array, dtype=dtype_of(array).name)


def _header(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    out = io.BytesIO()
    if dtype.type.__module__ != "numpy":
        dtype = np.dtype((np.void, dtype.itemsize))
    fields = {
        "descr": np.lib.format.dtype_to_descr(dtype),
        "fortran_order": False,
        "shape": shape,
    }
    np.lib.format.write_array_header_1_0(out, fields)
    return out.getvalue()
