"""What calls return about what they did: reports, and the rows of them. All are frozen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckptfmt.errors import CheckpointError
    from ckptfmt.types import CheckpointInfo


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A leaf that is on both sides and does not fit."""

    name: str
    expected: str
    found: str


@dataclass(frozen=True, slots=True)
class Rejected:
    """A checkpoint that a manager passed over, and why."""

    checkpoint: str
    reason: str


@dataclass(frozen=True, slots=True)
class RestoreReport:
    """What a restore did, or (from `plan`) would do. True if anything was restored.

    Attributes:
        info: The checkpoint, or None where nothing was restored.
        step: Its step; 0 where nothing was restored or the checkpoint has no step.
        matched: Names that were (would be) restored.
        missing: In the target, not stored.
        unexpected: Stored, not in the target.
        pending: Stored for objects that do not exist yet.
        shapes, dtypes, kinds: Mismatches.
        cast: Name -> "stored dtype -> target dtype".
        renamed: Stored name -> target name.
        matched_by: Name -> the rule that matched it, where it was not the name itself.
        ties: Name -> what happened to a tie (lost, or made).
        rejected: Checkpoints passed over (by a manager).
        spare: Those of missing and unexpected that a strict restore does without: bookkeeping, such as
            TensorFlow's counter of its own saves, and what repeats a value for a reader of one kind.
        error: From `plan`: what `restore` would raise with the same arguments, else None.
    """

    info: CheckpointInfo | None
    step: int
    matched: Sequence[str] = ()
    missing: Sequence[str] = ()
    unexpected: Sequence[str] = ()
    pending: Sequence[str] = ()
    shapes: Sequence[Mismatch] = ()
    dtypes: Sequence[Mismatch] = ()
    kinds: Sequence[Mismatch] = ()
    cast: Mapping[str, str] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    matched_by: Mapping[str, str] = field(default_factory=dict)
    ties: Mapping[str, str] = field(default_factory=dict)
    rejected: Sequence[Rejected] = ()
    spare: Sequence[str] = ()
    error: CheckpointError | None = field(default=None, compare=False)

    def __bool__(self) -> bool:
        return bool(self.matched)

    @property
    def clean(self) -> bool:
        """True if both sides agree in everything but what is spare."""
        names = set(self.missing) | set(self.unexpected)
        return not (names - set(self.spare) or self.shapes or self.dtypes or self.kinds)

    def __str__(self) -> str:
        head = f"{self.info.name}: " if self.info is not None else ""
        lines = [f"{head}{len(self.matched)} matched"]
        for label in ("missing", "unexpected", "pending"):
            lines += [
                f"  {label:<11}{name}{' (spare)' if name in self.spare else ''}"
                for name in getattr(self, label)
            ]
        for label in ("shapes", "dtypes", "kinds"):
            lines += [
                f"  {label[:-1]:<11}{m.name}: expected {m.expected}, found {m.found}"
                for m in getattr(self, label)
            ]
        for label in ("cast", "renamed", "matched_by", "ties"):
            lines += [f"  {label:<11}{k}: {v}" for k, v in getattr(self, label).items()]
        lines += [f"  rejected   {r.checkpoint}: {r.reason}" for r in self.rejected]
        if self.error is not None:
            lines.append(f"  restore would raise {type(self.error).__name__} ({self.error.kind})")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Damage:
    """One damaged range. `start` and `stop` are bytes of `file`, end-exclusive.

    `checkpoint` and `tensor` name what is hit ("" where the range belongs to none).
    """

    file: str
    start: int
    stop: int
    checkpoint: str
    tensor: str
    reason: str


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What a verification found. `ok` if there was nothing to find."""

    problems: Sequence[Damage] = ()
    checkpoints: int = 0
    files: int = 0
    nbytes: int = 0

    @property
    def ok(self) -> bool:
        return not self.problems

    def __bool__(self) -> bool:
        return self.ok


@dataclass(frozen=True, slots=True)
class GcReport:
    """What a collection did (or, dry, would do).

    Attributes:
        listed: Data file ids that this run put on its list (nobody refers to them).
        deleted: Ids deleted now.
        spared: Ids that an earlier run had listed and that are referred to again.
        freed_nbytes: Bytes of what was deleted.
        listed_nbytes: Bytes of what was listed.
        open_saves: Number of saves in flight that were honoured.
        abandoned: Transactions of dead saves that were cleaned up.
        dry_run: True if nothing was changed.
    """

    listed: Sequence[str] = ()
    deleted: Sequence[str] = ()
    spared: Sequence[str] = ()
    freed_nbytes: int = 0
    listed_nbytes: int = 0
    open_saves: int = 0
    abandoned: Sequence[str] = ()
    dry_run: bool = False


@dataclass(frozen=True, slots=True)
class CopyReport:
    """What a push or a pull did.

    Attributes:
        url: Where to.
        copied: Names of the checkpoints that are there now and were not.
        kept: Names that the other store had already, with the same content.
        files: Number of data files written there.
        nbytes: Their bytes.
        reused_nbytes: Bytes of the data files that were there already.
    """

    url: str
    copied: Sequence[str]
    kept: Sequence[str]
    files: int
    nbytes: int
    reused_nbytes: int


@dataclass(frozen=True, slots=True)
class RuleChange:
    """What a rule did to some leaves.

    Attributes:
        before: Their names; `after`: the names of what they became, none if they were dropped.
        was: dtype and shape of each, "value" for a plain value; `now`: of what they became.
        what: The kind of layer that they are, where a rule goes by layers.
    """

    before: tuple[str, ...]
    after: tuple[str, ...]
    was: tuple[str, ...]
    now: tuple[str, ...]
    what: str = ""


@dataclass(frozen=True, slots=True)
class RuleReport:
    """A rule of a conversion, in words, everything that it touched, and what to mind about it."""

    rule: str
    changes: Sequence[RuleChange] = ()
    notes: Sequence[str] = ()

    @property
    def touched(self) -> int:
        """Number of leaves that it matched."""
        return sum(len(change.before) for change in self.changes)


@dataclass(frozen=True, slots=True)
class ConvertReport:
    """What a conversion carried, and what it could not.

    Attributes:
        info: The checkpoint written, or None: the destination is foreign, or nothing was written.
        format: The foreign format's name, "ckptfmt" for a store; of an export the destination's.
        loaded: Names of the tensors that were carried, as the checkpoint has them.
        renamed: Foreign name -> name in the checkpoint, where they differ; of an export the reverse.
        transformed: Name in the checkpoint -> what rules did to its values; of an export, what became
            of it where the format holds it as something else.
        dropped: Name in the source -> the rule that left it behind.
        skipped: Name -> reason, for what was not carried.
        opaque: Name -> class, for objects of unknown classes, carried as plain data.
        rules: What each rule did, in their order.
        notes: What to mind about the result: constants that the frameworks choose differently.
        nbytes: Logical bytes carried.
    """

    info: CheckpointInfo | None
    format: str
    loaded: Sequence[str] = ()
    renamed: Mapping[str, str] = field(default_factory=dict)
    transformed: Mapping[str, str] = field(default_factory=dict)
    dropped: Mapping[str, str] = field(default_factory=dict)
    skipped: Mapping[str, str] = field(default_factory=dict)
    opaque: Mapping[str, str] = field(default_factory=dict)
    rules: Sequence[RuleReport] = ()
    notes: Sequence[str] = ()
    nbytes: int = 0
