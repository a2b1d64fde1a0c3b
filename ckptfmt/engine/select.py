"""Selecting leaves by name: `*` within one key, `**` across keys; a container takes all below it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

from ckptfmt.errors import NotFoundError, UsageError
from ckptfmt.types import Select


@lru_cache(maxsize=1024)
def _compiled(pattern: str) -> re.Pattern[str]:
    *runs, last = pattern.split("**")
    # What stands before a later `**` (or, within a run, before a later `*`) is matched at its first
    # place, for good: what follows can take up the rest, so no other place could do better. Without
    # these atomic groups, a pattern of many stars takes a time exponential in their number.
    text = "".join(f"(?>{'.*?' if at else ''}{_run(run)})" for at, run in enumerate(runs))
    text += (".*?" if runs else "") + _run(last, ends=True)
    return re.compile(rf"{text}(?:/.*)?\Z", re.DOTALL)


def _run(text: str, *, ends: bool = False) -> str:
    """The expression of a stretch without `**`; the last star of one that ends may give way."""
    first, *rest = map(re.escape, text.split("*"))
    made = [f"(?>[^/]*?{part})" for part in rest]
    if ends and rest:
        made[-1] = f"[^/]*{rest[-1]}"
    return first + "".join(made)


class Matcher:
    """Whether a leaf name is selected; remembers which patterns have matched something."""

    def __init__(self, select: Select | None) -> None:
        self._call: Callable[[str], bool] | None = None
        self._patterns: tuple[str, ...] = ()
        if select is None:
            self._patterns = ("**",)
        elif isinstance(select, str):
            self._patterns = (select,)
        elif callable(select):
            self._call = select
        else:
            self._patterns = tuple(select) if isinstance(select, Iterable) else (select,)
            for pattern in self._patterns:
                if not isinstance(pattern, str):
                    raise UsageError(
                        "leaves are not selected by this",
                        reason="select",
                        expected="a pattern, several, or a function name -> bool",
                        found=f"{type(pattern).__name__} {pattern!r}"[:80],
                        do='for example "model", ["model/**", "epoch"]',
                    )
        self._matches = [_compiled(pattern).match for pattern in self._patterns]
        self._used = [False] * len(self._matches)
        # The empty pattern is the root's name: it takes all.
        self._everything = any(pattern in ("**", "") for pattern in self._patterns)

    def __call__(self, name: str) -> bool:
        if self._everything:
            return True
        if self._call is not None:
            return bool(self._call(name))
        found = False
        for position, match in enumerate(self._matches):
            if match(name) is not None:
                self._used[position] = found = True
        return found

    @property
    def everything(self) -> bool:
        return self._everything

    def unused(self) -> list[str]:
        """Patterns that have matched nothing so far."""
        if self._everything:
            return []
        return [p for p, used in zip(self._patterns, self._used) if not used]


def select_positions(names: Sequence[str], select: Select | None, where: str) -> list[int]:
    """Positions of the selected names.

    Raises:
        NotFoundError: kind `not-found-name`: a pattern matches nothing; near misses are named.
    """
    matcher = Matcher(select)
    if matcher.everything:
        return list(range(len(names)))
    found = [position for position, name in enumerate(names) if matcher(name)]
    unused = matcher.unused()
    if unused or not found:
        raise NotFoundError(
            "no leaf matches",
            reason="name",
            where=where,
            expected=" and ".join(map(repr, unused)) or "at least one leaf",
            do=nearest(unused[0] if unused else "", names),
        )
    return found


def nearest(name: object, names: Iterable[str]) -> str:
    """What to do about a name that is not there: the nearest ones, or how to list them."""
    pool = list(names)
    if not isinstance(name, str):
        return "leaves are found by name, a str"
    below = [found for found in pool if found.startswith(f"{name}/")]
    if name and below:
        return f"it holds {len(below)} leaves, take one: {below[0]!r}, or all: load(names={name!r})"
    if len(pool) <= 20_000:
        import difflib  # here: a name that is right needs no neighbours

        close = difflib.get_close_matches(name, pool, n=3, cutoff=0.6)
        parts = [n for n in pool if n.rpartition("/")[2] == name.rpartition("/")[2]][:3]
        close = list(dict.fromkeys([*close, *parts]))[:3]
        if close:
            return "did you mean " + " or ".join(map(repr, close)) + "?"
    return 'list the names with "ckptfmt show"'
