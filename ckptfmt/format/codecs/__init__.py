"""Codecs: a chunk's raw bytes to stored bytes and back. Spec: 06-digests-and-codecs, codecs/.

A *pipeline* is a tuple of stages, each a tuple of a codec's name and its parameters; the empty
pipeline is `raw`. Encoding applies the stages in order, decoding in reverse.
"""

from __future__ import annotations

import importlib
import re
from functools import cache
from typing import Protocol, TypeAlias

from ckptfmt.errors import MissingExtraError, UnsupportedError, UsageError

__all__ = [
    "CODECS",
    "RAW",
    "Codec",
    "Pipeline",
    "check_pipeline",
    "decode",
    "encode",
    "parse_codec",
]

Stage: TypeAlias = tuple[str | int, ...]
Pipeline: TypeAlias = tuple[Stage, ...]
Buffer: TypeAlias = bytes | bytearray | memoryview

RAW: Pipeline = ()

CODECS: dict[str, tuple[str, str]] = {
    "zstd": ("ckptfmt.format.codecs.zstd:Zstd", ""),
}
"""Name -> (class, extra that installs its dependency)."""


class Codec(Protocol):
    """`level` is the writer's business and is not stored; `levels` are those that there are."""

    levels: range

    def encode(self, buffer: Buffer, level: int | None) -> bytes: ...
    def decode(self, buffer: Buffer, raw_nbytes: int, where: str) -> Buffer:
        """Raises CorruptError if the result would not have exactly `raw_nbytes` bytes."""


@cache
def _codec(name: str) -> Codec:
    row = CODECS.get(name)
    if row is None:
        raise UnsupportedError(
            "unknown codec",
            reason="codec",
            expected=" or ".join(["raw", *CODECS]),
            found=repr(name),
            do="upgrade ckptfmt or install the codec",
        )
    module, _, attribute = row[0].partition(":")
    try:
        made: Codec = getattr(importlib.import_module(module), attribute)()
    except ImportError as error:
        raise MissingExtraError(
            f"codec {name!r} needs a package that is not installed",
            reason="codec",
            found=str(error),
            do=f'pip install "ckptfmt[{row[1]}]"' if row[1] else f"pip install {error.name}",
        ) from error
    return made


def parse_codec(text: str) -> tuple[Pipeline, int | None]:
    """`raw`, `zstd` or `zstd:LEVEL` -> the pipeline and the level.

    Raises:
        UsageError: Not a codec that can write.
    """
    if not isinstance(text, str):
        text = repr(text)
    name, _, level = text.partition(":")
    if name == "raw" and not level:
        return RAW, None
    if name not in CODECS or not re.fullmatch(r"(-?[0-9]{1,6})?", level):
        raise UsageError(
            "unknown codec",
            reason="codec",
            expected=" or ".join(["raw", *(f"{n}[:LEVEL]" for n in CODECS)]),
            found=repr(text),
            do="choose one of these",
        )
    if level and int(level) not in _codec(name).levels:
        levels = _codec(name).levels
        raise UsageError(
            f"{name} has no such level",
            reason="codec",
            expected=f"{levels[0]} to {levels[-1]}",
            found=repr(text),
            do=f"choose one of these, or {name!r} alone",
        )
    return ((name,),), int(level) if level else None


def check_pipeline(pipeline: Pipeline, where: str) -> None:
    """UnsupportedError (kind `unsupported-codec`) unless every stage can be decoded here."""
    for stage in pipeline:
        if stage[0] not in CODECS or len(stage) != 1:
            raise UnsupportedError(
                "unknown codec stage",
                reason="codec",
                where=where,
                expected=" or ".join(CODECS),
                found=repr(stage),
                do="upgrade ckptfmt or install the codec",
            )


def encode(buffer: Buffer, pipeline: Pipeline, level: int | None = None) -> Buffer:
    """Raw bytes -> stored bytes."""
    for stage in pipeline:
        buffer = _codec(str(stage[0])).encode(buffer, level)
    return buffer


def decode(buffer: Buffer, pipeline: Pipeline, raw_nbytes: int, where: str = "") -> Buffer:
    """Stored bytes -> exactly `raw_nbytes` raw bytes; the stored digest was checked before.

    Raises:
        CorruptError: The bytes are not a frame of that size.
        UnsupportedError: A stage is unknown.
    """
    check_pipeline(pipeline, where)
    for stage in reversed(pipeline):
        buffer = _codec(str(stage[0])).decode(buffer, raw_nbytes, where)
    return buffer
