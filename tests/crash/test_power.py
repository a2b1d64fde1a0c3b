"""The power fails: what was not synced is lost, or kept in part, and names apart from contents."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import pytest

from ckptfmt import CheckpointError, CkptWarning, StorageError
from ckptfmt.storage.memory import MemoryBackend
from ckptfmt.testing import FaultyBackend

SEEDS = (None, 1, 2)


def prepared(scene: Any) -> MemoryBackend:
    backend = MemoryBackend()
    scene.prepare(backend)
    return backend


@pytest.mark.parametrize(
    "seeds", [SEEDS, pytest.param(range(3, 40), marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_a_power_cut_leaves_the_old_or_the_new_whole(crash: Any, scene: Any, seeds: Any) -> None:
    start = prepared(scene)
    for k in itertools.count():
        faulty = FaultyBackend(crash.copy(start), fail_at=k, mode="from", power=True)
        done = False
        try:
            scene.act(faulty)
            done = True
        except StorageError:
            assert faulty.fired
        for seed in seeds:
            medium = faulty.power_cut(seed)
            crash.check(medium, scene, must=scene.after if done else None)
        if not faulty.fired:
            break
    assert done, "what returned is durable: checked for every seed"


def test_a_save_that_is_not_durable_costs_only_itself(crash: Any) -> None:
    """A durable save after it syncs what it reuses of it (I1)."""
    start = prepared(crash.scenes["next step"])
    lost = 0
    for seed in (None, *range(8)):
        faulty = FaultyBackend(crash.copy(start), power=True)
        crash.save(faulty, 3, durable=False)
        crash.save(faulty, 3, name="same")  # all of it reused
        medium = faulty.power_cut(seed)
        for name, version in ((crash.step(1), 1), (crash.step(2), 2), ("same", 3)):
            assert crash.load_version(medium, name) == version
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CkptWarning)
            try:
                lost += crash.load_version(medium, crash.step(3)) is None
            except CheckpointError:
                lost += 1
    assert lost > 0, "the save was durable after all"


class NeverSynced(FaultyBackend):
    """A store whose sync says that it did."""

    def sync(self, keys: Any) -> None:
        pass


def test_a_store_that_does_not_sync_is_caught(crash: Any) -> None:
    """The canary of this file."""
    scene = crash.scenes["next step"]
    caught = 0
    for seed in range(12):
        faulty = NeverSynced(prepared(scene), power=True)
        scene.act(faulty)
        try:
            crash.check(faulty.power_cut(seed), scene, must=scene.after)
        except (AssertionError, CheckpointError, Warning):
            caught += 1
    assert caught > 0
