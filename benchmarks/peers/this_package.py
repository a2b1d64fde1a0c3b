"""ckptfmt itself, by its public interface."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

PACKAGE = "ckptfmt"


def convert(flat: Mapping[str, Any]) -> dict[str, Any]:
    return dict(flat)


def save(own: Mapping[str, Any], folder: Path) -> None:
    import ckptfmt

    ckptfmt.save(own, folder, name="bench", if_exists="replace", bases=())


def begin(own: Mapping[str, Any], folder: Path) -> Callable[[], object]:
    import ckptfmt

    return ckptfmt.save_async(own, folder, name="bench", if_exists="replace", bases=()).result


def load(folder: Path) -> Mapping[str, Any]:
    import ckptfmt

    found: Mapping[str, Any] = ckptfmt.load(folder, at="bench", mode="auto")
    return found


def map(folder: Path, *, verify: bool = True) -> Mapping[str, Any]:
    import ckptfmt

    found: Mapping[str, Any] = ckptfmt.load(folder, at="bench", mode="mmap", verify=verify)
    return found


def restore(own: Mapping[str, Any], folder: Path) -> None:
    import ckptfmt

    assert ckptfmt.restore(own, folder, at="bench")


def count(folder: Path) -> int:
    import ckptfmt

    return len(ckptfmt.open(folder, at="bench"))


def part(folder: Path, name: str) -> Any:
    import ckptfmt

    with ckptfmt.open(folder, at="bench") as checkpoint:
        return checkpoint[name].read()
