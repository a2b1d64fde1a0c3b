"""Load and restore with TensorFlow's tensors and status objects around the engine's calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from ckptfmt.engine import Checkpoint, Store, StoredLeaf, api, not_traced
from ckptfmt.events import Progress
from ckptfmt.format import parse_key, split_name
from ckptfmt.reports import RestoreReport
from ckptfmt.tensorflow.building import looking_up
from ckptfmt.tensorflow.composites import compose
from ckptfmt.tensorflow.deferred import Rules, collecting
from ckptfmt.tensorflow.status import RestoreStatus
from ckptfmt.tensorflow.tensors import stored_tensor
from ckptfmt.types import At, Group, Mode, Select, StrPath

if TYPE_CHECKING:
    from numpy.typing import NDArray

_NOTHING: Mapping[str, str] = MappingProxyType({})


@not_traced
def load(
    path: StrPath | Store,
    *,
    step: int | None = None,
    at: At | None = None,
    names: Select | None = None,
    like: Any = None,
    mode: Mode = "auto",
    verify: bool = True,
    max_nbytes: int | None = None,
    progress: Progress = False,
) -> Any:
    """`ckptfmt.load` with tf tensors in place of arrays; names that were tied are one tensor, and
    what was a ragged, sparse or quantized tensor is one again.

    With `like=`, its own classes decide, as in `ckptfmt.load`.

    Raises:
        UnsupportedError: TensorFlow has no dtype for an array; it names the leaf.
    """
    if like is not None:
        return api.load(
            path, step=step, at=at, names=names, like=like, mode=mode, verify=verify,
            max_nbytes=max_nbytes, progress=progress,
        )  # fmt: skip
    made: dict[int, tf.Tensor] = {}

    def convert(array: NDArray[Any], leaf: StoredLeaf) -> tf.Tensor:
        if leaf.tensor not in made:
            made[leaf.tensor] = stored_tensor(array, leaf.attributes, leaf.name)
        return made[leaf.tensor]

    return api.load_as(
        convert, path, step=step, at=at, names=names, mode=mode, verify=verify,
        max_nbytes=max_nbytes, progress=progress, compose=compose, fused=True,
    )  # fmt: skip


@not_traced
def restore(
    objects: object,
    source: StrPath | Store | Checkpoint | Mapping[str, Any],
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
    """`ckptfmt.restore`, with the status object that users of tf.train.Checkpoint know.

    Everything is checked and assigned before it returns.

    Args:
        build: First build Keras layers that are not built, from the build configs recorded at save.
            Layers that were built for it stay built, at their initial values, if the restore fails
            afterwards. The other arguments are those of `ckptfmt.restore`.
    Raises:
        MismatchError: Both sides disagree, in all but what is pending; nothing was touched. Also of a
            layer that cannot be built from its config. Else as `ckptfmt.restore`.
    """
    options: dict[str, Any] = dict(  # noqa: C408 - as the call is written
        step=step,
        at=at,
        names=names,
        max_nbytes=max_nbytes,
        rename=rename,
        strict=strict,
        allow_missing=allow_missing,
        allow_unexpected=allow_unexpected,
        allow_cast=allow_cast,
        group=group,
    )
    if build:
        build_recorded(lambda: api.plan(objects, source, **options))
    with collecting(Rules(strict, allow_missing, allow_unexpected, allow_cast)) as deferred:
        report = api.restore(
            objects, source, verify=verify, progress=progress, atomic=atomic, **options
        )
    counters = deferred.counters
    return RestoreStatus(report, deferred, lambda n: n in counters or is_plain_at(objects, n))


def build_recorded(plan: Callable[[], RestoreReport]) -> None:
    """Build what is not built, if nothing else keeps the restore from it.

    Raises:
        MismatchError: The plan's; nothing was built. Or a layer refuses its config.
    """
    with looking_up() as recorded:
        report = plan()
    if report.error is not None:
        raise report.error
    for one in recorded:
        one.build()


def is_plain_at(tree: Any, name: str) -> bool:
    """True if a plain value or a single integer stands at a name of a tree."""
    for key in (parse_key(part) for part in split_name(name)):
        if isinstance(tree, dict) and key in tree:
            tree = tree[key]
        elif isinstance(tree, (list, tuple)) and str(key).isdigit() and int(str(key)) < len(tree):
            tree = tree[int(str(key))]
        else:
            return False
    if isinstance(tree, (np.ndarray, np.generic)):
        return tree.ndim == 0 and tree.dtype.kind in "iub"
    return tree is None or isinstance(tree, (bool, int, float, complex, str, bytes, list, tuple))
