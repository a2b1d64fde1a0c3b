"""zstd: one frame with its content size, no dictionary. Spec: codecs/zstd."""

from __future__ import annotations

import zstandard

from ckptfmt.errors import CorruptError

LEVEL_DEFAULT = 1
"""On noise-like weights higher levels cost half the speed and compress no better."""
_MAGIC = b"\x28\xb5\x2f\xfd"


class Zstd:
    """Contexts are made per call: they are cheap beside a chunk and not thread-safe."""

    levels = range(-(1 << 17), zstandard.MAX_COMPRESSION_LEVEL + 1)

    def encode(self, buffer: bytes | bytearray | memoryview, level: int | None) -> bytes:
        compressor = zstandard.ZstdCompressor(
            level=LEVEL_DEFAULT if level is None else level,
            write_content_size=True,
            write_checksum=False,
        )
        return compressor.compress(buffer)

    def decode(self, buffer: bytes | bytearray | memoryview, raw_nbytes: int, where: str) -> bytes:
        """The declared size is compared first: `max_output_size` does not stop a frame that states
        its size, so a bomb would be expanded before any check of the result."""
        if bytes(buffer[:4]) != _MAGIC:
            # A skippable frame would be skipped, and has a "content size" of its own.
            raise CorruptError(
                "not a zstd frame",
                reason="zstd-frame",
                where=where,
                expected=_MAGIC.hex(),
                found=bytes(buffer[:4]).hex(),
                do='restore another step or run "ckptfmt verify"',
            )
        try:
            parameters = zstandard.get_frame_parameters(buffer)
            declared = parameters.content_size
            if declared != raw_nbytes or parameters.dict_id:
                raise CorruptError(
                    "zstd frame declares another size",
                    reason="zstd-size",
                    where=where,
                    expected=f"{raw_nbytes} bytes",
                    found=f"{declared} bytes",
                    do='restore another step or run "ckptfmt verify"',
                )
            raw = zstandard.ZstdDecompressor().decompress(buffer, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise CorruptError(
                "not a zstd frame",
                reason="zstd-frame",
                where=where,
                found=str(error),
                do='restore another step or run "ckptfmt verify"',
            ) from error
        if len(raw) != raw_nbytes:
            raise CorruptError(
                "zstd frame has another size than it declares",
                reason="zstd-size",
                where=where,
                expected=f"{raw_nbytes} bytes",
                found=f"{len(raw)} bytes",
                do='restore another step or run "ckptfmt verify"',
            )
        return raw
