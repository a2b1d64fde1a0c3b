"""What a restore fills: an optimizer.

One that is not built is built when it is bound, on the variables of its model; where those do not
exist yet, its state waits for it to be built.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import keras

from ckptfmt.engine import ORDER_OPTIMIZER, Comparison, Staged, StoredLeaf
from ckptfmt.errors import MismatchError
from ckptfmt.tensorflow import keras_optimizer
from ckptfmt.tensorflow.arrivals import fitting, put
from ckptfmt.tensorflow.assigning import Assigned, held_values
from ckptfmt.tensorflow.deferred import Waiting, current, note_counter, note_target
from ckptfmt.tensorflow.hooks import Listener, listen
from ckptfmt.tensorflow.keras_optimizer import Peers
from ckptfmt.tensorflow.matching import absolute, ask
from ckptfmt.tensorflow.optimizer_kinds import kind_of
from ckptfmt.tensorflow.survey import name_of
from ckptfmt.tensorflow.tensors import is_optimizer, raw_variable

_SCALE = "dynamic_scale"


class OptimizerTarget:
    """A Keras optimizer, or one of tf.compat.v1.train.

    `undo` leaves one that was built for the restore built, with its slots at their initial values,
    which is how its first step would have found them.
    """

    def __init__(self, optimizer: Any, name: str, peers: Peers) -> None:
        self.name = name
        self.order = ORDER_OPTIMIZER
        self._optimizer = optimizer
        self._kind = kind_of(optimizer)
        self._peers = peers
        self._assigned = Assigned()
        self._build_on: list[Any] = []
        self._asked: list[str] = []
        self._stored: Mapping[str, StoredLeaf] = {}
        self._pending: list[str] = []
        self._known: set[str] = set()
        self._wanted: Callable[[str], bool] = lambda name: True
        self._waiting: OptimizerWaiting | None = None

    def compare(self, comparison: Comparison) -> None:
        self._stored = stored = followed(comparison, self.name, self._peers)
        shown = self._optimizer
        self._build_on, self._asked, self._pending = [], [], []
        if self._is_of_another_class(comparison):
            comparison.take(self.name)
            return
        later = False
        if not self._kind.is_built(shown):
            owners = keras_optimizer.names_of_owners(stored, self.name)
            later = bool(owners) and not keras_optimizer.all_exist(owners, self._peers)
            if owners and not later:
                others = keras_optimizer.names_of_owners(comparison.stored(""), "") - owners
                self._build_on = self._kind.build_on(shown, self._peers, owners, others)
                shown = self._kind.built_copy(shown, self._build_on)
        taken: set[str] = set()
        named = named_variables(shown, self.name, self._peers)
        for name, (variable, aliases) in named.items():
            raw = raw_variable(variable, name)
            found = next((n for n in (name, *aliases) if n in stored), name)
            source = stored[found].name if found in stored else name
            rule = "alias" if found != name else "renamed variable" if source != name else ""
            if ask(comparison, raw, name, source, rule):
                self._asked.append(name)
            taken.add(found)
        self._known = set(named)
        self._wanted = comparison.wanted
        waits = set(stored) if later else self._scale_to_come()
        self._pending = [name for name in stored if name in waits and name not in taken]
        for name in self._pending:
            comparison.pending(name, source=stored[name].name)

    def _scale_to_come(self) -> set[str]:
        """What a LossScaleOptimizer makes when it is built, whatever the one inside is built on: all
        that it is known by if that one has no slots."""
        optimizer = self._optimizer
        if not isinstance(optimizer, keras.optimizers.LossScaleOptimizer) or optimizer.built:
            return set()
        return {absolute(self.name, name) for name in (_SCALE, "step_counter")}

    def _is_of_another_class(self, comparison: Comparison) -> bool:
        """Say so if what is stored is the state of a class that has nothing to do with this one: a
        slot of one name is another thing there. Counter and learning rate alone may be taken."""
        leaves = comparison.stored(self.name)
        found = self._kind.other_class(leaves, self._optimizer)
        slot = absolute(self.name, f"{keras_optimizer.STATE}/variable/slot")
        owners = keras_optimizer.names_of_owners(leaves, self.name)
        if not found or not (owners or comparison.wanted(slot)):
            return False
        comparison.mismatch(
            self.name,
            f"the state of {type(self._optimizer).__name__}",
            f"that of {found} (restore into {found} to go on with it, or leave {self.name} out of "
            "names= to begin anew with this one)",
        )
        return True

    def bind(self, staged: Staged) -> None:
        asked = [name for name in self._asked if name in staged]
        if asked:
            if self._build_on and not self._kind.is_built(self._optimizer):
                self._kind.build(self._optimizer, self._build_on)
            variables = named_variables(self._optimizer, self.name, self._peers)
            for name in asked:
                variable = variables[name][0]
                note_counter(name, raw_variable(variable, name))
                self._assigned.assign(variable, staged.own(name), name, keep=staged.undoable)
        values = held_values(staged, self._pending, self._stored)
        if values:
            self._waiting = OptimizerWaiting(
                self._optimizer, self.name, self._peers, values, self._missing
            )
        note_target(self)

    def undo(self) -> None:
        if self._waiting is not None:
            self._waiting.deferred.drop(self._waiting)
            self._waiting = None
        self._assigned.undo()

    def unfilled(self) -> list[str]:
        """Names of variables that were made after the restore and had no value in it."""
        late = [] if self._waiting is None else self._waiting.arrived
        named = named_variables(self._optimizer, self.name, self._peers)
        return [name for name in named if name not in late and self._missing(name)]

    def _missing(self, name: str) -> bool:
        """True for a slot that was not there and takes part in the restore."""
        return name not in self._known and self._wanted(name)


class OptimizerWaiting(Waiting):
    """Slots that wait for the optimizer to be built."""

    def __init__(
        self,
        optimizer: Any,
        name: str,
        peers: Peers,
        values: dict[str, Any],
        missing: Callable[[str], bool],
    ) -> None:
        super().__init__(optimizer, name, current(), values)
        self._kind = kind_of(optimizer)
        self._peers = peers
        self._missing = missing
        again = partial(self.raise_again, optimizer)
        self.hooked(listen(optimizer, self._kind.builds, Listener(again, self._built)))
        scale = values.get(absolute(name, _SCALE))
        if scale is not None and isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            # An eager step scales its loss before the optimizer is built, and undoes it afterwards.
            begin = partial(setattr, optimizer, "initial_scale", float(scale))
            end = partial(setattr, optimizer, "initial_scale", optimizer.initial_scale)
            self.hooked(listen(optimizer, "scale_loss", Listener(begin, end)))

    def _built(self) -> None:
        try:
            self._fill()
        except MismatchError as error:
            self.refuse(self.obj, error)
            raise
        self.settle()

    def _fill(self) -> None:
        rules = self.deferred.rules
        ready, missing = [], []
        for name, (variable, aliases) in named_variables(self.obj, self.name, self._peers).items():
            stored = next((one for one in (name, *aliases) if one in self.values), "")
            if stored:
                ready.append(
                    (variable, name, stored, fitting(variable, self.values[stored], rules, name))
                )
            elif self._missing(name) and rules.missing(name):
                missing.append(name)
        used = {stored for _, _, stored, _ in ready}
        left = [name for name in self.values if name not in used and rules.unexpected(name)]
        if self._kind.whole and self.deferred.strict and (missing or left):
            lines = [f"  missing in the checkpoint: {name}" for name in missing[:20]]
            lines += [f"  not in the target: {name}" for name in left[:20]]
            raise MismatchError(
                "an optimizer that was built after the restore disagrees with the checkpoint:\n"
                + "\n".join(lines),
                reason="tree",
                where=self.name,
                do="put the model whose variables it optimizes into the tree of the restore",
            )
        for variable, name, stored, value in ready:
            put(variable, value, stored)
            self.take(stored, name)


def followed(comparison: Comparison, name: str, peers: Peers) -> dict[str, StoredLeaf]:
    """What is stored of an optimizer, the state of variables that `rename=` moved under the new ones.

    Such a variable is told by where it was: `m/a/kernel`, which is `net/enc/kernel` now, makes
    `state/a/kernel/velocity` that of `enc/kernel`. Of variables whose paths end alike it is the one
    of the shortest; where two are as short and go to different names, the state stays.
    """
    stored = comparison.stored(name)
    if not any(leaf.origin for leaf in comparison.stored("").values()):
        return dict(stored)
    to: dict[str, tuple[int, set[str]]] = {}
    for peer, obj in peers:
        for leaf in () if is_optimizer(obj) else comparison.stored(peer).values():
            parts = (leaf.origin or leaf.name).split("/")
            within = leaf.name[len(peer) :].lstrip("/")
            for depth in range(len(parts)):
                end = "/".join(parts[depth:])
                new = within if depth else leaf.name  # in full where it optimizes several models
                least, names = to.get(end, (depth, set[str]()))
                if depth <= least:
                    to[end] = depth, {new, *(names if depth == least else ())}
    moved = {one: _follow(one, leaf, to) for one, leaf in stored.items()}
    uses = Counter(moved.values())
    return {moved[one] if uses[moved[one]] == 1 else one: leaf for one, leaf in stored.items()}


def _follow(name: str, leaf: StoredLeaf, to: Mapping[str, tuple[int, set[str]]]) -> str:
    """The name of a slot after its variable has moved; one that was renamed itself stays."""
    mark = f"/{keras_optimizer.STATE}/"
    head, _, rest = name.rpartition(mark)
    owner, _, slot = rest.rpartition("/")
    _, new = to.get(owner, (0, set[str]()))
    if not head or len(new) != 1 or (leaf.origin and leaf.origin.rpartition(mark)[2] != rest):
        return name
    return f"{head}{mark}{next(iter(new))}/{slot}"


def named_variables(optimizer: Any, name: str, peers: Peers) -> dict[str, tuple[Any, list[str]]]:
    """Absolute name -> the optimizer's variable, and other names it may be stored under: such as no
    other of its variables has."""
    rows = [
        (absolute(name, name_of(keys, name)), variable, [name_of(one, name) for one in aliases])
        for keys, variable, aliases in kind_of(optimizer).variables(
            optimizer, name, peers, elsewhere=True
        )
    ]
    uses = Counter(alias for _, _, aliases in rows for alias in {*aliases})
    names = {own for own, _, _ in rows}
    return {
        own: (
            variable,
            [
                full
                for alias in aliases
                if uses[alias] == 1 and (full := absolute(name, alias)) not in names
            ],
        )
        for own, variable, aliases in rows
    }
