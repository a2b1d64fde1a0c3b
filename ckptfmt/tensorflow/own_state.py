"""Objects whose state is not in variables: lookup tables, vocabularies, iterators over data.

Each kind has an `OwnState` that takes its state out as a small tree and puts it back. They are
leaves of a survey: nothing below them is looked at.
"""

from __future__ import annotations

from typing import Any, Protocol

from ckptfmt.engine import Captured, Target
from ckptfmt.tensorflow.iterators import ITERATORS
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


_KINDS: tuple[OwnState, ...] = (TABLES, VOCABULARIES, BOUNDARIES, ITERATORS)


def own_state(obj: object) -> OwnState | None:
    """The kind of an object whose state is not in variables; None for all others."""
    return next((kind for kind in _KINDS if kind.holds(obj)), None)
