"""Memory: one store per name, private without one, and an object store on request."""

# A memoryview equals bytes with the same content; mypy does not know.
# mypy: disable-error-code="comparison-overlap"

from __future__ import annotations

import gc

import pytest

from ckptfmt.errors import UsageError
from ckptfmt.storage import Backend, open_backend
from ckptfmt.storage.memory import MemoryBackend
from ckptfmt.testing import BackendSuite
from ckptfmt.types import Key

A = Key("data/a")


class TestMemory(BackendSuite):
    @pytest.fixture
    def backend(self) -> Backend:
        return MemoryBackend()


class TestMemoryAsObjectStore(BackendSuite):
    @pytest.fixture
    def backend(self) -> Backend:
        return MemoryBackend(storage_options={"late_key": False})

    def reopen(self, backend: Backend, *, read_only: bool = False) -> Backend:
        return open_backend(backend.url, storage_options={"late_key": False}, read_only=read_only)

    def test_it_claims_what_an_object_store_has(self, backend: Backend) -> None:
        found = backend.capabilities
        assert (found.late_key, found.map, found.local) == (False, False, False)


def test_a_name_is_one_store_and_no_name_is_a_private_one() -> None:
    MemoryBackend("memory://one-name").put(A, b"x")
    try:
        assert MemoryBackend("memory://one-name").get(A) == b"x"
        assert MemoryBackend("memory://other-name").stat(A) is None
        assert MemoryBackend().stat(A) is None
    finally:
        MemoryBackend.forget("memory://one-name")
    assert MemoryBackend("memory://one-name").stat(A) is None


def test_a_private_store_goes_with_its_last_backend() -> None:
    backend = MemoryBackend()
    url = backend.url
    backend.put(A, b"x")
    assert MemoryBackend(url).get(A) == b"x"
    del backend
    gc.collect()
    assert MemoryBackend(url).stat(A) is None
    MemoryBackend.forget(url)


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(UsageError, match="late"):
        MemoryBackend(storage_options={"late": False})
