"""Files of other formats. An *importer* reads one as a tree of lazy leaves; saving stays the engine's.

`convert` carries such a file into a store, `export` the other way; `open_foreign` makes it a source
for load and restore.
"""

from __future__ import annotations

from ckptfmt.foreign.across import translate
from ckptfmt.foreign.base import (
    ForeignContainer,
    ForeignTensor,
    ForeignTree,
    ForeignValue,
    Importer,
    tree_of,
)
from ckptfmt.foreign.conversion import convert
from ckptfmt.foreign.exporters import export, is_foreign
from ckptfmt.foreign.opening import ForeignCheckpoint, open_foreign
from ckptfmt.foreign.registry import (
    EXPORTERS,
    IMPORTERS,
    detect_format,
    format_for,
    importer_names,
    read_foreign,
    suffix_format,
)
from ckptfmt.foreign.stored import is_store

__all__ = [
    "EXPORTERS",
    "IMPORTERS",
    "ForeignCheckpoint",
    "ForeignContainer",
    "ForeignTensor",
    "ForeignTree",
    "ForeignValue",
    "Importer",
    "convert",
    "detect_format",
    "export",
    "format_for",
    "importer_names",
    "is_foreign",
    "is_store",
    "open_foreign",
    "read_foreign",
    "suffix_format",
    "translate",
    "tree_of",
]
