"""Which stored parameter is which of an optimizer's: by name, by an alias, or by position if asked.

Nothing is touched here and nothing decided about strictness: what is missing, in excess or in
contradiction is listed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ckptfmt.torch.param_names import ParameterNames

Problem = tuple[str, str, str]
"""(where below `param_groups`, expected, found)."""


@dataclass(slots=True)
class Match:
    """Both sides of an optimizer's parameters.

    Attributes:
        stored: Own name -> stored name.
        missing: Own names of which nothing is stored.
        surplus: Stored names that the optimizer does not have.
        problems: What makes the two sides different optimizers.
    """

    stored: dict[str, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    surplus: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def match_by_position(groups: Sequence[Sequence[str]], names: ParameterNames) -> Match:
    """In the order of both sides: for state that was saved without names."""
    match = Match(problems=_group_counts(groups, names, sizes=True))
    if not match.problems:
        for stored, own in zip(groups, names.groups, strict=True):
            match.stored.update(zip(own, stored, strict=True))
    return match


def match_by_name(
    groups: Sequence[Sequence[str]],
    names: ParameterNames,
    aliases: Mapping[str, Sequence[str]],
    follow: Callable[[str], str],
) -> Match:
    """By name; a name of a tied parameter is as good as another, an exact one goes first.

    Args:
        groups: Stored names per parameter group.
        aliases: Stored name -> the other names that the parameter had.
        follow: A stored name as the caller's `rename=` leaves it.
    """
    match = Match(problems=_group_counts(groups, names, sizes=False))
    if match.problems:
        return match
    free: dict[str, str] = {}
    others: dict[str, str] = {}
    for name in (name for group in groups for name in group):
        free[follow(name)] = name
        for alias in aliases.get(name, ()):
            others.setdefault(follow(alias), name)
    candidates: dict[str, list[str]] = {}
    for own in names.flat:
        if own in free:
            match.stored[own] = free.pop(own)
        else:
            candidates[own] = [own, *names.aliases.get(own, ())]
    taken = set(match.stored.values())
    for own, spellings in candidates.items():
        found = [free.get(n) or others.get(n) for n in spellings]
        stored = next((n for n in found if n is not None and n not in taken), None)
        if stored is None:
            match.missing.append(own)
        else:
            taken.add(stored)
            match.stored[own] = stored
    match.surplus = [n for group in groups for n in group if n not in taken]
    _compare_places(match, groups, names)
    return match


def _compare_places(match: Match, groups: Sequence[Sequence[str]], names: ParameterNames) -> None:
    """A parameter in another group would get another learning rate: that is another optimizer."""
    place = {name: position for position, group in enumerate(groups) for name in group}
    for position, group in enumerate(names.groups):
        moved = [n for n in group if n in match.stored and place[match.stored[n]] != position]
        if moved:
            stored = sorted({place[match.stored[n]] for n in moved})
            found = f"{words(moved)} in group {words(map(str, stored))}"
            match.problems.append((str(position), f"{words(moved)} in group {position}", found))


def _group_counts(
    groups: Sequence[Sequence[str]], names: ParameterNames, *, sizes: bool
) -> list[Problem]:
    if len(groups) != len(names.groups):
        return [("", _counted(len(names.groups), "group"), _counted(len(groups), "group"))]
    if not sizes:
        return []
    return [
        (str(i), _counted(len(own), "parameter"), _counted(len(stored), "parameter"))
        for i, (own, stored) in enumerate(zip(names.groups, groups, strict=True))
        if len(own) != len(stored)
    ]


def joint_problem(match: Match, groups: Sequence[Sequence[str]], names: ParameterNames) -> Problem:
    """For state that is one vector over all parameters (LBFGS): the same ones in the same order."""
    own = [match.stored.get(n, n) for n in names.flat]
    stored = [n for group in groups for n in group]
    if own == stored:
        return ("", "", "")
    lacking, extra = [n for n in own if n not in stored], [n for n in stored if n not in own]
    found = "another order"
    if lacking or extra:
        found = "; ".join(
            [f"without {words(lacking)}"] * bool(lacking) + [f"with {words(extra)}"] * bool(extra)
        )
    expected = "the same parameters in the same order (its state is one vector over all of them)"
    return ("", expected, found)


def words(names: Iterable[str]) -> str:
    listed = list(names)
    return ", ".join(listed[:5]) + (f" and {len(listed) - 5} more" if len(listed) > 5 else "")


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" + ("" if count == 1 else "s")
