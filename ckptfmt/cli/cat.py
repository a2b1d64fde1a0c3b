"""`ckptfmt cat STORE[@NAME] NAME[slice]`: values of one leaf, or statistics."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from ckptfmt.cli.exit_codes import OK
from ckptfmt.cli.json_form import json_value
from ckptfmt.cli.output import Output
from ckptfmt.cli.slices import Region, parse_subject
from ckptfmt.cli.text import escape, format_shape, truncate_end, value_text

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ckptfmt.cli.sources import Source

DESCRIPTION = """\
Print the values of one tensor (or plain value), or of a slice of it, or
statistics. Only the chunks that the slice touches are read, and every one
is verified."""
EPILOG = """\
examples:
  ckptfmt cat runs/a model/encoder.0.weight
  ckptfmt cat runs/a@1000 'model/w[0:8,3]'
  ckptfmt cat runs/a 'model/w[..., -1]' --json
  ckptfmt cat runs/a model/w --stats

Quote the brackets: the shell reads them too. More than 1,000 elements are
shown in part, and --json refuses more than a million, unless --all is given."""

SHOWN_MAX, JSON_MAX = 1_000, 1_000_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("store", metavar="STORE[@NAME]", help="which checkpoint (default: latest)")
    parser.add_argument(
        "name", metavar="NAME[slice]", help="a leaf's name: model/w, 'model/w[0:8]'"
    )
    parser.add_argument("--stats", action="store_true", help="min, max, mean, std, norm, NaN, Inf")
    parser.add_argument("--all", action="store_true", help="every element, however many")


def run(args: argparse.Namespace, out: Output) -> int:
    from ckptfmt.cli.sources import open_source

    with open_source(args.store, args.storage_options) as source:
        name, region = parse_subject(args.name, source)
        item = source.item(name)
        if not hasattr(item, "read"):  # a NumPy scalar is a plain value
            return _value(name, region, item, args, out)
        head: dict[str, object] = {
            "command": "cat",
            "source": source.title,
            "name": name,
            "dtype": source.dtype(name),
            "shape": list(item.shape),
        }
        if region is not None:
            head["slice"] = args.name[len(name) :]
        if args.stats:
            return _statistics(source, item, region, head, out)
        return _values(source.read(name, _region(region)), head, args, out)


def _region(region: Region | None) -> Any:
    return ... if region is None else region


def _value(
    name: str, region: Region | None, value: object, args: argparse.Namespace, out: Output
) -> int:
    from ckptfmt.errors import UsageError

    if region is not None or args.stats:
        raise UsageError(
            "a plain value has no slices and no statistics",
            reason="not-a-tensor",
            where=name,
            found=type(value).__name__,
        )
    document = {"command": "cat", "name": name, "kind": "value", "type": type(value).__name__}
    lines = map(escape, value_text(value, out.width).split("\n"))
    out.result({**document, "value": json_value(value)}, *lines, whole=True)
    return OK


def _values(
    array: NDArray[Any], head: dict[str, object], args: argparse.Namespace, out: Output
) -> int:
    import numpy as np

    from ckptfmt.errors import UsageError

    if out.json:
        if array.size > JSON_MAX and not args.all:
            raise UsageError(
                "too many elements for one JSON document",
                reason="too-many",
                found=f"{array.size:,}",
                do="ask for a slice, --stats or --all",
            )
        out.result({**head, "result_shape": list(array.shape), "values": json_value(array)})
        return OK
    if array.ndim == 0:
        value = array[()]
        text = str(value) if array.dtype.kind not in "OTSU" else repr(value)
    else:
        text = np.array2string(
            array,
            threshold=array.size + 1 if args.all else SHOWN_MAX,
            max_line_width=out.width or 80,
            separator=", ",
            formatter={
                "void": lambda block: _block(block, array.ndim, None if args.all else out.width)
            },
        )
    out.result({}, *(escape(line) for line in text.splitlines()), whole=True)
    if array.size > SHOWN_MAX and not args.all:
        out.note(f"{array.size:,} elements, shown in part; --all prints every one")
    return OK


def _block(block: Any, ndim: int, width: int | None) -> str:
    """An element without a number, as hexadecimal digits: a block of quantized values."""
    text = str(bytes(block).hex())
    # What stands beside it: brackets, a comma.
    return text if width is None else truncate_end(text, max(8, width - 2 * ndim - 1))


def _statistics(
    source: Source, item: Any, region: Region | None, head: dict[str, object], out: Output
) -> int:
    from ckptfmt.cli.statistics import tensor_statistics

    name = str(head["name"])
    if region is None:
        found = tensor_statistics(
            lambda part: source.read(name, part), tuple(item.shape), item.dtype
        )
    else:
        array = source.read(name, region)
        found = tensor_statistics(lambda part: array[part], array.shape, array.dtype)
    document = {**head, "statistics": found}
    lines = [f"{escape(name)}  {head['dtype']} {format_shape(tuple(item.shape))}"]
    for key, value in found.items():
        shown = f"{value:,}" if isinstance(value, int) else f"{value:.9g}"
        lines.append(f"  {key:<7}{shown}")
    out.result(document, *lines)
    return OK
