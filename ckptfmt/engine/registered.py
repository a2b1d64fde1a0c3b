"""Types that the user registered: packed to plain data and back, never to code.

The registry is the process's own; a file names an entry and can add none. Spec: 03-names §3.3, §3.5.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from ckptfmt.errors import UsageError

T = TypeVar("T")

NAME_MAX = 255
_TAKEN: tuple[type, ...] = (
    *(type(None), bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset),
    *(object, type, np.ndarray),
)


@dataclass(frozen=True, slots=True)
class Registered:
    """One registered type."""

    cls: type
    name: str
    pack: Callable[[Any], Any]
    unpack: Callable[[Any], Any]


BY_TYPE: dict[type, Registered] = {}
BY_NAME: dict[str, Registered] = {}


def register_type(
    cls: type[T], name: str, *, pack: Callable[[T], Any], unpack: Callable[[Any], T]
) -> None:
    """Add a kind of object that trees may hold.

    Args:
        cls: Objects of exactly this type, not of its subclasses.
        name: What the file calls it. Keep it for ever: old checkpoints have it.
        pack: Object -> plain data: a dict, list or value. Tensors may be in dicts, lists and tuples.
        unpack: What `pack` made, read back -> an object. It should know its older forms.
    Raises:
        UsageError: The name belongs to another type, or the type is one that trees hold anyway.
    """
    if not isinstance(cls, type) or cls in _TAKEN or issubclass(cls, np.generic):
        raise UsageError(
            "this type cannot be registered",
            reason="register-type",
            found=getattr(cls, "__qualname__", repr(cls)[:80]),
            do="register a class of your own",
        )
    if not isinstance(name, str) or not name or len(name.encode("utf-8", "replace")) > NAME_MAX:
        raise UsageError(
            "the name of a registered type is not legal",
            reason="register-type",
            expected=f"a str of 1 to {NAME_MAX} bytes",
            found=ascii(name)[:80],
            do='pass a short text such as "myproject.Config"',
        )
    other = BY_NAME.get(name)
    if other is not None and _place(other.cls) != _place(cls):
        raise UsageError(
            "the name belongs to another registered type",
            reason="register-type",
            where=ascii(name),
            found=".".join(_place(other.cls)),
            do="choose another name",
        )
    if not callable(pack) or not callable(unpack):
        raise UsageError(
            "pack and unpack must be callable", reason="register-type", where=ascii(name)
        )
    if other is not None:
        # The class statement ran again (a notebook, a reload): the new class takes the name.
        BY_TYPE.pop(other.cls, None)
    BY_TYPE[cls] = BY_NAME[name] = Registered(cls, name, pack, unpack)


def _place(cls: type) -> tuple[str, str]:
    return cls.__module__, cls.__qualname__


def packed(entry: Registered, obj: object) -> Any:
    """What a registered type packs itself into."""
    try:
        return entry.pack(obj)
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(
            f"pack of the registered type {entry.name!r} failed",
            reason="register-type",
            found=f"{type(error).__name__}: {error}"[:200],
            do="fix the pack function given to register_type",
        ) from error
