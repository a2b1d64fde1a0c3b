"""Renaming stored leaves before they are compared: exact names or prefixes, or a function."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias, TypeVar

from ckptfmt.engine.adapter import StoredLeaf
from ckptfmt.errors import UsageError

T = TypeVar("T")
Rename: TypeAlias = "Mapping[str, str] | Callable[[str], str]"


def renamed_leaves(
    leaves: Sequence[StoredLeaf], rename: Rename
) -> tuple[list[StoredLeaf], dict[str, str]]:
    """Leaves under their target names, and what changed: stored name -> target name.

    A rule of a mapping takes a stored name, or a name and all below it; the longest that fits wins.

    Raises:
        UsageError: A rule matches nothing, or two leaves end up under one name.
    """
    if not rename:
        return list(leaves), {}
    if not callable(rename) and not isinstance(rename, Mapping):
        raise UsageError(
            "rename is neither a dict nor a function",
            reason="rename",
            expected="stored name -> target name",
            found=type(rename).__name__,
            do='for example rename={"net": "model"}',
        )
    used: set[str] = set()
    made, changed, owner = [], {}, dict[str, str]()
    for leaf in leaves:
        new = rename(leaf.name) if callable(rename) else _apply(rename, leaf.name, used)
        if not isinstance(new, str):
            raise UsageError(
                "rename gives no name",
                reason="rename",
                where=repr(leaf.name),
                found=type(new).__name__,
                do="return the name as a str; the same one to leave it",
            )
        if new in owner:
            raise UsageError(
                "two stored leaves get one name",
                reason="rename",
                where=repr(new),
                found=f"{owner[new]!r} and {leaf.name!r}",
                do="make the rules one-to-one",
            )
        owner[new] = leaf.name
        if new != leaf.name:
            changed[leaf.name] = new
        made.append(leaf if new == leaf.name else replace(leaf, name=new, origin=leaf.name))
    if not callable(rename):
        for rule in rename:
            if rule not in used:
                raise UsageError(
                    "rename rule matches no stored leaf",
                    reason="rename",
                    where=repr(rule),
                    expected="a stored name, or what stands before a / in one",
                    do="write it so, or pass a function of a name; ckptfmt show lists them",
                )
    return made, changed


def renamed_keys(table: Mapping[str, T], rename: Rename) -> dict[str, T]:
    """The same for a table by container name."""
    if not rename:
        return dict(table)
    used: set[str] = set()
    return {
        rename(name) if callable(rename) else _apply(rename, name, used): row
        for name, row in table.items()
    }


def renamer(rename: Rename) -> Callable[[str], str]:
    """The new name of a stored one that need not be a leaf's."""
    if callable(rename):
        return rename
    return lambda name: _apply(rename, name, set())


def _apply(rules: Mapping[str, str], name: str, used: set[str]) -> str:
    best = ""
    found = False
    for rule in rules:
        fits = name == rule or rule == "" or name.startswith(f"{rule}/")
        if fits and (not found or len(rule) > len(best)):
            best, found = rule, True
    if not found:
        return name
    used.add(best)
    if best == "":
        return f"{rules[best]}/{name}" if rules[best] else name
    rest = name[len(best) :]
    return rules[best] + rest if rules[best] else rest.removeprefix("/")
