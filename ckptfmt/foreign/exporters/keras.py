"""`.weights.h5`: what Keras's `model.load_weights` opens, written through h5py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np

from ckptfmt.errors import CorruptError, MissingExtraError, NotFoundError
from ckptfmt.foreign.exporters.base import Exporter, ExportPlan
from ckptfmt.foreign.exporters.failures import library_writing
from ckptfmt.foreign.exporters.keras_layout import (
    VARS,
    Variables,
    layout_like,
    layout_of,
    model_root,
    optimizer_layout,
)
from ckptfmt.foreign.exporters.record import record_of
from ckptfmt.foreign.exporters.staging import Staging
from ckptfmt.foreign.exporters.tree import ExportTensor, ExportTree, boxes
from ckptfmt.foreign.tree_record import RECORD_KEY

_BFLOAT16 = "bfloat16"


class KerasExporter(Exporter):
    """Row `keras` of EXPORTERS."""

    format = "keras"

    def plan(self, tree: ExportTree, options: Mapping[str, Any]) -> ExportPlan:
        like, prefix = options.get("like"), model_root(tree)
        with _opened(like) if like else nullcontext() as template:
            layout = (
                layout_of(tree, prefix) if template is None else layout_like(template, tree, prefix)
            )
            optimizer = optimizer_layout(tree, template)
        plan = ExportPlan(tree, state=[*layout, *([optimizer] if optimizer else [])])
        paths = {
            name: f"{group.path}/{VARS}/{number}".lstrip("/")
            for group in plan.state
            for number, name in enumerate(group.names)
        }
        for tensor in tree.tensors:
            for name in tensor.names:
                if name not in paths:
                    plan.skipped[name] = "no variable that Keras keeps in a file of weights"
                elif name != tensor.name:
                    plan.skipped[name] = f"{tensor.name}, which Keras has once"
            if tensor.name not in paths:
                continue
            known = tensor.numpy_dtype
            is_number = known.kind in "biufc" and known.type.__module__ == "numpy"
            if not is_number and tensor.dtype != _BFLOAT16:
                plan.skip(tensor, f"a file of weights has no dtype {tensor.dtype}")
                continue
            plan.tensors.append(tensor)
            plan.names[tensor.name] = paths[tensor.name]
        for name, _ in plan.values():
            plan.carry_in_record(name)
        return plan

    def write(self, plan: ExportPlan, staging: Staging) -> Sequence[tuple[str, str]]:
        import h5py

        with (
            library_writing("h5py", staging.folder, staging.where),
            h5py.File(staging.path(self.name), "w") as file,
        ):
            for group in plan.state:
                _group(file, group)
            record = record_of(plan, is_plain=lambda name, path: False)
            if record:  # which Keras does not ask for
                file.create_dataset(RECORD_KEY, data=np.frombuffer(record.encode(), np.uint8))
            for tensor, pieces in plan.tree.read(plan.tensors):
                path = plan.names[tensor.name]
                made = file.create_dataset(path, tensor.shape, _stored_dtype(tensor))
                if tensor.dtype == _BFLOAT16:
                    made.attrs["dtype"] = _BFLOAT16
                for box, piece in zip(
                    boxes(tensor.shape, tensor.numpy_dtype.itemsize), pieces, strict=True
                ):
                    if piece.size:
                        made[box] = piece.view(_stored_dtype(tensor))
        staging.sync()
        return [(self.name, self.name)]


@contextmanager
def _opened(path: str) -> Iterator[Any]:
    import h5py

    try:
        with h5py.File(path, "r") as file:
            yield file
    except FileNotFoundError as error:
        raise NotFoundError("no such file", reason="file", where=path) from error
    except OSError as error:
        raise CorruptError(
            "no file of weights", reason="export-like", where=path, found=str(error)[:200]
        ) from error


def _group(file: Any, group: Variables) -> None:
    made = file.require_group(f"{group.path}/{VARS}" if group.path else VARS)
    if group.title:
        made.attrs["name"] = group.title


def _stored_dtype(tensor: ExportTensor) -> np.dtype[Any]:
    return np.dtype("V2") if tensor.dtype == _BFLOAT16 else tensor.numpy_dtype


def load_exporter(dst: str) -> KerasExporter:
    """The exporter, if h5py is there."""
    try:
        import h5py  # noqa: F401
    except ImportError as error:
        raise MissingExtraError(
            "h5py is not installed", reason="exporter", do='pip install "ckptfmt[h5]"'
        ) from error
    return KerasExporter(dst)
