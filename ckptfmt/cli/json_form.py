"""Values as JSON: one document, bytes as numbers, non-finite floats as strings.

JSON has no NaN; a reader that gets `NaN` bare fails, so it is the string "NaN" (and "Infinity",
"-Infinity"). A complex number is [real, imaginary], bytes are hex, a tuple or set is an array.
"""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import IO, Any

SCHEMA = 1


def json_float(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def json_value(value: object) -> Any:
    """Anything that a checkpoint or a report holds, as what `json.dumps` takes."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return json_float(float(value))
    if isinstance(value, complex):
        return [json_float(value.real), json_float(value.imag)]
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value).hex()
    if isinstance(value, Mapping):
        return {k if isinstance(k, str) else str(k): json_value(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [json_value(v) for v in value]
    if isinstance(value, (datetime.datetime, datetime.date)):
        return value.isoformat()
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: json_value(getattr(value, f.name)) for f in fields(value)}
    tolist = getattr(value, "tolist", None)
    if callable(tolist):
        return _json_array(value)
    return str(value)


def _json_array(array: Any) -> Any:
    """A NumPy array or scalar; exotic dtypes go through the widest type that holds them exactly."""
    kind = array.dtype.kind
    if kind in "Mm":
        return json_value(array.astype(str).tolist())
    if kind == "V":
        name = array.dtype.name
        if "float" in name:
            return json_value(array.astype("float64").tolist())
        if "int" in name:
            return json_value(array.astype("int64").tolist())
    return json_value(array.tolist())


def write_json(document: Mapping[str, object], file: IO[str], *, indent: int | None = 2) -> None:
    """One document and a newline. ASCII: escape sequences in names stay text."""
    text = json.dumps(
        {"schema": SCHEMA, **json_value(document)},
        ensure_ascii=True,
        allow_nan=False,
        indent=indent,
    )
    file.write(text + "\n")
