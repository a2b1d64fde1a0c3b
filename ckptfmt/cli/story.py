"""What a store and its event file tell of a run: commits, what became of them, and what went wrong."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckptfmt.engine import Store
    from ckptfmt.types import CheckpointInfo

EVENT_FILE = "events.jsonl"
"""Where `hooks.jsonl` puts it, by the documentation's examples: in the store's folder."""
SAVE_COST = "ckptfmt.save_cost"
QUARANTINE = "ckptfmt.quarantine"
THERE, TAGGED, DELETED, ASIDE = "there", "tagged", "deleted", "set aside"
TELLING = frozenset(
    {"alarm", "guard", "preempt", "mirror.lag", "restore.rejected", "save.error", "save.skipped"}
)
"""Kinds of events that a person should read."""

ENDS = frozenset({"save.commit", "save.error", "save.skipped"})
"""Kinds that end what `save.start` began."""


@dataclass(slots=True)
class Commit:
    """A checkpoint that was committed, whether it is still there or not. Times in seconds."""

    name: str
    step: int | None
    time_s: float
    nbytes: int = 0
    written_nbytes: int | None = None
    stall_s: float | None = None
    stage_s: float | None = None
    durable_s: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    fate: str = THERE
    reason: str = ""

    @property
    def label(self) -> str:
        return str(self.step) if self.step is not None else self.name


@dataclass(frozen=True, slots=True)
class Story:
    """Of one store.

    Attributes:
        commits: Oldest first.
        told: Events that a person should read, and restores, oldest first.
        groups: (label, bytes) of the newest checkpoint's tensors.
        saving: The save in flight, by the event file: its name, and when it began.
    """

    url: str
    latest: str | None
    commits: Sequence[Commit]
    told: Sequence[Mapping[str, Any]]
    groups: Sequence[tuple[str, int]]
    saving: tuple[str, float] | None = None


def short_step(text: str) -> str:
    """With steps as people write them: step-0000000000001000 is step 1000."""
    return re.sub(r"\bstep-0*(\d+)\b", r"step \1", text)


def event_file(store: Store, asked: str | None) -> str | None:
    """The event file to read: the one asked for, or that in the store's folder, if it is there."""
    if asked is not None:
        return asked
    path = os.path.join(store.url, EVENT_FILE)
    return path if os.path.exists(path) else None


def read_story(store: Store, events: str | None, *, groups: bool = True) -> Story:
    """All that is known.

    Args:
        events: An event file, or None: then only what the store itself has.
        groups: Read the newest checkpoint's index too.
    """
    from ckptfmt.manager import hooks

    rows = hooks.read_jsonl(events) if events is not None else []
    commits = _commits_of(rows)
    infos, tags = store.checkpoints(), set(store.tags().values())
    for info in infos:
        commit = _merge(commits, info)
        commit.fate = TAGGED if info.name in tags else THERE
    for info in store.checkpoints(quarantined=True):
        reason = info.metadata.get(QUARANTINE, "")
        if info.name not in {there.name for there in infos}:
            commit = _merge(commits, info)
            commit.fate, commit.reason = ASIDE, str(reason)
    latest = store.latest()
    return Story(
        store.url,
        latest.name if latest is not None else None,
        sorted(commits.values(), key=lambda commit: commit.time_s),
        sorted(
            [row for row in rows if row["kind"] in TELLING or row["kind"] == "restore.done"]
            + _cut_off(rows),
            key=lambda row: row["time_s"],
        ),
        _groups(store, latest.name) if latest is not None and groups else [],
        _saving(rows),
    )


def _cut_off(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Saves that began and never ended, though a run went on afterwards: it was killed there."""
    begun: dict[str, tuple[Mapping[str, Any], bool]] = {}
    lost: list[Mapping[str, Any]] = []
    for row in rows:
        kind, name = row["kind"], str(row.get("checkpoint"))
        if kind == "restore.start":
            begun = {key: (start, True) for key, (start, _) in begun.items()}
        elif kind == "save.start":
            if begun.get(name, (row, False))[1]:
                lost.append(begun[name][0])
            begun[name] = (row, False)
        elif kind in ENDS:
            begun.pop(name, None)
    lost += [start for start, resumed in begun.values() if resumed]
    reason = {"reason": "the run ended in the middle of this save"}
    return [{**start, "kind": "save.cut-off", "data": reason} for start in lost]


def _saving(rows: Sequence[Mapping[str, Any]]) -> tuple[str, float] | None:
    """The last save that began, if nothing says that it is over, nor that another run began."""
    for row in reversed(rows):
        if row["kind"] == "save.start":
            return str(row.get("checkpoint")), row["time_s"]
        if row["kind"] in ENDS or row["kind"] == "restore.start":
            return None
    return None


def _commits_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, Commit]:
    """By name; what was saved again under a name replaces what was there."""
    commits: dict[str, Commit] = {}
    for row in rows:
        name, data = row.get("checkpoint"), row.get("data", {})
        if row["kind"] == "save.commit" and name is not None:
            numbers = {k: float(v) for k, v in data.items() if isinstance(v, int | float)}
            commits[name] = Commit(
                name,
                row.get("step"),
                row["time_s"],
                row.get("total_nbytes", 0),
                row.get("nbytes", 0),
                numbers.pop("stall_s", None),
                numbers.pop("stage_s", None),
                row.get("seconds"),
                numbers,
                DELETED,  # unless it is found
            )
        elif row["kind"] == "delete" and name in commits and not {"url", "fate"} & data.keys():
            commits[name].reason = str(data.get("reason", ""))
        elif row["kind"] == "retention" and isinstance(data.get("kept"), Mapping):
            for kept, reason in data["kept"].items():
                if kept in commits:
                    commits[kept].reason = str(reason)
    return commits


def _merge(commits: dict[str, Commit], info: CheckpointInfo) -> Commit:
    commit = commits.setdefault(info.name, Commit(info.name, info.step, info.created.timestamp()))
    commit.nbytes = info.nbytes
    commit.metrics = {**commit.metrics, **info.metrics}
    cost = info.metadata.get(SAVE_COST)
    if isinstance(cost, Mapping):
        commit.stall_s = _number(cost.get("stall_s"), commit.stall_s)
        commit.stage_s = _number(cost.get("stage_s"), commit.stage_s)
        commit.durable_s = _number(cost.get("durable_s"), commit.durable_s)
        written = _number(cost.get("written_nbytes"), None)
        commit.written_nbytes = commit.written_nbytes if written is None else int(written)
    return commit


def _number(value: object, other: float | None) -> float | None:
    return float(value) if isinstance(value, int | float) else other


def _groups(store: Store, name: str) -> list[tuple[str, int]]:
    from ckptfmt.cli.grouping import build, rows_to_depth
    from ckptfmt.cli.leaves import leaves_of_index
    from ckptfmt.errors import CheckpointError, warn

    try:
        with store.open(name) as checkpoint:
            leaves = leaves_of_index(checkpoint.index, checkpoint.__getitem__, None)
    except CheckpointError as error:
        warn(f"{name} cannot be read: {error}")
        return []
    rows = rows_to_depth(build(leaves), 2, 24)
    made, parent = [], ""
    for at, row in enumerate(rows):
        if row.level == 0:
            parent = row.label
            if at + 1 < len(rows) and rows[at + 1].level:
                continue  # its parts follow
        label = row.label if row.level == 0 else f"{parent}: {row.label}"
        made.append((label, row.nbytes))
    return sorted((row for row in made if row[1]), key=lambda row: -row[1])
