"""What a process may tune: argument > CKPTFMT_* variable > default."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Literal

from ckptfmt.errors import UsageError

DirectIo = Literal["auto", "on", "off"]


@dataclass(frozen=True, slots=True)
class Config:
    """Settings of this process.

    Attributes:
        threads: Threads that write or read one checkpoint; most of them wait for the disk.
        staging_nbytes: Most host memory that staged saves may hold; a larger state is saved while
            the caller waits.
        direct_io: "auto": past the page cache where the file system offers it; "off": never.
    """

    threads: int
    staging_nbytes: int
    direct_io: DirectIo


def _memory_nbytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return 8 << 30


def read_environment(environment: Mapping[str, str]) -> Config:
    """The settings of an environment's CKPTFMT_* variables, defaults elsewhere."""
    return check(
        Config(
            threads=_number(environment, "CKPTFMT_THREADS", min(8, max(4, os.cpu_count() or 4))),
            staging_nbytes=_number(environment, "CKPTFMT_STAGING_BYTES", _memory_nbytes() // 2),
            direct_io=environment.get("CKPTFMT_DIRECT_IO", "auto"),  # type: ignore[arg-type]
        )
    )


def _number(environment: Mapping[str, str], key: str, default: int) -> int:
    text = environment.get(key)
    if text is None:
        return default
    if not text.isascii() or not text.isdigit():
        raise UsageError(
            "environment variable is no number",
            reason="config",
            where=key,
            expected="a whole number",
            found=repr(text),
            do="correct or unset it",
        )
    return int(text)


def check(config: Config) -> Config:
    """The same config. UsageError if a setting is not legal."""
    wrong = {
        "threads": type(config.threads) is not int or config.threads < 1,
        "staging_nbytes": type(config.staging_nbytes) is not int or config.staging_nbytes < 0,
        "direct_io": config.direct_io not in ("auto", "on", "off"),
    }
    for key, is_wrong in wrong.items():
        if is_wrong:
            raise UsageError(
                "setting is not legal",
                reason="config",
                where=key,
                expected={
                    "threads": "an int, 1 or more",
                    "staging_nbytes": "an int, 0 or more bytes",
                    "direct_io": "auto, on or off",
                }[key],
                found=repr(getattr(config, key)),
                do="choose another",
            )
    return config


_current: Config | None = None


def current() -> Config:
    """The settings now in force; the environment is read once."""
    global _current
    if _current is None:
        _current = read_environment(os.environ)
    return _current


def configure(
    *,
    threads: int | None = None,
    staging_nbytes: int | None = None,
    direct_io: DirectIo | None = None,
) -> AbstractContextManager[None]:
    """Change settings of this process at once; as a context manager, only inside the block.

    Args:
        threads: Threads that write or read one checkpoint.
        staging_nbytes: Most host memory that staged saves may hold, in bytes.
        direct_io: "auto", "on" or "off".
    Raises:
        UsageError: A setting is not legal; nothing was changed.
    """
    global _current
    old = current()
    given = {"threads": threads, "staging_nbytes": staging_nbytes, "direct_io": direct_io}
    _current = check(replace(old, **{k: v for k, v in given.items() if v is not None}))  # type: ignore[arg-type]
    return _Restore(old)


class _Restore(AbstractContextManager[None]):
    """Puts earlier settings back when a block is left."""

    def __init__(self, old: Config) -> None:
        self._old = old

    def __enter__(self) -> None:
        return None

    def __exit__(self, *error: object) -> None:
        global _current
        _current = self._old
