"""Files of `torch.save` and `torch.jit.save`, read without torch and without running anything.

A *storage* is a run of bytes in the file; a tensor is a view of one. The object is a pickle, which
the pickle machine reads as data: see `ckptfmt.foreign.pickle_machine`.
"""

from __future__ import annotations

from ckptfmt.foreign.pytorch.dcp import DcpImporter
from ckptfmt.foreign.pytorch.importer import PytorchImporter

__all__ = ["DcpImporter", "PytorchImporter"]
