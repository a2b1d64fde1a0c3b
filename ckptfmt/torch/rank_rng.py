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
