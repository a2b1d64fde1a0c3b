"""Plain values as torch's restricted unpickler takes them."""

from __future__ import annotations

import re
from collections import OrderedDict, defaultdict
from typing import Any

import numpy as np

from ckptfmt.errors import UnsupportedError
from ckptfmt.foreign.exporters.pickle_writer import Call, Named
from ckptfmt.foreign.pytorch.dtypes import DTYPES

_DEVICE = re.compile(r"[a-z]{1,20}(?::[0-9]{1,6})?")
_PLAIN = (type(None), bool, int, float, complex, str, bytes)


def plain(value: Any) -> tuple[Any, str]:
    """(the value in types that are plain data, what that changed or "").

    Raises:
        UnsupportedError: Something in it would need code; `found` is its type.
    """
    remarks: dict[str, None] = {}
    made = _plain(value, remarks)
    return made, ", ".join(remarks)


def _plain(value: Any, remarks: dict[str, None]) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if isinstance(value, np.generic):
        return _scalar(value, remarks)
    if kind is list or kind is tuple:
        return kind(_plain(item, remarks) for item in value)
    if kind in (dict, OrderedDict):
        return kind((_plain(k, remarks), _plain(v, remarks)) for k, v in value.items())
    if kind is set:
        return {_plain(item, remarks) for item in value}
    if kind is frozenset:
        remarks["a set"] = None
        return {_plain(item, remarks) for item in value}
    if isinstance(value, defaultdict):
        remarks["a dict"] = None
        return {_plain(k, remarks): _plain(v, remarks) for k, v in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        remarks["a tuple"] = None
        return tuple(_plain(item, remarks) for item in value)
    return _of_torch(value)


def _scalar(value: np.generic, remarks: dict[str, None]) -> Any:
    made = value.item()
    if type(made) not in _PLAIN or value.dtype.itemsize > 16:
        raise _refused(value)
    remarks[f"a Python {type(made).__name__}"] = None
    return made


def _of_torch(value: Any) -> Any:
    """`torch.Size`, dtypes and devices, whether torch made them or a file's importer."""
    tag, payload = getattr(value, "tag", None), getattr(value, "payload", None)
    kind = type(value)
    if kind.__module__.split(".")[0] == "torch":
        tag = f"torch.{kind.__name__}"
        payload = list(value) if tag == "torch.Size" else str(value).removeprefix("torch.")
    if tag == "torch.Size" and isinstance(payload, list | tuple) and _are_ints(payload):
        return Call("torch.Size", (tuple(payload),))
    if tag == "torch.dtype" and isinstance(payload, str) and payload in DTYPES:
        return Named(f"torch.{payload}")
    if tag == "torch.device" and isinstance(payload, str) and _DEVICE.fullmatch(payload):
        name, _, number = payload.partition(":")
        return Call("torch.device", (name, int(number)) if number else (name,))
    raise _refused(value)


def _are_ints(items: list[Any] | tuple[Any, ...]) -> bool:
    return all(type(item) is int for item in items)


def _refused(value: Any) -> UnsupportedError:
    kind = type(value)
    return UnsupportedError(
        "no plain data",
        reason="export-value",
        found=f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins."),
    )
