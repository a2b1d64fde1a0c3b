"""stage: a leaf -> host bytes, as the data file will hold them. Spec: 05-data-files."""

from __future__ import annotations

from ckptfmt.engine.adapter import TensorSource
from ckptfmt.errors import ConflictError
from ckptfmt.format import pack_array


def stage_tensor(
    source: TensorSource, name: str, nbytes: int, payload: memoryview | None = None
) -> memoryview:
    """The packed bytes of a tensor; no copy where its memory has them already.

    Args:
        nbytes: What the plan says.
        payload: Bytes that were packed while planning (strings).
    Raises:
        ConflictError: kind `conflict-stale-plan`: the tensor changed its size since it was planned.
    """
    data = pack_array(source.fetch()) if payload is None else payload
    if len(data) != nbytes:
        raise ConflictError(
            "tensor changed while it was saved",
            reason="stale-plan",
            where=repr(name),
            expected=f"{nbytes} bytes",
            found=f"{len(data)} bytes",
            do="save at a moment when nothing resizes tensors; nothing was committed",
        )
    return data
