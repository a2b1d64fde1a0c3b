"""torch.distributed.checkpoint over our store: torch's planners, nothing pickled on disk.

`save`, `async_save` and `load` are one-liners for a script; `CkptfmtWriter` and `CkptfmtReader` go
where torch takes a `storage_writer` or `storage_reader`. What either writes opens with
`ckptfmt.load`, as the nested tree; what `ckptfmt.torch.save` wrote is loaded by torch's planners.
"""

from __future__ import annotations

from ckptfmt.torch.dcp.loading import load
from ckptfmt.torch.dcp.reader import CkptfmtReader
from ckptfmt.torch.dcp.saving import async_save, save
from ckptfmt.torch.dcp.writer import CkptfmtWriter

__all__ = ["CkptfmtReader", "CkptfmtWriter", "async_save", "load", "save"]
