"""Saving again: same tree, same bytes; another tree, only what differs; any history reads right."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import ckptfmt
from ckptfmt.testing import difference

SMALL = st.fixed_dictionaries(
    {
        "w": st.integers(0, 3).map(lambda v: np.full(3000, v, np.int32)),
        "b": st.integers(0, 3).map(lambda v: np.full(5, v, np.float32)),
        "v": st.integers(0, 2),
    }
)


def keys(store: ckptfmt.Store, prefix: str) -> dict[str, bytes]:
    backend = store.backend
    return {entry.key: bytes(backend.get(entry.key)) for entry in backend.list(prefix)}


@settings(max_examples=40)
@given(SMALL, st.sampled_from(["raw", "zstd"]))
def test_the_same_tree_writes_no_data_the_second_time(tree: Any, codec: str) -> None:
    """I6."""
    store = ckptfmt.Store("memory://")
    first = ckptfmt.save(tree, store, step=1, codec=codec, durable=False)
    before = keys(store, "data/")
    second = ckptfmt.save(tree, store, step=2, codec=codec, durable=False)
    assert second.written_nbytes == 0
    assert keys(store, "data/") == before
    assert second.digest == first.digest


@settings(max_examples=40)
@given(SMALL, st.sampled_from(["raw", "zstd"]))
def test_the_same_tree_makes_the_same_files_anywhere(tree: Any, codec: str) -> None:
    """I6: no base, same options: same data files, same tree."""
    stores = [ckptfmt.Store("memory://"), ckptfmt.Store("memory://")]
    infos = [ckptfmt.save(tree, s, step=1, codec=codec, durable=False) for s in stores]
    assert infos[0].digest == infos[1].digest
    assert keys(stores[0], "data/") == keys(stores[1], "data/")


class History(RuleBasedStateMachine):
    """A store against a dict: whatever was saved, replaced, deleted, collected or damaged."""

    @initialize(codec=st.sampled_from(["raw", "zstd"]), late_key=st.booleans())
    def begin(self, codec: str, late_key: bool) -> None:
        self.store = ckptfmt.Store("memory://", storage_options={"late_key": late_key})
        self.codec = codec
        self.model: dict[str, Any] = {}
        self.tagged: dict[str, str] = {}
        self.aside: dict[str, Any] = {}

    def save(self, tree: Any, **options: Any) -> Any:
        options |= {"codec": self.codec, "chunk_nbytes": 4096, "durable": False}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ckptfmt.CkptWarning)
            return ckptfmt.save(tree, self.store, **options)

    @rule(tree=SMALL, step=st.integers(0, 3), how=st.sampled_from(["error", "replace", "keep"]))
    def save_step(self, tree: Any, step: int, how: Any) -> None:
        name = f"step-{step:016d}"
        held = self.model.get(name)
        same = held is not None and not difference(held, tree)
        try:
            self.save(tree, step=step, if_exists=how)
        except ckptfmt.ExistsError:
            assert how == "error"
            assert held is not None
            assert not same
        except ckptfmt.UsageError:
            assert how == "replace"
            assert name in self.tagged.values()
            assert not same
        else:
            assert how != "error" or held is None or same
            if held is None or how == "replace":
                self.model[name] = tree

    @rule(tree=SMALL)
    def save_main(self, tree: Any) -> None:
        held = self.model.get("main")
        try:
            self.save(tree)
            self.model["main"] = tree
        except ckptfmt.UsageError:
            assert "main" in self.tagged.values()
            assert difference(held, tree)

    @precondition(lambda self: bool(self.model))
    @rule(data=st.data())
    def delete(self, data: Any) -> None:
        name = data.draw(st.sampled_from(sorted(self.model)))
        try:
            self.store.delete(name)
            assert name not in self.tagged.values()
            del self.model[name]
        except ckptfmt.UsageError:
            assert name in self.tagged.values()

    @precondition(lambda self: bool(self.model))
    @rule(data=st.data(), tag=st.sampled_from(["good", "bad"]))
    def tag(self, data: Any, tag: str) -> None:
        name = data.draw(st.sampled_from(sorted(self.model)))
        self.store.tag(tag, name)
        self.tagged[tag] = name

    @precondition(lambda self: bool(self.tagged))
    @rule(data=st.data())
    def untag(self, data: Any) -> None:
        tag = data.draw(st.sampled_from(sorted(self.tagged)))
        self.store.untag(tag)
        del self.tagged[tag]

    @rule()
    def collect(self) -> None:
        self.store.gc(grace_s=0)

    @rule()
    def collect_in_two_phases(self) -> None:
        self.store.gc(grace_s=600)

    @precondition(lambda self: bool(self.model))
    @rule(data=st.data())
    def damage_and_verify(self, data: Any) -> None:
        """A rotten file is found; saving the same trees again heals the store."""
        entries = list(self.store.backend.list("data/"))
        if not entries:
            return
        entry = data.draw(st.sampled_from(entries))
        good = bytes(self.store.backend.get(entry.key))
        at = data.draw(st.integers(0, len(good) - 1))
        self.store.backend.put(entry.key, good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        used = any(entry.key[5:] in self.store.open(name).index.files.ids for name in self.model)
        assert self.store.verify().ok != used
        self.store.backend.put(entry.key, good)

    @invariant()
    def everything_is_there(self) -> None:
        assert self.store.names() == sorted(self.model)
        for name, tree in self.model.items():
            assert not difference(ckptfmt.load(self.store, at=name), tree)
        steps = [name for name in self.model if name != "main"]
        latest = self.store.latest()
        expected = max(steps) if steps else ("main" if self.model else None)
        assert (latest.name if latest else None) == expected
        assert self.store.tags() == self.tagged

    def teardown(self) -> None:
        if hasattr(self, "store"):
            if self.store.names():  # a place without a store is no store without damage
                assert self.store.verify().ok
            self.store.gc(grace_s=0)
            self.store.gc(grace_s=0)
            needed = {f for name in self.model for f in self.store.open(name).index.files.ids}
            left = {entry.key[5:] for entry in self.store.backend.list("data/")}
            assert left == needed


TestHistory = History.TestCase
TestHistory.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)
