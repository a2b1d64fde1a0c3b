"""What a format cannot say of a tree, as a text that imports read (`tree_record`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ckptfmt.engine import flatten
from ckptfmt.errors import CheckpointError, UnsupportedError
from ckptfmt.foreign.exporters.base import ExportPlan
from ckptfmt.foreign.exporters.tree import Value
from ckptfmt.foreign.tree_record import RECORD_NBYTES_MAX, pack_record
from ckptfmt.format import escape_key, pack_value, split_name


def note_keys(plan: ExportPlan) -> None:
    """Where the format has ints as keys as texts, the report says so."""
    for name in plan.names:
        parts = split_name(name)
        for depth, part in enumerate(parts):
            if part.startswith("~3"):
                above = "/".join(parts[:depth]) or "(root)"
                plan.transformed.setdefault(above, "keys that are no text become text")


def record_of(
    plan: ExportPlan,
    *,
    is_plain: Callable[[str, str], bool] = lambda name, file_name: name == escape_key(file_name),
    dtypes: Mapping[str, str] = {},
    nbytes_max: int = RECORD_NBYTES_MAX,
    has_tree: bool = False,
    has_texts: bool = False,
) -> str:
    """The text of the record; "" where there is nothing to say.

    Args:
        is_plain: Whether an import gives a tensor this name without it: (leaf name, name in the file).
        dtypes: Of what the file has as raw bytes, by name in the file.
        has_tree, has_texts: The format keeps the tree, or texts of the metadata, by itself.
    Raises:
        UnsupportedError: It is longer than an import takes.
    """
    rows, beside, plain = ([], {}, True) if has_tree else _rows(plan, is_plain)
    containers = _containers(plan, {name for name, _, _ in rows})
    about = _about(plan, has_texts=has_texts)
    if plain and not containers and not beside and not dtypes:
        rows = []
    text = pack_record(rows, containers, beside=beside, dtypes=dtypes, about=about)
    if len(text) > nbytes_max:
        raise UnsupportedError(
            "names, values and metadata are too long for this format",
            reason="export-metadata",
            where=plan.tree.title,
            expected=f"at most {nbytes_max} bytes",
            found=len(text),
            do="choose a part: names= or root=",
        )
    return text


def _rows(
    plan: ExportPlan, is_plain: Callable[[str, str], bool]
) -> tuple[list[tuple[str, str | None, bytes]], dict[str, str], bool]:
    """(leaves, tensors in the file that say a leaf once more, whether an import needs neither)."""
    rows: list[tuple[str, str | None, bytes]] = []
    beside: dict[str, str] = {}
    arrays = {tensor.name for tensor in plan.tensors if tensor.array is not None}
    beside.update({plan.names[name]: name for name in arrays})
    plain = True
    for name, leaf in plan.tree.leaves.items():
        if name not in plan.names:
            continue
        file_name = plan.names[name]
        if isinstance(leaf, Value):
            rows.append((name, None, packed(leaf.value)))
            plain = False
            continue
        first = next(other for other in leaf.names if other in plan.names)
        marks = pack_value(dict(leaf.attributes)) if leaf.attributes else b""
        rows.append((name, plan.names[first], marks))
        plain = plain and not marks and first == name and is_plain(name, file_name)
        if plan.names[first] != file_name:
            beside[file_name] = name
    return rows, beside, plain


def packed(value: Any) -> bytes:
    """A value as a leaf has it (spec 03)."""
    flat = flatten(value)
    return flat.values[0] if flat.values else flat.tensors[0].fetch().tobytes()


def _containers(plan: ExportPlan, leaves: set[str]) -> list[tuple[str, str, bytes, bytes]]:
    tree = plan.tree
    carried = {name[:i] for name in leaves for i, c in enumerate(name) if c == "/"} | {""}
    return [
        (name, kind, argument, pack_value(marks) if marks else b"")
        for name, (kind, argument) in tree.containers.items()
        if name in carried
        for marks in [tree.container_attributes.get(name)]
    ]


def _about(plan: ExportPlan, *, has_texts: bool) -> bytes:
    """Step, metadata and metrics, packed; nothing where there are none."""
    tree = plan.tree
    metadata = {
        key: value for key, value in tree.metadata.items() if not key.startswith("ckptfmt.")
    }
    is_told = has_texts and all(isinstance(value, str) for value in metadata.values())
    if (is_told or not metadata) and not tree.metrics and tree.step is None:
        return b""
    about: dict[str, Any] = {"step": tree.step, "metadata": metadata, "metrics": dict(tree.metrics)}
    try:
        return pack_value(about)
    except CheckpointError:  # what a foreign file says about itself may be no plain data
        about["metadata"] = {key: str(value) for key, value in metadata.items()}
        return pack_value(about)


def differs(plan: ExportPlan, values: Mapping[str, bytes]) -> str | None:
    """The first value that was carried and is not among those that came back."""
    for name, value in plan.values():
        if name in plan.names and values.get(name) != packed(value):
            return name
    return None
