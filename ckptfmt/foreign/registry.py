"""Which foreign formats there are. A row here, or an entry point `ckptfmt.converters`, adds one."""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, NamedTuple

from ckptfmt.errors import (
    CheckpointError,
    MissingExtraError,
    NotFoundError,
    UnsupportedError,
    UsageError,
)
from ckptfmt.foreign.base import ForeignTree, Importer
from ckptfmt.types import StrPath

if TYPE_CHECKING:
    from ckptfmt.foreign.exporters.base import Exporter


class ImporterRow(NamedTuple):
    """Where an importer is, the extra that it needs ("" for none), and the usual suffixes."""

    target: str
    extra: str
    suffixes: tuple[str, ...]


IMPORTERS: dict[str, ImporterRow] = {
    "safetensors": ImporterRow(
        "ckptfmt.foreign.safetensors:SafetensorsImporter",
        "",
        (".safetensors", ".safetensors.index.json"),
    ),
    "tensorbundle": ImporterRow(
        "ckptfmt.foreign.bundle:TensorBundleImporter",
        "",
        (".index", ".data-00000-of-00001"),
    ),
    "pytorch": ImporterRow(
        "ckptfmt.foreign.pytorch:PytorchImporter",
        "",
        (".pt", ".pth", ".bin", ".ckpt", ".bin.index.json"),
    ),
    "dcp": ImporterRow("ckptfmt.foreign.pytorch:DcpImporter", "", (".metadata",)),
    "numpy": ImporterRow("ckptfmt.foreign.numpy:NumpyImporter", "", (".npy", ".npz")),
    "keras": ImporterRow(
        "ckptfmt.foreign.keras:KerasImporter",
        "",
        (".keras", ".weights.h5", ".weights.json", ".h5", ".hdf5"),
    ),
    "orbax": ImporterRow("ckptfmt.foreign.orbax:OrbaxImporter", "", ()),
    "gguf": ImporterRow("ckptfmt.foreign.gguf:GgufImporter", "", (".gguf",)),
    "flax": ImporterRow("ckptfmt.foreign.flax:FlaxImporter", "", (".msgpack",)),
}

ENTRY_POINTS = "ckptfmt.converters"
_HEAD_NBYTES, _LISTED_MAX = 16, 6


def importer_names() -> list[str]:
    """All formats that can be imported: our own first."""
    return [*IMPORTERS, *sorted(set(_plugins()) - set(IMPORTERS))]


def _plugins() -> dict[str, str]:
    from importlib.metadata import entry_points

    return {point.name: point.value for point in entry_points(group=ENTRY_POINTS)}


def get_importer(name: str) -> Importer:
    """The importer of a format.

    Raises:
        UsageError: No such format; MissingExtraError: its dependency is not installed.
    """
    row = IMPORTERS.get(name)
    target = row.target if row is not None else _plugins().get(name)
    if target is None:
        raise UsageError(
            "no such foreign format",
            reason="foreign-format",
            found=repr(name),
            expected=f"one of {', '.join(importer_names())}",
        )
    module, _, attribute = target.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except ImportError as error:
        extra = row.extra if row is not None else ""
        raise MissingExtraError(
            f"the importer of {name} cannot be loaded",
            reason="importer",
            found=str(error),
            do=f'pip install "ckptfmt[{extra}]"' if extra else "install what it needs",
        ) from error
    made = found()
    if not isinstance(made, Importer):
        raise UsageError(
            "an entry point is not an importer",
            reason="importer",
            where=target,
            expected="Importer",
        )
    return made


def detect_format(path: str) -> str | None:
    """The format of a file or folder, by its content; formats with a matching suffix come first."""
    lower = path.lower()
    names = sorted(
        importer_names(),
        key=lambda name: not (name in IMPORTERS and lower.endswith(IMPORTERS[name].suffixes)),
    )
    return next((name for name in names if get_importer(name).detect(path)), None)


def suffix_format(path: str) -> str | None:
    """The format that a file's name says where its content says none: its importer says what is
    wrong with it, cut off or no regular file."""
    if os.path.isdir(path) or not os.path.lexists(path):
        return None
    lower = path.lower()
    return next((name for name, row in IMPORTERS.items() if lower.endswith(row.suffixes)), None)


def find_importer(path: str, source_format: str | None) -> tuple[str, Importer]:
    """The importer for a path: the named one, else the one that recognises it, else the one that
    its suffix means."""
    # Not every path is a file: TensorFlow's checkpoints go by the part that their files share.
    name = source_format or detect_format(path)
    if name is None and "://" in path and not os.path.lexists(path):
        raise UnsupportedError(
            "a file of another format is read from this machine only",
            reason="foreign-url",
            where=path,
            do="copy it here, and give its path",
        )
    name = name or suffix_format(path)
    if name is None and not os.path.lexists(path):
        raise NotFoundError("no such file or folder", reason="file", where=path)
    if name is None:
        raise UnsupportedError(
            "no importer recognises this",
            reason="foreign-format",
            where=path,
            expected=f"one of {', '.join(importer_names())}",
            found=_described(path),
            do="give the file or folder itself, or name its format (--from, source_format=)",
        )
    return name, get_importer(name)


def _described(path: str) -> str:
    """What a file or folder is that no importer knows."""
    from ckptfmt.foreign.zip_archive import MAGIC, ZipArchive

    try:
        if os.path.isdir(path):
            return f"a folder with {_some(sorted(os.listdir(path)))}"
        if not os.path.isfile(path):
            return "no regular file"
        with open(path, "rb") as file:
            head = file.read(_HEAD_NBYTES)
        if head.startswith(MAGIC):
            entries = ZipArchive(os.path.realpath(path), os.path.basename(path), "zip").entries
            return f"a ZIP archive with {_some(list(entries))}"
    except CheckpointError as error:
        return f"a ZIP archive: {error.what}"
    except OSError as error:
        return f"what cannot be read: {error.strerror}"
    size = os.path.getsize(path)
    return f"a file of {size:,} bytes that begins with {head!a}" if head else "an empty file"


def _some(names: list[str]) -> str:
    shown = ", ".join(ascii(name)[1:-1][:80] for name in names[:_LISTED_MAX])
    more = len(names) - _LISTED_MAX
    return (shown or "nothing in it") + (f" and {more:,} more" if more > 0 else "")


def read_foreign(path: StrPath, *, source_format: str | None = None) -> ForeignTree:
    """The tree of a foreign file or folder, its values unread."""
    _, importer = find_importer(os.fspath(path), source_format)
    return importer.read(os.fspath(path))


class ExporterRow(NamedTuple):
    """Where an exporter is, the extra that it needs ("" for none), and the suffixes it answers to."""

    target: str
    extra: str
    suffixes: tuple[str, ...]


EXPORTERS: dict[str, ExporterRow] = {
    "safetensors": ExporterRow(
        "ckptfmt.foreign.exporters.safetensors:SafetensorsExporter", "", (".safetensors",)
    ),
    "tensorbundle": ExporterRow(
        "ckptfmt.foreign.exporters.bundle:TensorBundleExporter", "", (".index",)
    ),
    "numpy": ExporterRow("ckptfmt.foreign.exporters.numpy:NumpyExporter", "", (".npz", ".npy")),
    "keras": ExporterRow("ckptfmt.foreign.exporters.keras:load_exporter", "h5", (".weights.h5",)),
    "dcp": ExporterRow("ckptfmt.foreign.exporters.dcp:DcpExporter", "", ()),
    "orbax": ExporterRow("ckptfmt.foreign.exporters.orbax:OrbaxExporter", "", ()),
    "pytorch": ExporterRow(
        "ckptfmt.foreign.exporters.pytorch:PytorchExporter", "", (".pt", ".pth", ".bin", ".ckpt")
    ),
}


def format_for(path: str) -> str | None:
    """The format that a destination's suffix means, or None."""
    matches = [
        (len(suffix), name)
        for name, row in EXPORTERS.items()
        for suffix in row.suffixes
        if path.lower().endswith(suffix)
    ]
    return max(matches)[1] if matches else None


def find_exporter(path: str, target_format: str | None) -> tuple[str, Exporter]:
    """The exporter to a destination: of the named format, else of the one that its suffix means.

    Raises:
        UsageError: There is no such format, or the suffix means none.
    """
    name = target_format or format_for(path)
    row = EXPORTERS.get(name or "")
    if name is None or row is None:
        raise UsageError(
            "no format to export to" if name is None else "no such format to export to",
            reason="foreign-format",
            where=path,
            expected=f"one of {', '.join(EXPORTERS)}",
            found=repr(name) if name is not None else None,
            do="name the format (--to, target_format=). A source that is a URL, or has checkpoints, is "
            "a store: a file of another format is given by its path",
        )
    module, _, attribute = row.target.partition(":")
    made: Exporter = getattr(importlib.import_module(module), attribute)(path)
    return name, made
