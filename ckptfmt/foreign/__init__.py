"""Files of other formats. An *importer* reads one as a tree of lazy leaves; saving stays the engine's.

`convert` carries such a file into a store; `open_foreign` makes it a source for load and restore.
"""

from __future__ import annotations

from ckptfmt.foreign.base import (
    ForeignContainer,
    ForeignTensor,
    ForeignTree,
    ForeignValue,
    Importer,
    tree_of,
)
from ckptfmt.foreign.conversion import convert, same_digests
from ckptfmt.foreign.opening import ForeignCheckpoint, open_foreign
from ckptfmt.foreign.registry import IMPORTERS, detect_format, importer_names, read_foreign

__all__ = [
    "IMPORTERS",
    "ForeignCheckpoint",
    "ForeignContainer",
    "ForeignTensor",
    "ForeignTree",
    "ForeignValue",
    "Importer",
    "convert",
    "detect_format",
    "importer_names",
    "open_foreign",
    "read_foreign",
    "same_digests",
    "tree_of",
]
