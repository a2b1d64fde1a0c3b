"""HDF5, as h5py writes it by default, read by ourselves: the format's library hangs on damaged files.

An *object header* is a list of messages; an object with a symbol table or links is a group, one with
a layout a dataset. What only newer files of other writers have (fractal heaps, version 2 B-trees,
virtual datasets) is refused by name, as is everything that leads out of the file.
"""

from __future__ import annotations

from ckptfmt.foreign.hdf5.reading import SIGNATURE, Group, read_hdf5

__all__ = ["SIGNATURE", "Group", "read_hdf5"]
