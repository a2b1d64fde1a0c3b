"""What a store holds, by listing alone. Spec: 02-store."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest

import ckptfmt
from ckptfmt.engine.catalog import (
    Tag,
    latest_order,
    list_checkpoints,
    list_indexes,
    list_notes,
    names_text,
    next_generation,
    pack_tag,
    parse_tag,
    parse_time,
    read_head,
    read_index,
)
from ckptfmt.format import step_name
from ckptfmt.storage import open_backend
from ckptfmt.types import Key


@pytest.fixture
def backend() -> Any:
    return open_backend("memory://")


def fill(backend: Any, *keys: str) -> None:
    for key in keys:
        backend.put(Key(key), b"x")


def test_only_names_that_match_are_checkpoints(backend: Any) -> None:
    good = ["main~0", "step-0000000000000007~12", "best.v1~3", "a~9223372036854775807"]
    bad = ["main", "main~", "main~01", "Main~0", "latest~0", "7~0", "step-7~0", "a/b~0", "con~0"]
    bad += ["x~9223372036854775808", "main~-1", "main~0~0", "é~0", ".a~0", "a.~0", "x" * 121 + "~0"]
    fill(backend, *(f"checkpoints/{name}.index" for name in [*good, *bad]))
    fill(backend, "checkpoints/main~1.index.tmp", "checkpoints/main~2", "main~5.index")
    found = list_indexes(backend)
    assert {f"{x.name}~{x.generation}" for rows in found.values() for x in rows} == set(good)


def test_generations_are_numbers_in_order(backend: Any) -> None:
    fill(backend, *(f"checkpoints/main~{g}.index" for g in (10, 2, 0)))
    assert [listed.generation for listed in list_indexes(backend)["main"]] == [0, 2, 10]
    assert next_generation(backend, "main") == 11
    fill(backend, "quarantine/main~17.index", "checkpoints/main-2~30.index")
    assert next_generation(backend, "main") == 18
    assert next_generation(backend, "other") == 0


def test_found_in_both_is_quarantined(backend: Any) -> None:
    fill(backend, "checkpoints/a~0.index", "checkpoints/a~1.index", "checkpoints/b~0.index")
    fill(backend, "quarantine/a~1.index", "quarantine/b~0.index", "quarantine/c~0.index")
    found = list_checkpoints(backend)
    assert {name: [x.generation for x in rows] for name, rows in found.items()} == {"a": [0]}


def test_latest_is_the_highest_step_then_main() -> None:
    names = ["main", "best", *(f"step-{step:016d}" for step in (9, 10, 100))]
    order = [f"step-{step:016d}" for step in (100, 10, 9)] + ["main"]
    assert list(latest_order(names)) == order
    assert list(latest_order(["best"])) == []


def test_notes_are_listed_by_save_in_order(backend: Any) -> None:
    one, two = "a" * 32, "b" * 32
    fill(backend, *(f"notes/{one}~{n}.index" for n in (10, 0, 2)), f"notes/{two}~0.index")
    fill(backend, f"notes/{one}~01.index", "notes/short~0.index", f"notes/{one.upper()}~0.index")
    found = list_notes(backend)
    assert {txn: [n for n, _ in rows] for txn, rows in found.items()} == {one: [0, 2, 10], two: [0]}


def test_a_head_is_read_in_one_small_request_even_behind_much_metadata(counted: Any) -> None:
    ckptfmt.save({"a": 1}, counted.store, metadata={"big": "x" * 200_000})
    [listed] = list_indexes(counted.backend)["main"]
    counted.backend.forget()
    head = read_head(counted.backend, listed.key, listed.nbytes)
    assert len(str(head.about.metadata["big"])) == 200_000
    assert len(counted.backend.reads) <= 2


@pytest.mark.parametrize("nbytes", [0, 1, 287, 288, 400])
def test_an_index_that_is_cut_off_is_corrupt(counted: Any, nbytes: int) -> None:
    ckptfmt.save({"a": 1}, counted.store)
    key = Key("checkpoints/main~0.index")
    counted.backend.put(key, bytes(counted.backend.get(key))[:nbytes])
    [listed] = list_indexes(counted.backend)["main"]
    with pytest.raises(ckptfmt.CorruptError, match=r"main~0\.index"):
        read_index(counted.backend, listed)
    with pytest.raises(ckptfmt.CorruptError):
        read_head(counted.backend, listed.key, listed.nbytes)


def test_tags_are_packed_and_parsed() -> None:
    tag = Tag("best", "main", "ab" * 16)
    assert parse_tag("best", pack_tag(tag)) == tag
    assert json.loads(pack_tag(tag)) == {"name": "main", "digest": "ab" * 16}
    more = json.dumps({"name": "main", "digest": "ab" * 16, "later": [1]}).encode()
    assert parse_tag("best", more) == tag


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"null",
        b"[]",
        b'"x"',
        b"{}",
        b'{"name": "a"}',
        b'{"name": 1, "digest": "a"}',
        b"\xff\xfe",
    ],
)
def test_what_is_no_tag_is_corrupt(data: bytes) -> None:
    with pytest.raises(ckptfmt.CorruptError) as caught:
        parse_tag("best", data)
    assert caught.value.kind == "corrupt-tag"


def test_times_are_utc_and_nothing_depends_on_them() -> None:
    expected = datetime(2026, 1, 2, 3, 4, 5, 678901, UTC)
    assert parse_time("2026-01-02T03:04:05.678901Z") == expected
    assert parse_time("2026-01-02T04:04:05.678901+01:00") == expected
    assert parse_time("2026-01-02T03:04:05.678901") == expected
    assert parse_time("yesterday") == datetime.fromtimestamp(0, UTC)
    assert parse_time("") == datetime.fromtimestamp(0, UTC)


def test_names_in_a_message_are_some() -> None:
    assert names_text({}) == ""
    assert names_text({"b": 0, "a": 0}) == "a, b"
    assert names_text({f"n{i:02}": 0 for i in range(20)}) == "n00, n01, n02, n03 and 16 more"
    steps = {step_name(i): 0 for i in range(20)}
    assert names_text({"b": 0, **steps}) == "b, 12, 13, 14, 15, 16, 17, 18, 19 and 12 more"
