"""Orbax checkpoints, read through tensorstore, without Orbax and JAX.

An *item* is a folder with one tree: its arrays in an OCDBT database, or in folders of their own
(zarr, version 2 or 3), its structure in `_METADATA`. A *composite* is a folder of items.
"""

from __future__ import annotations

from ckptfmt.foreign.orbax.importer import OrbaxImporter

__all__ = ["OrbaxImporter"]
