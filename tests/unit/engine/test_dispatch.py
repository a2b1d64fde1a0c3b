"""Whose an object is: by the root modules of its type's MRO, through a table of strings."""

from __future__ import annotations

import subprocess
import sys
import types
from collections.abc import Sequence
from importlib import metadata
from typing import Any

import numpy as np
import pytest

from ckptfmt.engine import dispatch
from ckptfmt.engine.adapter import Captured, TensorSource
from ckptfmt.engine.tree import ADAPTERS, EXTEND, adapter_of, flatten, object_kind
from ckptfmt.errors import CkptWarning, MissingExtraError, UnsupportedError, UsageError
from ckptfmt.format import pack_value, parse_value


def made(module: str, name: str, *bases: type, **members: Any) -> type:
    """A class that some other package would define."""
    return type(name, bases, {"__module__": module, **members})


Tensor = made("madeup.core", "Tensor")
Module = made("madeup.nn", "Module")
Size = made("madeup.core", "Size", tuple)


class Adapter:
    """Tensors are ones, modules have one, sizes are values."""

    peers: Sequence[tuple[str, object]] = ()

    def kind(self, obj: object) -> str:
        kinds: dict[type, str] = {Tensor: "tensor", Size: "value"}
        return "stateful" if isinstance(obj, Module) else kinds.get(type(obj), "unknown")

    def source(self, obj: Any, name: str) -> TensorSource:
        return TensorSource("float32", (2,), lambda: np.ones(2, "f4"), id(obj), {"madeup.x": name})

    def capture(self, obj: Any, name: str, peers: Sequence[tuple[str, object]]) -> Captured:
        Adapter.peers = peers
        return Captured(
            {"w": Tensor(), "n": {}}, {"": {"madeup.version": 2}, "w": {"madeup.grad": True}}
        )

    def pack_value(self, obj: Any) -> tuple[str, object]:
        return "madeup.Size", list(obj)

    def unpack_value(self, tag: str, payload: Any) -> object:
        if tag != "madeup.Size":
            raise UnsupportedError("no such value", reason="madeup")
        return Size(payload)


@pytest.fixture(autouse=True)
def _madeup(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = types.ModuleType("madeup_adapter")
    adapter.ADAPTER = Adapter()  # type: ignore[attr-defined]
    framework = types.ModuleType("madeup")
    framework.__spec__ = types.SimpleNamespace()  # type: ignore[assignment]
    monkeypatch.setitem(sys.modules, "madeup_adapter", adapter)
    monkeypatch.setitem(sys.modules, "madeup", framework)
    monkeypatch.setitem(ADAPTERS, "madeup", ("madeup_adapter:ADAPTER", "madeup"))
    monkeypatch.setattr(dispatch, "_adapters_by_type", {})
    monkeypatch.setattr(dispatch, "_adapters_by_root", {})


def test_a_subclass_in_any_module_is_its_frameworks() -> None:
    mine = made("__main__", "Net", Module)()
    assert isinstance(adapter_of(mine), Adapter)
    assert object_kind(mine) == "stateful"
    assert adapter_of(object()) is None


def test_tensors_values_and_modules_go_through_the_adapter() -> None:
    tensor = Tensor()
    flat = flatten(
        {"t": tensor, "again": tensor, "s": Size((2, 3)), "l": [Size((1,))], "m": Module()}
    )
    assert flat.names == ["t", "again", "s", "l", "m/w", "m/n"]
    assert flat.rows[:2] == [0, 0]
    assert parse_value(flat.values[0], EXTEND) == Size((2, 3))
    assert type(parse_value(flat.values[1], EXTEND)[0]) is Size
    rows = {
        key: [(row, parse_value(v)) for row, v in items] for key, items in flat.attributes.items()
    }
    assert rows == {"madeup.x": [(0, "t"), (1, "again"), (4, "m/w")], "madeup.grad": [(4, True)]}
    assert flat.containers == [("m", "dict", pack_value(None))]
    assert flat.container_attributes == {"madeup.version": [(0, pack_value(2))]}


def test_an_adapter_is_told_of_all_its_stateful_objects() -> None:
    one, two = Module(), Module()
    flatten({"a": [one], "b": {"c": two}, "t": Tensor()})
    assert [(name, id(obj)) for name, obj in Adapter.peers] == [("a/0", id(one)), ("b/c", id(two))]


def test_a_value_of_an_absent_framework_is_plain_with_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """M03-14."""
    data = pack_value(Size((2,)), EXTEND)
    monkeypatch.delitem(sys.modules, "madeup")
    with pytest.warns(CkptWarning, match=r"madeup\.Size"):
        assert parse_value(data, EXTEND) == [2]


def test_a_value_that_the_adapter_does_not_know_is_plain_with_a_warning() -> None:
    """M03-14."""

    class Newer:
        def pack(self, obj: object) -> tuple[str, object]:
            return "madeup.Layout", "strided"

        def unpack(self, tag: str, payload: object) -> object: ...

    with pytest.warns(CkptWarning, match=r"madeup\.Layout"):
        assert parse_value(pack_value(object(), Newer()), EXTEND) == "strided"


def test_an_adapter_that_cannot_be_imported_names_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(ADAPTERS, "madeup", ("madeup_nowhere:ADAPTER", "madeup"))
    with pytest.raises(MissingExtraError, match=r"ckptfmt\[madeup\]"):
        adapter_of(Tensor())


def test_an_entry_point_adds_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    point = metadata.EntryPoint("plugged", "madeup_adapter:ADAPTER", dispatch.ENTRY_POINTS)
    asked: list[str] = []

    def entry_points(*, group: str) -> list[metadata.EntryPoint]:
        asked.append(group)
        return [point]

    monkeypatch.setattr(metadata, "entry_points", entry_points)
    monkeypatch.setattr(dispatch, "_entry_points_read", False)
    monkeypatch.setattr(dispatch, "ADAPTERS", dict(ADAPTERS))
    assert isinstance(adapter_of(made("plugged.core", "Thing")()), Adapter)
    assert adapter_of(made("elsewhere", "Thing")()) is None
    assert asked == ["ckptfmt.adapters"]


ARRAY_LIKE = {
    "dtype": np.dtype("f4"),
    "shape": (2, 1),
    "__array__": lambda self, dtype=None, copy=None: np.ones((2, 1), "f4"),
}


def test_an_array_of_jax_is_taken_as_numpy_has_it() -> None:
    array = made("jaxlib.core", "Array", **ARRAY_LIKE)()
    flat = flatten({"a": array, "b": array, "c": type(array)()})
    assert flat.rows == [0, 0, 1]
    assert flat.tensors[0].dtype == "float32"
    assert flat.tensors[0].shape == (2, 1)
    assert flat.tensors[0].fetch().tolist() == [[1], [1]]


def test_an_object_that_is_more_than_its_array_is_refused() -> None:
    series = made("pandas.core", "Series", **ARRAY_LIKE)()
    with pytest.raises(UsageError, match="Series"):
        flatten({"a": series})


def test_flattening_numpy_imports_no_framework() -> None:
    code = (
        "import sys, numpy as np\n"
        "from ckptfmt.engine.tree import flatten\n"
        "flatten({'a': np.ones(2), 'b': [1, {'c': 2.0}], 'g': np.random.default_rng(0)})\n"
        "print(sorted({'torch', 'tensorflow', 'keras', 'jax', 'ckptfmt.torch'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
