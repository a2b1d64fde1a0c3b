"""Documents to be mutated, how, and the reference reader as the judge of what comes out."""

from __future__ import annotations

import copy
import importlib.util
import random
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]

EDGES = [
    *(0, 1, 2, 3, 4, 7, 8, 63, 64, 65, 255, 256, 4095, 4096, 4097, 2**16 - 1, 2**20),
    *(2**30, 2**30 + 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53, 2**61, 2**62, 2**63 - 1),
    *(2**63, 2**64 - 64, 2**64 - 1),
]
OTHERS: list[Any] = [
    *(None, True, 0, -1, 2**64 - 1, 1.5, float("nan"), "", "text", b"", b"\0", b"\xff" * 16),
    *([], [[]], [None], ["a"], [b"a"], {}, {"a": 1}, {"rows": b"", "values": []}),
]


def _load(name: str, path: Path) -> ModuleType:
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


@pytest.fixture(scope="session")
def documents() -> ModuleType:
    """`tests/unit/format/documents.py`: an index and a data file taken apart."""
    return _load("ckptfmt_test_documents", ROOT / "tests" / "unit" / "format" / "documents.py")


@pytest.fixture(scope="session")
def reference() -> ModuleType:
    """`spec/reference_reader.py`: shares no code with the package."""
    return _load("ckptfmt_reference_reader", ROOT / "spec" / "reference_reader.py")


class Mutator:
    """Changes parts of a document; what it may do is what an attacker may, digests included."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def mutate(self, document: Any, sections: tuple[str, ...]) -> None:
        """One change: of a row, a column, a table, or of a whole section's bytes."""
        rng = self.rng
        if rng.random() < 0.1:
            section = rng.choice(sections)
            from_bytes = self.bytes_of(document, section)
            document.set(section, self.damage(from_bytes))
            return
        slots = list(document.slots())
        if not slots:
            return
        path, value = rng.choice(slots)
        if isinstance(value, np.ndarray) and rng.random() < 0.9:
            document.set(path, self.column(value))
        elif isinstance(value, list) and value and rng.random() < 0.9:
            document.set(path, self.items(value))
        elif rng.random() < 0.3:
            document.drop(path)
        else:
            document.set(path, copy.deepcopy(rng.choice([*OTHERS, rng.choice(slots)[1]])))

    @staticmethod
    def bytes_of(document: Any, section: str) -> bytes:
        module = sys.modules["ckptfmt_test_documents"]
        made: bytes = module.pack(document.get(section))
        return made

    def column(self, column: Any) -> Any:
        rng, rows = self.rng, len(column)
        column = column.copy()
        if rows == 0:
            return rng.choice([bytes(8), b"\1", np.ones(1, column.dtype)])
        one, two = rng.randrange(rows), rng.randrange(rows)
        match rng.randrange(8):
            case 0 | 1 | 2:
                edge = rng.choice([*EDGES, int(column.flat[two])])
                step = rng.choice([0, 0, 1, -1]) + edge
                column[one] = step % (1 << 8 * column.dtype.itemsize)
            case 3:
                column[[one, two]] = column[[two, one]]
            case 4:
                return np.delete(column, one, axis=0)
            case 5:
                return np.insert(column, one, column[two], axis=0)
            case 6:
                column[one] = column[two]
            case 7:
                return self.damage(column.tobytes())
        return column

    def items(self, items: list[Any]) -> list[Any]:
        rng, items = self.rng, [*items]
        one, two = rng.randrange(len(items)), rng.randrange(len(items))
        match rng.randrange(6):
            case 0:
                items[one], items[two] = items[two], items[one]
            case 1:
                del items[one]
            case 2:
                items.insert(one, items[two])
            case 3:
                items[one] = items[two]
            case 4:
                items[one] = rng.choice(OTHERS)
            case 5:
                item = items[one]
                if isinstance(item, str):
                    items[one] = rng.choice([item + "/x", item[:-1], item.upper(), "~9", "a//b"])
                elif isinstance(item, bytes):
                    items[one] = self.damage(item)
        return items

    def damage(self, data: bytes) -> bytes:
        rng, made = self.rng, bytearray(data)
        at = rng.randrange(len(made) + 1)
        match rng.randrange(5):
            case 0:
                made[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                del made[at : at + rng.choice([1, 2, 4, 8, 16])]
            case 2:
                made[at:at] = rng.choice(
                    [b"\0", b"\xc0", b"\x80", b"\x90", b"\xdd\xff\xff\xff\xff", b"\xdf\0\0\xff\xff",
                     b"\xc6\x7f\xff\xff\xff", b"\xd6\xff\0\0\0\0", b"\xd4\1\xc0", b"\xc1"]
                )  # fmt: skip
            case 3:
                return bytes(made[:at])
            case 4:
                width = rng.choice([2, 4, 8])
                made[at : at + width] = rng.choice([b"\0", b"\xff", b"\x7f"]) * width
        return bytes(made)


@pytest.fixture(scope="session")
def mutator() -> type[Mutator]:
    return Mutator
