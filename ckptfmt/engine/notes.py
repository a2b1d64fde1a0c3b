"""Metrics and metadata: checked at save, or added after the commit as notes, which leave the index
as it is. Spec: 02-store.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import TypeVar

from ckptfmt import __version__
from ckptfmt.engine.catalog import list_checkpoints, list_notes, newest, read_head
from ckptfmt.errors import UsageError
from ckptfmt.format import About, pack_notes, pack_value
from ckptfmt.storage import Backend
from ckptfmt.types import Key

T = TypeVar("T")
OWN_METADATA = "ckptfmt."
QUARANTINE = OWN_METADATA + "quarantine"
"""Why a checkpoint was set aside; the empty text: it was taken back."""


def check_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Numbers by name; NumPy scalars and 0-d tensors of any framework are numbers.

    Raises:
        UsageError: A name is no text, or a value no number.
    """
    items = _items(metrics, "metrics")
    return {_check_key(key, "metric"): _number(key, value) for key, value in items}


def _items(mapping: Mapping[str, T], what: str) -> Iterable[tuple[str, T]]:
    if not isinstance(mapping, Mapping):
        raise UsageError(
            f"{what}= is no dict",
            reason="metadata",
            expected="values by name",
            found=type(mapping).__name__,
            do=f'pass {what}={{"name": value}}, or leave it out',
        )
    return mapping.items()


def _number(key: str, value: object) -> float:
    cause: Exception | None = None
    if not isinstance(value, str | bytes) and tuple(getattr(value, "shape", ())) == ():
        try:
            # A loss that still has its graph is fine: float() would warn of that, item() does not.
            return float(value.item() if hasattr(value, "item") else value)  # type: ignore[arg-type]
        except (TypeError, ValueError, OverflowError) as error:
            cause = error
    raise UsageError(
        "metric is no number",
        reason="metrics",
        where=repr(key),
        expected="a number, or a tensor of no axes",
        found=f"{type(value).__name__}: {cause}" if cause else type(value).__name__,
        do="pass a number; text belongs into metadata=",
    ) from cause


def check_metadata(metadata: Mapping[str, object]) -> dict[str, object]:
    """Plain values by name.

    Raises:
        UsageError: A name is no text or the format's own, or a value would not come back as it is.
    """
    made = {_check_key(key, "metadata"): value for key, value in _items(metadata, "metadata")}
    for key in made:
        if key.startswith(OWN_METADATA):
            raise UsageError(
                f"metadata keys that begin with {OWN_METADATA} are the format's own",
                reason="metadata",
                where=repr(key),
                do="choose another key",
            )
    pack_value(made)
    return made


def _check_key(key: object, what: str) -> str:
    if type(key) is not str:
        raise UsageError(
            f"{what} is not named by a str",
            reason="metadata",
            found=f"{type(key).__name__} {key!r}"[:80],
            do="use names; a dict within a value may have other keys",
        )
    pack_value(key)
    return key


def annotate(
    backend: Backend, about: About, *, metrics: Mapping[str, float], metadata: Mapping[str, object]
) -> None:
    """Put the next note of a save: `notes/<txn>~<n>.index`, if absent; the highest n wins.

    Args:
        about: Of the checkpoint.
    """
    note = replace(
        about,
        created=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        parent=None,
        writer=f"ckptfmt {__version__}",
        metrics=metrics,
        metadata=metadata,
        nbytes=0,
        tensors=0,
    )
    data = pack_notes(note, os.urandom(16))
    txn = about.txn.hex()
    taken = list_notes(backend).get(txn, [])
    number = taken[-1][0] + 1 if taken else 0
    while not backend.put_if_absent(Key(f"notes/{txn}~{number}.index"), data, durable=True):
        number += 1


def annotate_newest(
    backend: Backend, name: str, *, metrics: Mapping[str, float], metadata: Mapping[str, object]
) -> bool:
    """`annotate` for the highest readable generation of a checkpoint; False where there is none."""
    found = newest(
        backend,
        list_checkpoints(backend).get(name, []),
        lambda backend, listed: read_head(backend, listed.key, listed.nbytes),
    )
    if found is None:
        return False
    annotate(backend, found[1].about, metrics=metrics, metadata=metadata)
    return True
