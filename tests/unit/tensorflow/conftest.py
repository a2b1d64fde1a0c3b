"""TensorFlow, quiet; and a save and a restore of the adapter alone, without the engine."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import pytest
import tensorflow as tf

from ckptfmt.engine import MatchBy, StoredLeaf, TensorSource
from ckptfmt.format import escape_key, join_name
from ckptfmt.tensorflow import ADAPTER

# Two replicas for the tests of tf.distribute: it can be said only before TensorFlow is first used.
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
)


class Answers:
    """The engine's side of a comparison, as plainly as it can be written."""

    def __init__(self, leaves: Mapping[str, StoredLeaf]) -> None:
        self.leaves = dict(leaves)
        self.asked: dict[str, str] = {}
        self.rules: dict[str, str] = {}
        self.problems: list[str] = []
        self.ties: dict[str, str] = {}
        self.pended: list[str] = []
        self.match_by: MatchBy = "name"
        self.matched_by: dict[str, str] = {}

    def stored(self, below: str) -> Mapping[str, StoredLeaf]:
        return {
            name: leaf
            for name, leaf in self.leaves.items()
            if not below or name == below or name.startswith(below + "/")
        }

    def attributes(self, name: str) -> Mapping[str, object]:
        return {}

    def tensor(
        self,
        name: str,
        dtype: str,
        shape: Sequence[int],
        *,
        source: str | None = None,
        rule: str = "",
        boxes: object = None,
    ) -> bool:
        leaf = self.leaves.get(source or name)
        if leaf is None:
            self.problems.append(f"missing {name}")
            return False
        self.asked[name] = source or name
        if rule:
            self.rules[name] = rule
        if leaf.dtype != dtype:
            self.problems.append(f"dtype {name}: {dtype} {leaf.dtype}")
        elif leaf.shape != tuple(shape):
            self.problems.append(f"shape {name}: {tuple(shape)} {leaf.shape}")
        else:
            return True
        return False

    def value(self, name: str, *, source: str | None = None, rule: str = "") -> bool:
        raise NotImplementedError

    def subtree(self, name: str) -> bool:
        raise NotImplementedError

    def in_parts(self, stored: str, boxes: object) -> None:
        raise NotImplementedError

    def moved(self, name: str, to: str) -> None:
        raise NotImplementedError

    def surplus(self, name: str) -> None:
        raise NotImplementedError

    def wanted(self, name: str) -> bool:
        return True

    def renamed(self, name: str) -> str:
        return name

    def leave(self, name: str) -> None:
        raise NotImplementedError

    def take(self, name: str) -> None:
        """It keeps no list of what is unexpected."""

    def missing(self, name: str, *, spare: bool = False) -> None:
        self.problems.append(f"missing {name}")

    def mismatch(self, name: str, expected: str, found: str, *, what: str = "kind") -> None:
        self.problems.append(f"{what} {name}: {expected} | {found}")

    def pending(self, name: str, *, source: str | None = None) -> None:
        self.pended.append(source or name)

    def tie(self, name: str, what: str) -> None:
        self.ties[name] = what

    @property
    def unexpected(self) -> list[str]:
        used = {*self.asked.values(), *self.pended}
        return [name for name in self.leaves if name not in used]


class Values(dict[str, Any]):
    undoable = True

    def own(self, name: str) -> Any:
        return self[name].copy()

    def parts(self, name: str) -> Any:
        raise NotImplementedError

    def subtree(self, name: str) -> Any:
        raise NotImplementedError


class Saved:
    """What the adapter captured of a tree of objects."""

    def __init__(self, tree: Mapping[str, Any]) -> None:
        self.leaves: dict[str, StoredLeaf] = {}
        self.arrays = Values()
        self._rows: dict[object, int] = {}
        peers = list(tree.items())
        for name, obj in peers:
            if ADAPTER.kind(obj) == "tensor":
                self._add(name, ADAPTER.source(obj, name), {})
                continue
            captured = ADAPTER.capture(obj, name, peers)
            self._walk(name, "", captured.tree, captured.attributes)

    def _walk(
        self, root: str, name: str, tree: Any, attributes: Mapping[str, Mapping[str, object]]
    ) -> None:
        for key, item in tree.items():
            below = join_name(name, escape_key(key))
            if isinstance(item, dict):
                self._walk(root, below, item, attributes)
            else:
                full = join_name(root, below)
                source = item if isinstance(item, TensorSource) else ADAPTER.source(item, full)
                self._add(full, source, attributes.get(below, {}))

    def _add(self, name: str, source: TensorSource, more: Mapping[str, object]) -> None:
        row = len(self._rows)
        if source.identity is not None:
            row = self._rows.setdefault(source.identity, row)
        else:
            self._rows[name] = row
        array = source.fetch()
        assert array.shape == source.shape
        assert array.flags.c_contiguous
        self.arrays[name] = np.array(array)
        self.leaves[name] = StoredLeaf(
            name, source.dtype, source.shape, row, attributes={**source.attributes, **more}
        )

    def restore(self, tree: Mapping[str, Any]) -> Answers:
        """Fill `tree` if it matches; the answers say what did not."""
        answers = Answers(self.leaves)
        peers = list(tree.items())
        targets = [target for n, obj in peers if (target := ADAPTER.target(obj, n, peers))]
        for target in targets:
            target.compare(answers)
        if not answers.problems and not answers.unexpected:
            values = Values({n: self.arrays[source] for n, source in answers.asked.items()})
            for target in sorted(targets, key=lambda target: target.order):
                target.bind(values)
        return answers


@pytest.fixture(scope="session")
def strategy() -> Any:
    """The one of this process: a second one on the same devices would give its collective operations
    the numbers of the first one's, and TensorFlow takes them for the same."""
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


@pytest.fixture
def saved() -> Callable[[Mapping[str, Any]], Saved]:
    """Capture a tree of objects through the adapter."""
    return Saved
