"""What every crash test asks of a store that was left by a crash: the old or the new, whole."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptfmt
from ckptfmt import CkptWarning, NotFoundError, Store, VerifyReport
from ckptfmt.engine import flatten, owner
from ckptfmt.engine.catalog import list_indexes, read_index
from ckptfmt.engine.parts import (
    PartsTicket,
    abort_parts,
    begin_parts,
    commit_parts,
    plan_part,
    share_parts,
    write_part,
)
from ckptfmt.engine.plan import SaveOptions
from ckptfmt.engine.request import SaveRequest
from ckptfmt.engine.sharded import Sharded
from ckptfmt.storage import Backend
from ckptfmt.storage.memory import MemoryBackend

FROZEN = np.arange(3000, dtype=np.float32)


def store_over(backend: Backend) -> Store:
    """A Store on a backend that exists only in a test."""
    store = Store("memory://")
    store.backend = backend
    store.url = backend.url
    return store


def tree(version: int) -> dict[str, Any]:
    """A state in which every part says which version it is of; `frozen` never changes."""
    rng = np.random.default_rng(version)
    return {
        "frozen": FROZEN,
        "w": np.full((50, 40), version, np.int32),
        "noise": rng.integers(0, 256, 20_000, np.uint8),
        "small": {"a": np.float64(version), "step": version, "note": f"version {version}"},
    }


def version_of(found: Mapping[str, Any]) -> int:
    """Which version a loaded state is of; fails if it is of two, or damaged."""
    version = int(found["small"]["step"])
    expected = tree(version)
    assert found["small"] == expected["small"]
    assert list(found) == list(expected)
    for name in ("frozen", "w", "noise"):
        assert found[name].dtype == expected[name].dtype
        np.testing.assert_array_equal(found[name], expected[name])
    return version


@dataclass(frozen=True)
class Scene:
    """Something that is done to a store, and what may be there when it was cut short.

    Attributes:
        name: Of the test's parameter.
        prepare: Makes the store that it starts from.
        act: What is cut short.
        before: Checkpoint name -> version, as prepared.
        after: The same when it is done; None where there is none.
    """

    name: str
    prepare: Callable[[Backend], None]
    act: Callable[[Backend], object]
    before: Mapping[str, int | None]
    after: Mapping[str, int | None]


def step(number: int) -> str:
    return f"step-{number:016d}"


def save(backend: Backend, version: int, **options: Any) -> None:
    ckptfmt.save(tree(version), store_over(backend), step=version, **options)


def _two_steps(backend: Backend) -> None:
    for number in (1, 2):
        ckptfmt.save(tree(number), store_over(backend), step=number)


def _main(backend: Backend) -> None:
    ckptfmt.save(tree(1), store_over(backend))


def _garbage(backend: Backend) -> None:
    for number in (1, 2, 3):
        ckptfmt.save(tree(number), store_over(backend), step=number)
    store_over(backend).delete(2)


def save_by_ranks(backend: Backend, version: int, ranks: int = 3, **options: Any) -> None:
    """A save by several ranks, of which each holds some rows of `w` and `noise`."""
    request = SaveRequest(step(version), version, {}, {}, "error", SaveOptions(), timeout_s=0.1)
    ticket = begin_parts(backend, request)
    assert isinstance(ticket, PartsTicket)
    try:
        parts = [
            plan_part(flatten(_share(tree(version), rank, ranks)), ticket, rank, ranks)
            for rank in range(ranks)
        ]
        shares = share_parts(backend, ticket, [part.claim() for part in parts])
        fragments = [write_part(backend, part, shares) for part in parts]
    except BaseException:
        abort_parts(backend, ticket)
        raise
    commit_parts(backend, ticket, fragments)


def _share(whole: dict[str, Any], rank: int, ranks: int) -> dict[str, Any]:
    for name in ("w", "noise"):
        array = whole[name]
        start, stop = (len(array) * r // ranks for r in (rank, rank + 1))
        origin = (start, *(0 for _ in array.shape[1:]))
        whole[name] = Sharded(array.shape, [(origin, array[start:stop])])
    return whole


SCENES = (
    Scene(
        "first save",
        lambda backend: None,
        lambda backend: ckptfmt.save(tree(1), store_over(backend), step=1, timeout_s=0.1),
        {step(1): None},
        {step(1): 1},
    ),
    Scene(
        "next step",
        _two_steps,
        lambda backend: ckptfmt.save(tree(3), store_over(backend), step=3, timeout_s=0.1),
        {step(1): 1, step(2): 2, step(3): None},
        {step(1): 1, step(2): 2, step(3): 3},
    ),
    Scene(
        "next step by ranks",
        _two_steps,
        lambda backend: save_by_ranks(backend, 3),
        {step(1): 1, step(2): 2, step(3): None},
        {step(1): 1, step(2): 2, step(3): 3},
    ),
    Scene(
        "main again",
        _main,
        lambda backend: ckptfmt.save(tree(2), store_over(backend), timeout_s=0.1),
        {"main": 1},
        {"main": 2},
    ),
    Scene(
        "delete",
        _two_steps,
        lambda backend: store_over(backend).delete(2),
        {step(1): 1, step(2): 2},
        {step(1): 1, step(2): None},
    ),
    Scene(
        "gc",
        _garbage,
        lambda backend: store_over(backend).gc(grace_s=0),
        {step(1): 1, step(2): None, step(3): 3},
        {step(1): 1, step(2): None, step(3): 3},
    ),
)


def load_version(backend: Backend, name: str) -> int | None:
    try:
        found = ckptfmt.load(store_over(backend), at=name)
    except NotFoundError:
        return None
    return version_of(found)


def litter(backend: Backend) -> list[str]:
    """What gc should have taken: files that nothing refers to, remains of saves and collectors."""
    referred: set[str] = set()
    for folder in ("checkpoints/", "quarantine/"):
        for generations in list_indexes(backend, folder).values():
            for listed in generations:
                referred |= set(read_index(backend, listed).files.ids)
    keys = [entry.key for entry in backend.list("")]
    return [
        key
        for key in keys
        if key.startswith(("parts/", "gc/", "tmp/"))
        or (key.startswith("data/") and key[5:] not in referred)
    ]


def check(backend: Backend, scene: Scene, *, must: Mapping[str, int | None] | None = None) -> None:
    """The whole list, in the next process: old or new, verify, a save, gc, and no litter.

    Args:
        must: What is there for certain; None: each name as before or as after.
    """
    owner._active.clear()  # whoever was at work is dead
    seen = {}
    for name in scene.before:
        seen[name] = load_version(backend, name)
        allowed = {scene.before[name], scene.after[name]} if must is None else {must[name]}
        assert seen[name] in allowed, f"{name} is {seen[name]}"
    recover(backend)
    for name, version in seen.items():
        assert load_version(backend, name) == version, "recovery changed a checkpoint"
    assert load_version(backend, "next") == 9
    assert litter(backend) == []


def recover(backend: Backend, *, faulted: bool = False) -> None:
    """What the next process does: verify, save, collect. A store that fails verifies nothing."""
    store = store_over(backend)
    # A first save that was cut short before it made a store left nothing to verify.
    report = store.verify() if list(backend.list("")) else VerifyReport()
    assert report.ok or faulted, str(report.problems)
    ckptfmt.save(tree(9), store, name="next", timeout_s=0.1)
    store.gc(grace_s=0)
    store.gc(grace_s=0)  # what a replacement left is garbage one run later


def copy(backend: Backend, *, late_key: bool = True) -> MemoryBackend:
    made = MemoryBackend(storage_options={"late_key": late_key})
    for entry in backend.list(""):
        made.put(entry.key, backend.get(entry.key))
    return made


@pytest.fixture(autouse=True)
def _no_warnings_of_ours() -> Iterator[None]:
    """A crash may not leave a store that warns: nothing that is seen is damaged."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", CkptWarning)
        yield


@dataclass(frozen=True)
class Crash:
    """The functions above, for test modules: they cannot import one another."""

    scenes: Mapping[str, Scene]
    step: Callable[[int], str]
    save: Callable[..., None]
    tree: Callable[[int], dict[str, Any]]
    version_of: Callable[[Mapping[str, Any]], int]
    store_over: Callable[[Backend], Store]
    load_version: Callable[[Backend, str], int | None]
    litter: Callable[[Backend], list[str]]
    check: Callable[..., None]
    recover: Callable[..., None]
    copy: Callable[..., MemoryBackend]


@pytest.fixture(scope="session")
def crash() -> Crash:
    return Crash(
        {scene.name: scene for scene in SCENES},
        step,
        save,
        tree,
        version_of,
        store_over,
        load_version,
        litter,
        check,
        recover,
        copy,
    )


@pytest.fixture
def quick_path(tmp_path: Path) -> Iterator[Path]:
    """A directory where fsync costs nothing, if there is one: a killed process does not lose what
    the kernel has."""
    shared = Path("/dev/shm")
    if not os.access(shared, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=shared) as path:
        yield Path(path)


@pytest.fixture(params=[scene.name for scene in SCENES])
def scene(request: pytest.FixtureRequest, crash: Crash) -> Scene:
    return crash.scenes[request.param]
