"""Notes: metrics and metadata added after the commit; the index does not change. Spec: 02-store."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime

from ckptfmt import __version__
from ckptfmt.engine.catalog import list_notes
from ckptfmt.format import About, pack_notes
from ckptfmt.storage import Backend
from ckptfmt.types import Key


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
    data = pack_notes(note, secrets.token_bytes(16))
    txn = about.txn.hex()
    taken = list_notes(backend).get(txn, [])
    number = taken[-1][0] + 1 if taken else 0
    while not backend.put_if_absent(Key(f"notes/{txn}~{number}.index"), data, durable=True):
        number += 1
