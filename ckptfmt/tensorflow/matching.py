"""Which stored leaf belongs to a variable: by path, by an alias, by a unique full name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ckptfmt.engine import Comparison, StoredLeaf
from ckptfmt.format import join_name
from ckptfmt.tensorflow.survey import Found
from ckptfmt.tensorflow.tensors import (
    ALIASES,
    DTYPE,
    FULL_NAME,
    QUANTIZED,
    dtype_name,
    expected_shape,
    raw_variable,
)


def absolute(where: str, name: str) -> str:
    """The name below `where` of something that is called `name` within it."""
    return join_name(where, name) if name else where


def ask(comparison: Comparison, raw: Any, name: str, source: str, rule: str = "") -> bool:
    """Ask for a variable's values."""
    leaf = comparison.stored(source).get(source)
    stored = leaf.shape if leaf is not None and leaf.dtype else None
    if leaf is not None and _is_quantized_otherwise(raw, leaf):
        own, found = raw.dtype.base_dtype.name, str(leaf.attributes.get(DTYPE, leaf.dtype))
        comparison.take(source)
        comparison.mismatch(name, own, found, what="dtype")
        return False
    return comparison.tensor(
        name,
        dtype_name(raw.dtype, name),
        expected_shape(raw, stored),
        source=source if source != name else None,
        rule=rule,
    )


def _is_quantized_otherwise(raw: Any, leaf: StoredLeaf) -> bool:
    """Equal integers do not mean equal numbers where one side is quantized."""
    own = str(raw.dtype.base_dtype.name)
    return bool(leaf.dtype) and (own if own in QUANTIZED else None) != leaf.attributes.get(DTYPE)


Source = tuple[str, str]
"""(stored name, rule): both empty where nothing was found or the name itself matched."""


def match(found: Sequence[Found], stored: Mapping[str, StoredLeaf], where: str) -> list[Source]:
    """Find each variable's stored leaf: by path, by an alias, by a unique full name.

    A leaf that one variable has by its path is nobody else's by full name.
    """
    names = {absolute(where, one.name) for one in found}
    by_alias = stored_aliases(stored, where)
    by_full = unique_full_names(stored)
    uses = Counter(one.full_name for one in found)
    made: list[Source] = []
    for one in found:
        name = absolute(where, one.name)
        aliases = [absolute(where, alias) for alias in one.aliases]
        full = by_full.get(one.full_name, "")
        if name in stored:
            made.append((name, ""))
        elif name in by_alias:
            made.append((by_alias[name], "alias"))
        elif (alias := next((a for a in aliases if a in stored), "")) != "":
            made.append((alias, "alias"))
        elif (alias := next((a for a in aliases if a in by_alias), "")) != "":
            made.append((by_alias[alias], "alias"))
        elif full and full not in names and one.trusted and uses[one.full_name] == 1:
            made.append((full, "full name"))
        else:
            made.append(("", ""))
    return made


def stored_aliases(stored: Mapping[str, StoredLeaf], where: str) -> dict[str, str]:
    """Other path -> stored name."""
    return {
        absolute(where, alias): name
        for name, leaf in stored.items()
        for alias in _texts(leaf.attributes.get(ALIASES))
    }


def _texts(value: object) -> list[str]:
    return [str(item) for item in value] if isinstance(value, (list, tuple)) else []


def home_by_alias(names: Sequence[str], stored: Mapping[str, StoredLeaf], where: str) -> str:
    """Where an object's leaves are stored that had one of these names too; "" if nowhere."""
    for leaf in stored.values():
        for alias in _texts(leaf.attributes.get(ALIASES)):
            full = absolute(where, alias)
            for name in names:
                part = full[len(name) :]
                if full.startswith(f"{name}/") and leaf.name.endswith(part):
                    return leaf.name[: -len(part)]
    return ""


def unique_full_names(stored: Mapping[str, StoredLeaf]) -> dict[str, str]:
    """Full name -> stored name, where only one stored leaf has it."""
    names = {
        name: str(leaf.attributes[FULL_NAME])
        for name, leaf in stored.items()
        if FULL_NAME in leaf.attributes
    }
    uses = Counter(names.values())
    return {full: name for name, full in names.items() if uses[full] == 1}


def claim_aliases(
    comparison: Comparison,
    one: Found,
    stored: Mapping[str, StoredLeaf],
    where: str,
    source: str,
) -> list[str]:
    """Ask for what is stored under a variable's other paths: it must hold the same values.

    Returns:
        The stored names taken.
    """
    taken = []
    if source:
        raw = raw_variable(one.variable, absolute(where, one.name))
        for alias in (absolute(where, text) for text in one.aliases):
            if alias in stored and alias != source:
                ask(comparison, raw, alias, alias)
                taken.append(alias)
    return taken


def report_swaps(
    comparison: Comparison,
    found: Sequence[Found],
    sources: Sequence[Source],
    stored: Mapping[str, StoredLeaf],
    where: str,
) -> None:
    """Refuse variables whose path and full name lead to two different tensors of one shape.

    Keras counts full names by process, so an untrusted one is believed only where both sides have
    exactly the same set of them: then they were counted alike, and crossed ones were swapped.
    """
    by_full = unique_full_names(stored)
    uses = Counter(one.full_name for one in found)
    counted_alike = set(uses) == {
        str(leaf.attributes[FULL_NAME]) for leaf in stored.values() if FULL_NAME in leaf.attributes
    }
    for one, (source, _) in zip(found, sources):
        other = by_full.get(one.full_name, "")
        if not source or not other or other == source or uses[one.full_name] > 1:
            continue
        if not (one.trusted or (one.numbered and counted_alike)):
            continue
        here, there = stored[source], stored[other]
        if here.tensor != there.tensor and (here.dtype, here.shape) == (there.dtype, there.shape):
            comparison.mismatch(
                absolute(where, one.name),
                f"full name {one.full_name}, which is stored as {other}",
                f"full name {here.attributes.get(FULL_NAME, '')} under this path",
            )
