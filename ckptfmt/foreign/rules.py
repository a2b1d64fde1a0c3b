"""Rules: leaves under other names, tensors in other layouts, on the way through a conversion.

A rule takes the table of all leaves (name -> `Leaf`) and gives another one, and says what it touched.
A pattern is a regular expression that is searched for in a name (`^` and `$` anchor it); a template
replaces what matched, with `\\1` and `\\g<name>` for its groups. Nothing is read.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from ckptfmt.errors import UsageError
from ckptfmt.foreign import lazy
from ckptfmt.foreign.base import ForeignTensor, like
from ckptfmt.reports import RuleChange, RuleReport


@dataclass(frozen=True, slots=True)
class Leaf:
    """A leaf on its way.

    Attributes:
        origin: Names in the source of what it was made of.
        tensor: The tensor, or None for a plain value.
        value: The plain value.
        steps: What was done to the tensor: `transpose [3, 2] -> [2, 3]`.
    """

    origin: tuple[str, ...]
    tensor: ForeignTensor | None = None
    value: object = None
    steps: tuple[str, ...] = ()

    @property
    def shape(self) -> str:
        """dtype and shape, for reports; "value" for a plain value."""
        return "value" if self.tensor is None else shown(self.tensor)

    def made(self, tensor: ForeignTensor, step: str) -> Leaf:
        """After a step that made another tensor of it."""
        return replace(self, tensor=tensor, steps=(*self.steps, step))


def shown(tensor: ForeignTensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


Leaves = dict[str, Leaf]
Op = Callable[[ForeignTensor], ForeignTensor]


class Table:
    """The table that a rule makes: every name once, in order."""

    def __init__(self, rule: str) -> None:
        self._rule = rule
        self.leaves: Leaves = {}
        self.changes: list[RuleChange] = []
        self.notes: list[str] = []
        self.lost: dict[str, str] = {}
        """What the rule cannot carry -> why: as if the source had it and it were left out."""
        self.dropped: list[str] = []
        """What the caller let it drop, by its name in the source."""

    def keep(self, name: str, leaf: Leaf) -> None:
        old = self.leaves.get(name)
        if old is not None:
            raise UsageError(
                "two leaves get one name",
                reason="rule-name",
                where=repr(name),
                found=f"{_origin(old)} and {_origin(leaf)}",
                do=f"make the rule one-to-one: {self._rule}",
            )
        self.leaves[name] = leaf

    def change(self, before: Mapping[str, Leaf], after: Mapping[str, Leaf], what: str = "") -> None:
        """These leaves became those; nothing: they were dropped."""
        for name, leaf in after.items():
            self.keep(name, leaf)
        if not after:
            self.dropped += [origin for n, leaf in before.items() for origin in leaf.origin or (n,)]
        self.changes.append(
            RuleChange(
                tuple(before),
                tuple(after),
                tuple(leaf.shape for leaf in before.values()),
                tuple(leaf.shape for leaf in after.values()),
                what,
            )
        )


def _origin(leaf: Leaf) -> str:
    return " + ".join(map(repr, leaf.origin)) or "what a rule makes"


class Rule(ABC):
    """One rule. `text` is how reports and errors call it; `must_touch`: one in vain is an error."""

    text: str
    must_touch = True

    @abstractmethod
    def apply(self, leaves: Leaves) -> Table:
        """The table after it. It need not touch anything: the caller minds that."""

    def patterns(self) -> Iterator[str]:
        """What it looks for, for an error that names what is near."""
        yield from ()


@dataclass(slots=True)
class Pattern:
    """A compiled pattern and the template that replaces what it matches; None: the name stays."""

    text: str
    to: str | None = None
    compiled: re.Pattern[str] = field(init=False)

    def __post_init__(self) -> None:
        try:
            self.compiled = re.compile(self.text)
        except (re.error, OverflowError, RecursionError) as error:
            raise UsageError(
                "a rule's pattern is no regular expression",
                reason="rule-pattern",
                where=repr(self.text),
                found=str(error),
            ) from None

    def matches(self, name: str) -> bool:
        return self.compiled.search(name) is not None

    def renamed(self, name: str, to: str | None = None) -> str:
        template = self.to if to is None else to
        if template is None:
            return name
        try:
            return self.compiled.sub(template, name)
        except (re.error, IndexError) as error:
            raise UsageError(
                "a rule's template does not fit its pattern",
                reason="rule-pattern",
                where=f"{self.text!r} -> {template!r}",
                found=str(error),
                expected=r"\1, \2, ... or \g<name> for groups of the pattern",
            ) from None


@dataclass(slots=True)
class Each(Rule):
    """A rule about leaves one by one: those whose names the pattern matches."""

    pattern: Pattern

    takes_values: ClassVar[bool] = False
    """Whether plain values are touched too."""

    def patterns(self) -> Iterator[str]:
        yield self.pattern.text

    def apply(self, leaves: Leaves) -> Table:
        table = Table(self.text)
        for name, leaf in leaves.items():
            if (self.takes_values or leaf.tensor is not None) and self.pattern.matches(name):
                self.touch(table, name, leaf)
            else:
                table.keep(name, leaf)
        return table

    @abstractmethod
    def touch(self, table: Table, name: str, leaf: Leaf) -> None:
        """Put into the table what becomes of a leaf that matches."""


@dataclass(slots=True)
class Rename(Each):
    """Tensors and values under another name."""

    takes_values = True

    @property
    def text(self) -> str:  # type: ignore[override]
        return f"rename '{self.pattern.text}' -> '{self.pattern.to}'"

    def touch(self, table: Table, name: str, leaf: Leaf) -> None:
        table.change({name: leaf}, {self.pattern.renamed(name): leaf})


@dataclass(slots=True)
class Drop(Each):
    """Tensors and values that are left behind because the caller says so."""

    takes_values = True

    @property
    def text(self) -> str:  # type: ignore[override]
        return f"drop '{self.pattern.text}'"

    def touch(self, table: Table, name: str, leaf: Leaf) -> None:
        table.change({name: leaf}, {})


@dataclass(slots=True)
class Transform(Each):
    """Tensors that match, each made another one: `what` says how, `op` does it."""

    what: str
    op: Op

    @property
    def text(self) -> str:  # type: ignore[override]
        to = "" if self.pattern.to is None else f" -> '{self.pattern.to}'"
        return f"{self.what} '{self.pattern.text}'{to}"

    def touch(self, table: Table, name: str, leaf: Leaf) -> None:
        assert leaf.tensor is not None
        tensor = self.op(like(leaf.tensor, name=name))
        step = f"{self.what} {shown(leaf.tensor)} -> {shown(tensor)}"
        table.change({name: leaf}, {self.pattern.renamed(name): leaf.made(tensor, step)})


@dataclass(slots=True)
class Split(Each):
    """A tensor becomes several, cut along an axis; `to` has a template for each."""

    to: Sequence[str]
    axis: int
    sizes: Sequence[int] | None

    @property
    def text(self) -> str:  # type: ignore[override]
        to = ", ".join(f"'{template}'" for template in self.to)
        return f"split '{self.pattern.text}' -> {to}"

    def touch(self, table: Table, name: str, leaf: Leaf) -> None:
        assert leaf.tensor is not None
        tensor = like(leaf.tensor, name=name)
        parts = lazy.split(tensor, self.axis, self.sizes, len(self.to))
        names = [self.pattern.renamed(name, to) for to in self.to]
        step = f"split {shown(leaf.tensor)} along axis {self.axis}"
        after = {n: leaf.made(part, step) for n, part in zip(names, parts)}
        if len(after) != len(parts):
            raise UsageError(
                "the parts of a tensor get one name",
                reason="rule-name",
                where=repr(name),
                found=", ".join(names),
                do=f"give each its own template: {self.text}",
            )
        table.change({name: leaf}, after)


@dataclass(slots=True)
class Concat(Rule):
    """Several tensors, one of each pattern, become one: those whose new name is the same."""

    sources: Sequence[Pattern]
    axis: int

    @property
    def text(self) -> str:  # type: ignore[override]
        patterns = ", ".join(f"'{pattern.text}'" for pattern in self.sources)
        return f"concat {patterns} -> '{self.sources[0].to}'"

    def patterns(self) -> Iterator[str]:
        yield from (pattern.text for pattern in self.sources)

    def apply(self, leaves: Leaves) -> Table:
        groups: dict[str, dict[int, str]] = {}
        positions = {name: at for at, name in enumerate(leaves)}
        for name, leaf in leaves.items():
            for at, pattern in enumerate(self.sources):
                if leaf.tensor is not None and pattern.matches(name):
                    group = groups.setdefault(pattern.renamed(name), {})
                    if at in group:
                        raise self._refuse(pattern.renamed(name), f"{group[at]!r} and {name!r}", at)
                    group[at] = name
                    break
        table, first = Table(self.text), {}
        taken: set[str] = set()
        for new, group in groups.items():
            for at in range(len(self.sources)):
                if at not in group:
                    raise self._refuse(new, "nothing", at)
            first[min(group.values(), key=positions.__getitem__)] = new
            taken.update(group.values())
        for name, leaf in leaves.items():
            if name in first:
                self._join(table, leaves, first[name], groups[first[name]])
            elif name not in taken:
                table.keep(name, leaf)
        return table

    def _join(self, table: Table, leaves: Leaves, new: str, group: Mapping[int, str]) -> None:
        before = {group[at]: leaves[group[at]] for at in range(len(self.sources))}
        tensors = [like(x.tensor, name=n) for n, x in before.items() if x.tensor is not None]
        made = lazy.joined(tensors, self.axis)
        origin = tuple(o for leaf in before.values() for o in leaf.origin)
        steps = tuple(s for leaf in before.values() for s in leaf.steps)
        step = f"concat of {len(tensors)} along axis {self.axis} -> {shown(made)}"
        table.change(before, {new: Leaf(origin, made, None, (*steps, step))})

    def _refuse(self, new: str, found: str, at: int) -> UsageError:
        return UsageError(
            "a tensor cannot be joined as a rule says",
            reason="rule",
            where=repr(new),
            expected=f"one tensor for {self.sources[at].text!r}",
            found=found,
            do=f"make the patterns match equally often: {self.text}",
        )


@dataclass(slots=True)
class Several(Rule):
    """Rules under one name, of which some may touch nothing: a preset."""

    text: str
    rules: Sequence[Rule]

    def patterns(self) -> Iterator[str]:
        for rule in self.rules:
            yield from rule.patterns()

    def apply(self, leaves: Leaves) -> Table:
        table = Table(self.text)
        for rule in self.rules:
            made = rule.apply(leaves)
            leaves = made.leaves
            table.changes += made.changes
            table.notes += made.notes
            table.lost |= made.lost
            table.dropped += made.dropped
        table.leaves = leaves
        return table


@dataclass(slots=True)
class Applied:
    """What rules made of a table: the leaves, what each rule did, what they could not carry -> why,
    and what was dropped, by its name in the source -> the rule."""

    leaves: Leaves
    reports: list[RuleReport] = field(default_factory=list)
    lost: dict[str, str] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)


def apply_rules(rules: Sequence[Rule], leaves: Leaves) -> Applied:
    """Apply rules in order, each to what the one before made.

    Raises:
        UsageError: A rule touches nothing, does not fit what it touches, or gives two leaves one
            name.
    """
    made = Applied(leaves)
    for rule in rules:
        table = rule.apply(made.leaves)
        if not table.changes and rule.must_touch:
            raise _touches_nothing(rule, made.leaves)
        made.leaves = table.leaves
        made.reports.append(RuleReport(rule.text, tuple(table.changes), tuple(table.notes)))
        made.lost |= table.lost
        made.dropped |= dict.fromkeys(table.dropped, rule.text)
    return made


def _touches_nothing(rule: Rule, leaves: Leaves) -> UsageError:
    from ckptfmt.engine import nearest

    looked_for = [_plain(text) for text in rule.patterns()]
    values = [name for name in leaves if isinstance(rule, Each) and rule.pattern.matches(name)]
    if values:
        return UsageError(
            "a rule touches nothing",
            reason="rule-unused",
            where=rule.text,
            expected="a tensor that its pattern is found in",
            found=f"plain values: {', '.join(values[:3])}",
        )
    return UsageError(
        "a rule touches nothing",
        reason="rule-unused",
        where=rule.text,
        expected="a name that its pattern is found in",
        found=f"{len(leaves):,} names",
        do=nearest(looked_for[0] if looked_for else "", leaves),
    )


def _plain(pattern: str) -> str:
    """What a pattern might mean: the letters in it."""
    text = re.sub(r"\\[dDwWsSbB]", "", pattern)
    return re.sub(r"[\\^$()?*+|\[\]{}]", "", text)
