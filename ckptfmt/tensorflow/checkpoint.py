"""`Checkpoint(**objects)`: the objects of a training job by their names, saved and restored together.

It has no counter and no state of its own: `Checkpoint(a=a).save(...)` is `save({"a": a}, ...)`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

import ckptfmt.engine as engine
from ckptfmt.engine import SaveFuture, Store, api, parse_where
from ckptfmt.errors import UsageError
from ckptfmt.events import Progress
from ckptfmt.format import CHUNK_NBYTES_DEFAULT
from ckptfmt.tensorflow.loading import restore
from ckptfmt.tensorflow.status import RestoreStatus
from ckptfmt.types import (
    At,
    CheckpointInfo,
    DigestName,
    Group,
    IfExists,
    Plain,
    Select,
    StrPath,
)

_NOTHING: Mapping[str, Any] = MappingProxyType({})
_MAIN = "main"


class Checkpoint:
    """Named objects that are saved and restored together, as with tf.train.Checkpoint.

    Args:
        objects: `model=`, `optimizer=`, `step=`: anything that a tree may hold. The name is the first
            part of the stored names.
    Raises:
        UsageError: There are none.
    """

    def __init__(self, **objects: object) -> None:
        if not objects:
            raise UsageError(
                "a checkpoint without objects would save nothing",
                reason="no-objects",
                do="name them: Checkpoint(model=model, optimizer=optimizer)",
            )
        self.objects: dict[str, object] = dict(objects)

    def __repr__(self) -> str:
        return f"Checkpoint({', '.join(self.objects)})"

    def save(
        self,
        path: StrPath | Store,
        step: int | None = None,
        *,
        name: str | None = None,
        metadata: Mapping[str, Plain] = _NOTHING,
        metrics: Mapping[str, float] = _NOTHING,
        if_exists: IfExists | None = None,
        codec: str | Mapping[str, str] = "raw",
        chunk_nbytes: int | Mapping[str, int] = CHUNK_NBYTES_DEFAULT,
        digest: DigestName = "xxh3-128",
        bases: Sequence[At] | None = None,
        durable: bool = True,
        unchanged: Select | None = None,
        group: Group = None,
        timeout_s: float = 1800.0,
        progress: Progress = False,
    ) -> CheckpointInfo:
        """`ckptfmt.save` of the objects; `step` is yours: nothing counts the saves.

        Raises: as `ckptfmt.save`.
        """
        return api.save(
            self.objects,
            path,
            step=step,
            name=name,
            metadata=metadata,
            metrics=metrics,
            if_exists=if_exists,
            codec=codec,
            chunk_nbytes=chunk_nbytes,
            digest=digest,
            bases=bases,
            durable=durable,
            unchanged=unchanged,
            group=group,
            timeout_s=timeout_s,
            progress=progress,
        )

    def save_async(
        self,
        path: StrPath | Store,
        step: int | None = None,
        *,
        when_busy: Literal["wait", "raise"] = "wait",
        name: str | None = None,
        metadata: Mapping[str, Plain] = _NOTHING,
        metrics: Mapping[str, float] = _NOTHING,
        if_exists: IfExists | None = None,
        codec: str | Mapping[str, str] = "raw",
        chunk_nbytes: int | Mapping[str, int] = CHUNK_NBYTES_DEFAULT,
        digest: DigestName = "xxh3-128",
        bases: Sequence[At] | None = None,
        durable: bool = True,
        unchanged: Select | None = None,
        group: Group = None,
        timeout_s: float = 1800.0,
        progress: Progress = False,
    ) -> SaveFuture:
        """`ckptfmt.save_async` of the objects: they may change as soon as it returns.

        Raises: as `ckptfmt.save_async`.
        """
        return api.save_async(
            self.objects,
            path,
            step=step,
            when_busy=when_busy,
            name=name,
            metadata=metadata,
            metrics=metrics,
            if_exists=if_exists,
            codec=codec,
            chunk_nbytes=chunk_nbytes,
            digest=digest,
            bases=bases,
            durable=durable,
            unchanged=unchanged,
            group=group,
            timeout_s=timeout_s,
            progress=progress,
        )

    def restore(
        self,
        source: StrPath | Store | engine.Checkpoint | Mapping[str, Any],
        *,
        step: int | None = None,
        at: At | None = None,
        names: Select | None = None,
        verify: bool = True,
        max_nbytes: int | None = None,
        progress: Progress = False,
        rename: Mapping[str, str] | Callable[[str], str] = _NOTHING,
        strict: bool = True,
        allow_missing: Select = (),
        allow_unexpected: Select = (),
        allow_cast: bool | Select = False,
        atomic: bool = True,
        build: bool = False,
        group: Group = None,
    ) -> RestoreStatus:
        """`ckptfmt.tensorflow.restore` of the objects, in place.

        Raises: as `ckptfmt.tensorflow.restore`.
        """
        return restore(
            self.objects,
            source,
            step=step,
            at=at,
            names=names,
            verify=verify,
            max_nbytes=max_nbytes,
            progress=progress,
            rename=rename,
            strict=strict,
            allow_missing=allow_missing,
            allow_unexpected=allow_unexpected,
            allow_cast=allow_cast,
            atomic=atomic,
            build=build,
            group=group,
        )

    def write(self, path: StrPath | Store) -> CheckpointInfo:
        """Save without a step, in the place of what was written before: `main`.

        The old one goes when the new one is committed, not before.

        Raises: as `ckptfmt.save`.
        """
        return api.save(self.objects, path)

    def read(self, path: StrPath | Store) -> RestoreStatus:
        """Restore what `write` has written, whatever steps lie beside it.

        Raises: as `ckptfmt.tensorflow.restore`.
        """
        _, selected = parse_where(path)
        return self.restore(path, at=_MAIN if selected is None else None)
