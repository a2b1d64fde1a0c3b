"""Objects whose state is not in variables: lookup tables, vocabularies, iterators over data.

Each kind has an `OwnState` that takes its state out as a small tree and puts it back. They are
leaves of a survey: nothing below them is looked at.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from ckptfmt.engine import Captured, Target, api
from ckptfmt.format import parse_key, split_name
from ckptfmt.tensorflow.iterators import ITERATORS
from ckptfmt.tensorflow.own_store import STORES
from ckptfmt.tensorflow.tables import TABLES
from ckptfmt.tensorflow.vocabularies import BOUNDARIES, VOCABULARIES


class OwnState(Protocol):
    """One kind of such objects; stateless."""

    def holds(self, obj: object) -> bool:
        """Whether an object is of this kind."""

    def capture(self, obj: Any, name: str) -> Captured:
        """Its state; UsageError names `name` if it has none that can be saved."""

    def target(self, obj: Any, name: str) -> Target:
        """What fills it again."""


_KINDS: tuple[OwnState, ...] = (TABLES, VOCABULARIES, BOUNDARIES, ITERATORS, STORES)


def own_state(obj: object) -> OwnState | None:
    """The kind of an object whose state is not in variables; None for all others."""
    return next((kind for kind in _KINDS if kind.holds(obj)), None)


def fill_late(obj: Any, name: str, values: Mapping[str, Any]) -> list[str]:
    """Give an object that came after the restore what is stored below its name.

    Args:
        values: Stored name -> array, of everything that still waits.
    Returns:
        The names that were used; none if nothing is stored for it.
    Raises:
        MismatchError: It does not fit.
    """
    below = [stored for stored in values if stored.startswith(f"{name}/")]
    if below:
        api.restore(_nested({name: obj}), _nested({stored: values[stored] for stored in below}))
    return below


def _nested(flat: Mapping[str, Any]) -> dict[Any, Any]:
    tree: dict[Any, Any] = {}
    for name, value in flat.items():
        *above, last = map(parse_key, split_name(name))
        at = tree
        for key in above:
            at = at.setdefault(key, {})
        at[last] = value
    return tree
