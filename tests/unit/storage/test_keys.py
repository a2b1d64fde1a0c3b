"""What is a key and what could leave the store."""

from __future__ import annotations

import pytest

from ckptfmt.errors import UsageError
from ckptfmt.storage import check_key
from ckptfmt.storage.keys import check_prefix, is_key


@pytest.mark.parametrize(
    "key", ["a", "data/3f9a", "a.b/c~0", "...", "a/..b", "é/ü", "a b", ".hidden"]
)
def test_a_relative_path_of_plain_parts_is_a_key(key: str) -> None:
    assert check_key(key) == key
    assert is_key(key)


@pytest.mark.parametrize(
    "key", ["", "/", "/a", "a/", "a//b", ".", "..", "a/..", "../a", "a/./b", "a\\b", "\0", "\ud800"]
)
def test_what_could_leave_the_store_or_name_nothing_is_refused(key: str) -> None:
    assert not is_key(key)
    with pytest.raises(UsageError) as caught:
        check_key(key)
    assert caught.value.kind == "usage-key"
    str(caught.value).encode("ascii")


@pytest.mark.parametrize("prefix", ["", "a", "a/", "a/b", ".", "..", "a/..", "a/."])
def test_a_prefix_may_end_anywhere(prefix: str) -> None:
    assert check_prefix(prefix) == prefix


@pytest.mark.parametrize("prefix", ["/", "/a", "../", "a/../b", "a//", "\\", "a\0"])
def test_a_prefix_that_no_key_can_have_is_refused(prefix: str) -> None:
    with pytest.raises(UsageError):
        check_prefix(prefix)
