"""Trees to files of other formats. An *exporter* says what its format can hold, and writes it.

`export` conducts: tree, plan, write to a folder beside, read back and compare, give the names.
"""

from __future__ import annotations

from ckptfmt.foreign.exporters.exporting import export, is_foreign

__all__ = ["export", "is_foreign"]
