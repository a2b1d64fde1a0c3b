"""The random generators of every rank in a checkpoint that one rank writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ckptfmt.errors import warn
from ckptfmt.torch.rng import read_rng_state


def rng_of_all_ranks(world_size: int) -> list[Any]:
    """The state of the generators of each rank, by rank; every rank calls it."""
    mine = read_rng_state(cuda=True)
    if world_size == 1:
        return [mine]
    states: list[Any] = [None] * world_size
    torch.distributed.all_gather_object(states, mine)
    return states


def rng_of_rank(states: Sequence[Any], rank: int, world_size: int) -> Mapping[str, Any] | None:
    """A rank's own state for `set_rng_state`; None, with a CkptWarning, in another world."""
    if len(states) == world_size:
        state: Mapping[str, Any] = states[rank]
        return state
    warn(
        f"the checkpoint has random states of {len(states)} ranks and this run has {world_size}: "
        "it draws other numbers than an uninterrupted one"
    )
    return None


class RankGenerators:
    """The generators of every rank, as they were when this was made; every rank makes one.

    A restore puts the stored states here and sets none: each rank takes its own, when it is time.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size
        self._states = rng_of_all_ranks(world_size)
        self._restored = False

    def state_dict(self) -> dict[str, Any]:
        return {"ranks": self._states}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._states, self._restored = state["ranks"], True

    def mine(self) -> Mapping[str, Any] | None:
        """What `set_rng_state` takes on this rank; None where nothing was restored, or, with a
        CkptWarning, from another number of ranks."""
        if not self._restored:
            return None
        return rng_of_rank(self._states, self._rank, self._world_size)
