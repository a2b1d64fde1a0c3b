"""Any bytes are a value or a FormatError, in bounded memory. Spec: 03-names §3.5, 09 §9.2."""

from __future__ import annotations

import tracemalloc
import warnings
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptfmt.errors import CkptWarning, FormatError
from ckptfmt.format import pack_value, parse_value
from ckptfmt.format.value_kinds import KINDS_BY_TAG

TAGS = [*KINDS_BY_TAG, "type", "torch.Size", "nonsense"]
PLAIN: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["float32", "int4", "str32", "list", "x", "PosixPath", "2020-01-02"])
    | st.binary(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=3) | st.integers(0, 3), inner, max_size=3)
        | st.tuples(st.sampled_from(TAGS), inner).map(
            lambda pair: msgpack.ExtType(1, msgpack.packb(list(pair)))
        )
    ),
    max_leaves=12,
)


def parse(data: bytes) -> None:
    """A value that packs again, or a FormatError."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CkptWarning)
        try:
            value = parse_value(data)
        except FormatError as error:
            assert error.kind.startswith(("corrupt-", "unsupported-value-"))  # noqa: PT017
            return
        again = pack_value(value)
        assert pack_value(parse_value(again)) == again


@given(st.binary(max_size=200))
def test_any_bytes(data: bytes) -> None:
    parse(data)


@settings(max_examples=300)
@given(PLAIN)
def test_any_msgpack_with_our_tags(raw: Any) -> None:
    parse(msgpack.packb(raw))


@settings(max_examples=200)
@given(PLAIN, st.data())
def test_any_damage_to_msgpack_with_our_tags(raw: Any, data: st.DataObject) -> None:
    packed = bytearray(msgpack.packb(raw))
    for _ in range(data.draw(st.integers(1, 3))):
        packed[data.draw(st.integers(0, len(packed) - 1))] = data.draw(st.integers(0, 255))
    parse(bytes(packed))


@pytest.mark.parametrize(
    "data",
    [
        b"\xdd\xff\xff\xff\xff",
        (b"\xdd" + (1_000_000).to_bytes(4, "big")) * 1000 + bytes(995_000),
        (b"\xdf" + (400_000).to_bytes(4, "big")) * 1000 + bytes(995_000),
        b"\x91" * 1_000_000,
        (b"\x81\xa0" * 500_000),
        b"\xc9" + (999_990).to_bytes(4, "big") + b"\x01" + bytes(999_990),
    ],
    ids=["header", "arrays", "maps", "deep-arrays", "deep-maps", "ext"],
)
def test_memory_stays_in_proportion_to_the_bytes(data: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(FormatError):
            parse_value(data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 64 * len(data) + (1 << 20)
