"""Plain values: exact types, tags as the specification has them, and what is refused. Spec: 03-names §3.5."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime as dt
import enum
import math
import pathlib
import struct
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import msgpack
import numpy as np
import pytest

from ckptfmt.errors import CkptWarning, CorruptError, FormatError, UnsupportedError, UsageError
from ckptfmt.format.values import pack_value, parse_value

Point = collections.namedtuple("Point", ["x", "y"])


class Typed(NamedTuple):
    a: int
    b: str = ""


class Norm(collections.namedtuple("Norm", ["x", "y"])):
    def norm(self) -> float:
        return math.hypot(self.x, self.y)


class Colour(enum.IntEnum):
    RED = 1


class Name(str):
    pass


class Rate(np.float64):
    pass


@dataclasses.dataclass
class Config:
    rate: float = 0.1


def ext(tag: str, payload: object) -> bytes:
    return bytes(msgpack.packb(msgpack.ExtType(1, msgpack.packb([tag, payload]))))


UTC = dt.UTC
CEST = dt.timezone(dt.timedelta(hours=2), "CEST")
SAME = [
    *(None, True, False, 0, -1, 2**63, 2**64 - 1, -(2**63), 1.5, -0.0, math.inf, "", "é\0", b"\0"),
    *([], {}, [1, [2.0, [None]]], {"a": {"b": []}}, 1 + 2j, complex(-0.0, math.inf)),
    *((), (1, (2,)), set(), {1, "a", (2, 3)}, frozenset({b"x"}), {frozenset({1}): {2}}),
    *({1: "a", "1": "b", None: 0, (1, 2): 3, 2.5: 4}, collections.OrderedDict(b=1, a=2)),
    *(collections.Counter({25: 1, 50: 2}), collections.defaultdict(list, {1: [2]})),
    *(collections.defaultdict(None, a=1), collections.defaultdict(dict)),
    *(np.bool_(True), np.int8(-3), np.uint64(2**64 - 1), np.float16(1.5), np.float32(0.1)),
    *(np.float64(0.1), np.complex64(1 + 2j), np.str_("a\0"), np.str_(""), np.bytes_(b"a\0\0")),
    *(np.datetime64("2020-01-02T03", "ns"), np.timedelta64(5, ("s", 25)), np.void(b"abc")),
    *(ml_dtypes.bfloat16(1.5), ml_dtypes.int4(-3), ml_dtypes.float8_e4m3fn(2)),
    *(np.dtype("float32"), np.dtype("<U5"), np.dtype("M8[ns]"), np.dtype(ml_dtypes.bfloat16)),
    *(pathlib.Path("/a/b"), pathlib.PurePosixPath("x"), pathlib.PureWindowsPath("c:/x")),
    *(dt.date(2020, 1, 2), dt.timedelta(-1, 5, 6), UTC, CEST, dt.time(1, 2, 3, 4)),
    *(dt.datetime(2020, 1, 2), dt.datetime(2020, 1, 2, 3, tzinfo=CEST), dt.time(1, tzinfo=UTC)),
    *(range(1, 10**30, 3), slice(1, None, 2), bytearray(b"x"), collections.deque([1, [2]], 3)),
    *(types.SimpleNamespace(a=[1]), argparse.Namespace(lr=0.1, tags={"x"})),
    *(list(range(3000)), ["x" * 5000, {"k": (1,)}], [{"a": 1}, {"b": 2}]),
]


@pytest.mark.parametrize("value", SAME, ids=lambda v: f"{type(v).__name__}-{repr(v)[:20]}")
def test_a_value_comes_back_with_its_exact_type(value: Any) -> None:
    packed = pack_value(value)
    back = parse_value(packed)
    assert type(back) is type(value)
    assert repr(back) == repr(value)
    assert pack_value(back) == packed


@pytest.mark.parametrize("digits", [19, 20, 21, 100, 5000])
def test_ints_of_any_size_come_back(digits: int) -> None:
    for value in (10**digits, -(10**digits), 2 ** (8 * digits), -(2 ** (8 * digits - 1))):
        assert parse_value(pack_value(value)) == value


def test_the_payload_of_a_nan_is_kept() -> None:
    for bits in (0x7FF8000000000001, 0xFFF8000000000000, 0x7FF800000000BEEF):
        value = struct.unpack("<d", struct.pack("<Q", bits))[0]
        back = parse_value(pack_value({"a": [value, complex(value, value)]}))["a"]
        for part in (back[0], back[1].real, back[1].imag):
            assert struct.pack("<d", part) == struct.pack("<Q", bits)
        scalar = np.array([bits], "<u8").view("<f8")[0]
        assert parse_value(pack_value(scalar)).tobytes() == struct.pack("<Q", bits)


def test_a_namedtuple_is_rebuilt_by_its_fields() -> None:
    for value in (Point(1, [2]), Typed(1), Norm(3, Point(1, (2,)))):
        back = parse_value(pack_value(value))
        assert type(back).__name__ == type(value).__name__
        assert back._fields == value._fields
        assert back == value
    one, two = parse_value(pack_value([Point(1, 2), Point(3, 4)]))
    assert type(one) is type(two)


def test_a_dict_keeps_its_order() -> None:
    for value in ({"b": 1, "a": 2}, {2: 0, 1: 0, "0": 0}, collections.OrderedDict(z=1, y=2)):
        assert list(parse_value(pack_value(value))) == list(value)


def test_equal_sets_have_equal_bytes() -> None:
    one, two = set[str](), set[str]()
    for i in range(50):
        one.add(f"w{i}")
        two.add(f"w{49 - i}")
    assert pack_value(one) == pack_value(two)


@pytest.mark.parametrize(
    ("value", "packed"),
    [
        (2**64, ext("int", b"\0" * 8 + b"\x01")),
        (-(2**63) - 1, ext("int", b"\xff" * 7 + b"\x7f\xff")),
        (1 + 2j, ext("complex", [1.0, 2.0])),
        ((1, "a"), ext("tuple", [1, "a"])),
        ({1: 2}, ext("dict", [[1, 2]])),
        ({"a": 2}, msgpack.packb({"a": 2})),
        (collections.defaultdict(list), ext("defaultdict", ["list", []])),
        (np.float32(1), ext("np", ["float32", struct.pack("<f", 1)])),
        (np.str_("é"), ext("np", ["str32", "é".encode("utf-32-le")])),
        (pathlib.PurePosixPath("a"), ext("path", ["PurePosixPath", "a"])),
        (
            dt.datetime(2020, 1, 2, tzinfo=UTC),
            ext("datetime", ["2020-01-02T00:00:00", 0, [0, None]]),
        ),
    ],
)
def test_bytes_are_those_of_the_specification(value: object, packed: bytes) -> None:
    assert pack_value(value) == packed


@pytest.mark.parametrize(
    ("value", "where", "text"),
    [
        (Colour.RED, "", "an enum"),
        ({"a": [1, Colour.RED]}, "a/1", "an enum"),
        (Config(), "", "register_type"),
        (Name("x"), "", "subclass of str"),
        (Rate(1), "", "float64"),
        ({1: {"b": object()}}, "~3i1/b", "object"),
        ([lambda: 1], "0", "code"),
        (float, "", "code"),
        ({"a": "\ud800"}, "a", "surrogate"),
        ({"\ud800": 1}, "'\\ud800'", "surrogate"),
        ([np.zeros(3)], "0", "array"),
        (collections.defaultdict(lambda: 0), "", "factory"),
        (np.longdouble(1), "", "extended precision"),
        (np.array([(1, 2.0)], "i4,f4")[0], "", "structured"),
        (np.dtype(">f4"), "", "another"),
        (np.dtype(object), "", "object"),
        (memoryview(b""), "", "memoryview"),
        (types.MappingProxyType({}), "", "mappingproxy"),
        (Ellipsis, "", "ellipsis"),
    ],
    ids=lambda v: type(v).__name__,
)
def test_what_would_not_come_back_is_refused_with_its_path(
    value: object, where: str, text: str
) -> None:
    with pytest.raises(UsageError) as caught:
        pack_value(value)
    assert caught.value.where == where
    assert text in str(caught.value)
    assert caught.value.do


def test_attributes_beside_a_namedtuples_fields_are_refused() -> None:
    value = Norm(1, 2)
    value.extra = 3  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match="attributes beside its fields"):
        pack_value(value)


def nested(depth: int, wrap: Callable[[Any], Any]) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = wrap(value)
    return value


@pytest.mark.parametrize(
    "wrap", [lambda v: [v], lambda v: (v,), lambda v: {1: v}, lambda v: {"a": v}]
)
def test_depth_is_bounded_the_same_both_ways(wrap: Callable[[Any], Any]) -> None:
    """M03-12."""
    deepest = nested(63, wrap)
    assert parse_value(pack_value(deepest)) == deepest
    with pytest.raises(UsageError) as caught:
        pack_value(nested(64, wrap))
    assert caught.value.kind == "usage-value-depth"


def test_a_value_that_is_too_deep_is_corrupt() -> None:
    """M03-12."""
    array = b"\x91" * 64 + b"\x01"
    tuples = msgpack.packb(1)
    for _ in range(64):
        tuples = msgpack.packb(msgpack.ExtType(1, b"\x92\xa5tuple\x91" + tuples))
    for data in (array, tuples, b"\x91" * 900 + b"\xc0"):
        with pytest.raises(CorruptError) as caught:
            parse_value(data)
        assert caught.value.kind == "corrupt-value-depth"


def test_a_value_within_itself_is_refused() -> None:
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(UsageError, match="contains itself"):
        pack_value(loop)


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"", "corrupt-msgpack"),
        (b"\xc1", "corrupt-msgpack"),
        (b"\x92\x01", "corrupt-msgpack"),
        (b"\xa1\xff", "corrupt-msgpack"),
        (b"\x82\xa1a\x01\xa1a\x02", "corrupt-msgpack"),
        (b"\xdd\xff\xff\xff\xff", "corrupt-msgpack"),
        (b"\xdf\xff\xff\xff\xff", "corrupt-msgpack"),
        (b"\xc9\xff\xff\xff\xff\x01", "corrupt-msgpack"),
        (b"\x91" * 5000, "corrupt-msgpack"),
        (b"\x01\x02", "corrupt-trailing-bytes"),
        (b"\x81\x01\x02", "corrupt-value"),
        (b"\x81\xc4\x01a\x02", "corrupt-value"),
        (b"\x81\x90\x01", "corrupt-value"),
        (b"\xd6\xff\0\0\0\0", "corrupt-value"),
        (bytes(msgpack.packb(msgpack.ExtType(2, b"\x92\xa3int\xc4\x01\x01"))), "corrupt-value"),
        (bytes(msgpack.packb(msgpack.ExtType(1, b"\x91\xa3int"))), "corrupt-value"),
        (bytes(msgpack.packb(msgpack.ExtType(1, b"\x92\x01\x01"))), "corrupt-value"),
        (
            bytes(msgpack.packb(msgpack.ExtType(1, b"\x92\xa5tuple\x90\x90"))),
            "corrupt-trailing-bytes",
        ),
        *(
            (ext(tag, payload), "corrupt-value")
            for tag, payload in [
                *(("int", b"\x01"), ("int", b""), ("int", b"\0" * 20), ("int", 5), ("int", "x")),
                *(("complex", [1, 2]), ("complex", [1.0]), ("complex", None), ("tuple", {})),
                *(("set", [1, 1]), ("set", [2, 1]), ("set", [[]]), ("frozenset", 1)),
                *(("dict", [[1]]), ("dict", [1]), ("dict", [[1, 2], [1, 3]]), ("dict", [[[], 1]])),
                *(("odict", {"a": 1}), ("counter", 1), ("defaultdict", ["eval", []])),
                *(("defaultdict", [1, []]), ("defaultdict", [None]), ("defaultdict", [None, {}])),
                *(("namedtuple", ["A", ["x"], []]), ("namedtuple", ["A", ["class"], [1]])),
                *(("namedtuple", ["A", ["x", "x"], [1, 2]]), ("namedtuple", ["A b", [], []])),
                *(("namedtuple", ["A", ["_x"], [1]]), ("namedtuple", ["A", ["x()"], [1]])),
                *(("namedtuple", ["A", [1], [1]]), ("namedtuple", [1, [], []])),
                ("namedtuple", ["A", [f"f{i}" for i in range(1001)], [0] * 1001]),
                *(("np", ["float32", b"abc"]), ("np", [1, b""]), ("np", ["float32", "abcd"])),
                *(("np", ["string", b""]), ("np", ["str33", b"a"]), ("np", ["str32", b"\xff" * 4])),
                *(("np", ["int4", b"\xff"]), ("np", ["bytes16", b"a"]), ("np.dtype", 5)),
                *(("path", "a"), ("path", ["Popen", "a"]), ("path", ["PosixPath", 1])),
                *(
                    ("datetime", ["2020-01-02", 0, None]),
                    ("datetime", ["20200102T000000", 0, None]),
                ),
                *(("datetime", ["2020-01-02T00:00:00", 2, None]), ("date", "2020-13-01")),
                *(
                    ("datetime", ["2020-01-02T00:00:00", 0, [10**18, None]]),
                    ("time", ["1", 0, None]),
                ),
                *(("timedelta", [1, 86400, 0]), ("timedelta", [10**12, 0, 0]), ("timezone", None)),
                *(("range", [1, 2]), ("range", [1, 2, 0]), ("range", [1, 2.0, 1]), ("slice", [1])),
                *(
                    ("bytearray", "x"),
                    ("deque", [1, [1, 2]]),
                    ("deque", ["1", []]),
                    ("deque", [-1, []]),
                ),
                *(("namespace", [1]), ("argparse.Namespace", 1), ("type", ["a"]), ("type", [1, 2])),
            ]
        ),
    ],
    ids=lambda v: ascii(v)[:40],
)
def test_wrong_bytes_are_refused_by_kind(data: bytes, kind: str) -> None:
    """M03-11, M03-13, M03-15."""
    with pytest.raises(CorruptError) as caught:
        parse_value(data, where="a/b")
    assert caught.value.kind == kind
    assert caught.value.where == "a/b"


def test_an_unknown_tag_without_a_dot_is_unsupported() -> None:
    """M03-16."""
    with pytest.raises(UnsupportedError) as caught:
        parse_value(ext("multiset", [1]))
    assert caught.value.kind == "unsupported-value-tag"


@pytest.mark.parametrize("data", [ext("np", ["float99", b"a"]), ext("np.dtype", "float99")])
def test_an_unknown_dtype_of_a_scalar_is_unsupported(data: bytes) -> None:
    with pytest.raises(UnsupportedError) as caught:
        parse_value(data)
    assert caught.value.kind == "unsupported-value-dtype"


@pytest.mark.parametrize(
    ("data", "plain", "text"),
    [
        (ext("torch.Size", [2, 3]), [2, 3], "torch.Size"),
        (ext("type", ["my.Config", {"rate": 0.1}]), {"rate": 0.1}, "my.Config"),
    ],
)
def test_a_kind_that_nobody_knows_is_plain_data_with_a_warning(
    data: bytes, plain: object, text: str
) -> None:
    """M03-14."""
    with pytest.warns(CkptWarning, match=text):
        assert parse_value(data) == plain


class Fractions:
    """An extension with one kind, that refuses negative numbers."""

    def pack(self, obj: object) -> tuple[str, object] | None:
        return ("x.Config", {"rate": obj.rate}) if isinstance(obj, Config) else None

    def unpack(self, tag: str, payload: Any) -> object:
        if tag != "x.Config":
            return NotImplemented
        if payload["rate"] < 0:
            raise KeyError("rate")
        return Config(payload["rate"])


def test_an_extension_packs_and_parses_its_kinds_at_any_depth() -> None:
    value = [Config(0.5), {"a": (Config(0.25), {1: Config(1.0)})}]
    assert parse_value(pack_value(value, Fractions()), Fractions()) == value


def test_an_extension_that_refuses_its_data_makes_it_corrupt() -> None:
    with pytest.raises(CorruptError, match=r"x\.Config") as caught:
        parse_value(pack_value(Config(-1.0), Fractions()), Fractions())
    assert caught.value.kind == "corrupt-value"


def test_huge_counts_are_refused_before_they_are_allocated() -> None:
    """M03-13: each of 1,000 levels claims every byte that is left."""
    nbytes = 10_000_000
    data = (b"\xdd" + struct.pack(">I", nbytes)) * 1000 + b"\xc0" * 1000
    with pytest.raises(FormatError):
        parse_value(data + bytes(nbytes - len(data)))
