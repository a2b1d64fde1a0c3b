"""From a comparison to a report, and to one error that lists everything. Spec: 08-protocol."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from ckptfmt.engine.bind import Comparison
from ckptfmt.engine.select import Matcher
from ckptfmt.engine.source import Source
from ckptfmt.errors import MismatchError
from ckptfmt.reports import Mismatch, RestoreReport
from ckptfmt.types import Select

_LINES_MAX = 40


class Rules(Protocol):
    """The part of a restore's request that decides what is an error."""

    @property
    def strict(self) -> bool: ...
    @property
    def allow_missing(self) -> Select: ...
    @property
    def allow_unexpected(self) -> Select: ...


def make_report(
    comparison: Comparison, source: Source, renamed: Mapping[str, str]
) -> RestoreReport:
    info = source.info
    return RestoreReport(
        info=info,
        step=0 if info is None or info.step is None else info.step,
        matched=tuple(comparison.matched()),
        missing=tuple(comparison.missing_names),
        unexpected=tuple(comparison.unexpected()),
        spare=tuple(comparison.spare()),
        pending=tuple(comparison.pending_names),
        shapes=tuple(comparison.mismatches["shape"].values()),
        dtypes=tuple(comparison.mismatches["dtype"].values()),
        kinds=tuple(comparison.mismatches["kind"].values()),
        cast={name: f"{old} -> {new}" for name, (old, new) in comparison.casts.items()},
        renamed=_with_moves(renamed, comparison),
        matched_by=dict(comparison.matched_by),
        ties=dict(comparison.ties),
    )


def _with_moves(renamed: Mapping[str, str], comparison: Comparison) -> dict[str, str]:
    """Renamed leaves, and those that followed a renamed parameter."""
    made = dict(renamed)
    first = {new: old for old, new in renamed.items()}
    for name, to in comparison.moves.items():
        for leaf in comparison.stored(name):
            made[first.get(leaf, leaf)] = to + leaf[len(name) :]
    return made


def mismatch_error(
    report: RestoreReport, rules: Rules, strangers: Sequence[Mismatch] = ()
) -> MismatchError | None:
    """One MismatchError with all of them, for a restore that may not touch anything.

    Wrong shapes, dtypes and kinds always raise, and so does a restore that matches nothing;
    missing and unexpected names raise if strict, but for what is spare and the exceptions named. `strangers` are the
    objects of which nothing matches; they are told where no name is.
    """
    wrong = [*report.shapes, *report.dtypes, *report.kinds]
    nothing = not report.matched and not report.pending
    missing, unexpected = list(report.missing), list(report.unexpected)
    if not nothing:  # where nothing matches no exception helps, and all names are told
        missing = _not_allowed(missing, rules.allow_missing, report) if rules.strict else []
        unexpected = (
            _not_allowed(unexpected, rules.allow_unexpected, report) if rules.strict else []
        )
    if not (missing or unexpected or nothing):
        wrong += strangers
    if not (missing or unexpected or wrong or nothing):
        return None
    # What has a line of its own already is not listed a second time.
    told = {m.name for m in wrong}
    missing = [name for name in missing if name not in told]
    unexpected = [name for name in unexpected if name not in told]
    lines = [f"  {m.name or 'the root'}: expected {m.expected}, found {m.found}" for m in wrong]
    # The nearest name takes a millisecond to find: only for the lines that are shown.
    near = {n: _near(n, unexpected) for n in missing[: max(0, _LINES_MAX - len(lines))]}
    lines += [f"  missing in the checkpoint: {n}{near.get(n, '')}" for n in missing]
    lines += [f"  not in the target: {text}" for text in _grouped(unexpected, report.matched)]
    if len(lines) > _LINES_MAX:
        lines = [*lines[:_LINES_MAX], f"  … and {len(lines) - _LINES_MAX} more"]
    what = "the target and the checkpoint disagree"
    if nothing:
        what = "nothing in the checkpoint matches the target"
    return MismatchError(
        what + (":\n" + "\n".join(lines) + "\n" if lines else ""),
        reason="nothing-matches" if nothing else "tree",
        do="nothing was changed; to go on: "
        + (_cure(missing, unexpected, report) or _cure_of_nothing(missing, unexpected)),
        report=replace(report),
    )


def _grouped(names: Sequence[str], matched: Sequence[str]) -> list[str]:
    """Names, those of a container of which nothing matched as one line if they are many."""
    if not names:
        return []
    used = {above for name in matched for above in _above(name)}
    container = {name: next((a for a in _above(name) if a not in used), name) for name in names}
    counts = Counter(container.values())
    made: dict[str, None] = {}
    for name in names:
        top = container[name]
        many = top != name and counts[top] > 2
        made[f"{top}/** ({counts[top]} leaves)" if many else name] = None
    return list(made)


def _above(name: str) -> list[str]:
    """The containers that a name lies in, outermost first, without the root."""
    parts = name.split("/")
    return ["/".join(parts[:depth]) for depth in range(1, len(parts))]


def _not_allowed(names: Sequence[str], allowed: Select, report: RestoreReport) -> list[str]:
    matcher, spare = Matcher(allowed), set(report.spare)
    return [name for name in names if name not in spare and not matcher(name)]


def _near(name: str, others: Sequence[str]) -> str:
    import difflib  # here: a name that is right needs no neighbours

    close = difflib.get_close_matches(name, others[:5000], n=1, cutoff=0.6)
    return f" (stored: {close[0]}; rename={{{close[0]!r}: {name!r}}}?)" if close else ""


def _cure(missing: Sequence[str], unexpected: Sequence[str], report: RestoreReport) -> str:
    parts = []
    if report.matched or report.pending:
        if missing:
            parts.append(f"allow_missing={_common(missing)!r}")
        if unexpected:
            parts.append(f"allow_unexpected={_common(unexpected)!r}, or take part with names=")
    if report.shapes:
        parts.append(
            "give the target the stored shapes, or leave these out of names= "
            "(a function name -> bool may choose)"
        )
    if report.dtypes:
        parts.append("allow_cast= converts dtypes")
    if report.kinds:
        parts.append("give the target what is stored, or leave it out of names=")
    return "; ".join(parts)


def _cure_of_nothing(missing: Sequence[str], unexpected: Sequence[str]) -> str:
    """Often the target is a part of what was saved: the model, and not {"model": the model}."""
    stored = set(unexpected)
    for name in unexpected if missing else ():
        above = name.removesuffix(f"/{missing[0]}")
        if above != name and all(f"{above}/{n}" in stored for n in missing):
            return (
                f"names={above!r}, rename={{{above!r}: ''}}: the target is a part of what is stored"
            )
    return 'compare the names (plan(), or "ckptfmt show"); rename= maps stored ones to others'


def _common(names: Sequence[str]) -> object:
    """The exception to write: the names, or the deepest containers of theirs that are few."""
    few = list(names)
    while len(few) > 6 and any("/" in name for name in few):
        deepest = max(name.count("/") for name in few)
        few = list(
            dict.fromkeys(
                name.rpartition("/")[0] if name.count("/") == deepest else name for name in few
            )
        )
    return few[0] if len(few) == 1 else tuple(few)
