"""Bounds on every size that is read from a file. Spec: 09-versions-and-errors."""

from __future__ import annotations

MAJOR, MINOR = 1, 0

BLOCK_NBYTES = 4096
"""Data files are a whole number of these."""
SMALL_TENSOR_NBYTES = 64 << 10
"""A tensor of this many bytes or more starts on a block, a smaller one on `ALIGN_NBYTES`."""
ALIGN_NBYTES = 64

CHUNK_NBYTES_DEFAULT = 4 << 20
CHUNK_NBYTES_MIN = 4096
CHUNK_NBYTES_MAX = 1 << 30

FILE_NBYTES_TARGET = 2 << 30
"""A data file ends after the region that passes this, where the store can rename."""
FILE_NBYTES_TARGET_REMOTE = 256 << 20
"""The same where a file's id must be known before its upload."""

SECTIONS_NBYTES_MAX = 1 << 30
"""Raw bytes of an index's sections together."""
SECTION_RATIO_NBYTES = 16 << 20
SECTION_RATIO_MAX = 1000
"""Above `SECTION_RATIO_NBYTES` raw, a section is at most this many times its stored bytes."""

NDIM_MAX = 64
TENSOR_NBYTES_MAX = 1 << 62
"""A tensor has fewer bytes than this: sums of two stay below 2^63."""
VALUE_DEPTH_MAX = 64
VALUE_NBYTES_MAX = 4096
"""A longer value is stored as a tensor of its packed bytes."""
PIPELINE_LENGTH_MAX = 4
PIPELINES_MAX = 256
NAME_NBYTES_MAX = 1 << 20
INT63_MAX = (1 << 63) - 1
