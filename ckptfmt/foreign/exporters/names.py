"""Names that other formats have for leaves: keys joined by dots, or as they are, and never twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from ckptfmt.errors import UnsupportedError
from ckptfmt.format import parse_key, split_name


def keys_of(name: str) -> list[str]:
    """The keys that lead to a leaf as text; those that are none (an optimizer's ints) as Python
    writes them."""
    return [str(parse_key(part)) for part in split_name(name)]


def joined_names(names: Iterable[str], separator: str) -> dict[str, str]:
    """Leaf name -> its keys joined. Leaves that would share one keep their own name.

    Raises:
        UnsupportedError: Two leaves would still have one name.
    """
    made = {name: separator.join(keys_of(name)) for name in names}
    counts = Counter(made.values())
    for name, text in made.items():
        if counts[text] > 1:
            made[name] = name
    for text, count in Counter(made.values()).items():
        if count > 1:
            raise UnsupportedError(
                "two leaves would have one name",
                reason="export-name",
                where=", ".join(name for name, found in made.items() if found == text),
                found=repr(text),
                do="leave one of them out: names=",
            )
    return made
