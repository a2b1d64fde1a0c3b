"""Every vector, by the package and by the reference reader: accepted ones say what their twin says,
and pack back to the same bytes; refused ones fail with their kind, in bounded time and memory."""

from __future__ import annotations

import json
import math
import time
import tracemalloc
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import msgpack
import numpy as np
import pytest

from ckptfmt.engine import PartsTicket, SaveOptions, SaveRequest
from ckptfmt.engine.merge import merge_fragments
from ckptfmt.engine.parts import _of_all_ranks
from ckptfmt.engine.tree import unflatten
from ckptfmt.errors import CheckpointError, CkptWarning, CorruptError, FormatError, UsageError
from ckptfmt.format import (
    Dtype,
    Index,
    check_checkpoint_name,
    decode_chunk,
    digest,
    dtype_of,
    escape_key,
    gaps,
    pack_array,
    pack_index,
    pack_table,
    pack_tree,
    pack_value,
    parse_array,
    parse_footer,
    parse_fragment,
    parse_head,
    parse_index,
    parse_index_key,
    parse_key,
    parse_table,
    parse_value,
    split_name,
)

VECTORS = Path(__file__).parents[2] / "spec" / "vectors"
SECONDS, MEMORY = 1.0, 64 << 20
READ_BY_ALL = (
    "checkpoint-name", "data-file", "index", "name", "payload", "tree", "value"
)  # fmt: skip
"""Formats that a reader meets; fragments are a committer's."""


def names(folder: str, *formats: str) -> list[str]:
    found = []
    for path in sorted((VECTORS / folder).glob("*.json")):
        if not formats or json.loads(path.read_text())["format"] in formats:
            found.append(path.stem)
    assert found
    return found


def vector(folder: str, name: str) -> tuple[bytes, dict[str, Any]]:
    path = VECTORS / folder / name
    return path.with_name(f"{name}.bin").read_bytes(), json.loads(
        path.with_name(f"{name}.json").read_text()
    )


def check_data_file(data: bytes) -> None:
    """A whole data file by the parts that `verify` is made of."""
    if len(data) % 4096 or len(data) < 4096:
        parse_footer(data, len(data))
    algorithm = parse_head(data)
    footer = parse_footer(data[-64:], len(data))
    if footer.algorithm != algorithm:
        raise CorruptError("head and footer differ", reason="algorithm")
    table = parse_table(
        data[footer.table_offset : footer.table_offset + footer.table_nbytes], footer
    )
    for start, stop in gaps(table, footer, len(data)):
        if any(data[start:stop]):
            raise CorruptError("gap", reason="padding")
    for row, offset in enumerate(table.chunk_offsets.tolist()):
        decode_chunk(
            data[offset : offset + int(table.chunk_stored[row])],
            table.pipelines[int(table.chunk_codecs[row])],
            int(table.chunk_raw[row]),
            (table.stored_digest(row), table.chunk_digests[row].tobytes()),
            algorithm=algorithm,
            where="chunk",
        )


# -- what the package makes of a vector -------------------------------------------------------------


def package_reads(data: bytes, twin: dict[str, Any]) -> Any:
    match twin["format"]:
        case "index":
            return parse_index(data)
        case "tree":
            tree = parse_index(data).tree
            rows = zip(tree.container_kinds, tree.container_arguments)
            containers = dict(zip(tree.container_names, rows))
            return unflatten(tree.leaf_names, [object()] * len(tree.leaf_names), containers)
        case "data-file":
            return check_data_file(data)
        case "value":
            return parse_value(data)
        case "name":
            return [parse_key(part) for part in split_name(data.decode())]
        case "payload":
            return parse_array(data, Dtype(twin["dtype"], twin["bits"]), twin["shape"])
        case "fragment":
            return parse_fragment(data)
        case "fragments":
            return merge_fragments(_of_all_ranks(ticket_of(twin), msgpack.unpackb(data)))
    raise AssertionError(twin["format"])


def ticket_of(twin: dict[str, Any]) -> PartsTicket:
    """The save whose fragments are met."""
    ticket = twin["ticket"]
    options = SaveOptions(digest=ticket["digest"])
    request = SaveRequest(ticket["name"], ticket["step"], {}, {}, "error", options)
    return PartsTicket(request, ticket["txn"], ())


def reference_reads(reference: ModuleType, data: bytes, twin: dict[str, Any]) -> Any:
    match twin["format"]:
        case "index":
            return reference.parse_index(data)
        case "tree":
            return reference.build_tree(reference.parse_index(data), lambda kind, row: (kind, row))
        case "data-file":
            return reference.parse_data_file(data, read_chunks="unreadable" not in twin)
        case "value":
            return reference.parse_value(data)
        case "name":
            text = data.decode()
            return [reference.parse_part(part) for part in text.split("/")] if text else []
        case "checkpoint-name":
            return reference.need(reference.legal_name(data.decode()), "corrupt-name")
        case "payload":
            count = math.prod(twin["shape"])
            return reference.unpack_payload(data, twin["dtype"], twin["bits"], count)
    raise AssertionError(twin["format"])


# -- refused ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", names("reject"))
def test_package_refuses_with_its_kind_in_bounded_time_and_memory(name: str) -> None:
    data, twin = vector("reject", name)
    if twin["format"] == "checkpoint-name":
        text = data.decode()
        assert parse_index_key(f"checkpoints/{text}~0.index") is None
        with pytest.raises(UsageError):
            check_checkpoint_name(text)
        return
    tracemalloc.start()
    before = time.process_time()
    try:
        with pytest.raises(CheckpointError) as caught:
            package_reads(data, twin)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert caught.value.kind == twin["kind"], caught.value
    assert isinstance(caught.value, FormatError) or twin["format"] == "fragments"
    assert time.process_time() - before < SECONDS
    assert peak < MEMORY


@pytest.mark.parametrize("name", names("reject", "index"))
def test_index_is_refused_with_its_kind_also_where_its_names_are_left_for_later(name: str) -> None:
    data, twin = vector("reject", name)
    with pytest.raises(FormatError) as caught:
        assert parse_index(data, lazy=True).tree.leaf_names is not None
    assert caught.value.kind == twin["kind"]


@pytest.mark.parametrize("name", names("reject", *READ_BY_ALL))
def test_reference_reader_refuses_with_its_kind(name: str, reference: ModuleType) -> None:
    data, twin = vector("reject", name)
    with pytest.raises(reference.Refused) as caught:
        reference_reads(reference, data, twin)
    assert caught.value.kind == twin["kind"]


# -- accepted: parts --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", names("accept", "value"))
def test_value_is_what_its_twin_says_and_packs_back(name: str, reference: ModuleType) -> None:
    data, twin = vector("accept", name)
    assert reference.plain(reference.parse_value(data)) == twin["value"]
    if not twin["packs_back"]:
        with pytest.warns(CkptWarning, match="does not know"):
            made = parse_value(data)
        ((_, payload),) = twin["value"].items()
        assert reference.plain(made) == (payload[1] if "type" in twin["value"] else payload)
        return
    made = parse_value(data)
    assert pack_value(made) == data
    try:
        shown = reference.plain(made)
    except AttributeError:
        return  # a kind that only the package makes an object of: packing back has compared it
    if type(made).__module__ == "builtins" and type(made).__name__ not in ("slice", "range"):
        assert shown == twin["value"]


@pytest.mark.parametrize("name", names("accept", "name"))
def test_name_is_the_path_its_twin_says_and_packs_back(name: str, reference: ModuleType) -> None:
    data, twin = vector("accept", name)
    keys = package_reads(data, twin)
    assert reference.plain(keys) == twin["keys"]
    assert reference.plain(reference_reads(reference, data, twin)) == twin["keys"]
    assert "/".join(escape_key(key) for key in keys).encode() == data


@pytest.mark.parametrize("name", names("accept", "checkpoint-name"))
def test_checkpoint_name_is_legal(name: str, reference: ModuleType) -> None:
    text = vector("accept", name)[0].decode()
    check_checkpoint_name(text)
    assert parse_index_key(f"checkpoints/{text}~12.index") == (text, 12)
    assert reference.legal_name(text)


def shown_array(array: Any) -> dict[str, Any]:
    """An array as twins show it."""
    dtype = dtype_of(array) if array.dtype != object else Dtype("bytes", 0)
    made: dict[str, Any] = {"dtype": dtype.name, "shape": list(array.shape)}
    if dtype.is_variable:
        items = array.ravel().tolist()
        return {**made, "items": [i if isinstance(i, str) else {"bytes": i.hex()} for i in items]}
    raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    if dtype.bits < 8:
        raw = raw & np.uint8((1 << dtype.bits) - 1)
    return {**made, "data": raw.tobytes().hex()}


@pytest.mark.parametrize("name", names("accept", "payload"))
def test_payload_is_the_elements_its_twin_says_and_packs_back(
    name: str, reference: ModuleType
) -> None:
    data, twin = vector("accept", name)
    expected = twin["items"] if twin["bits"] == 0 else twin["data"]
    found = reference_reads(reference, data, twin)
    assert (reference.plain(found) if twin["bits"] == 0 else found.hex()) == expected
    array = package_reads(data, twin)
    shown = shown_array(array)
    if twin["dtype"] != "string":  # what has no width loads as StringDType, which says so itself
        assert shown["dtype"] == twin["dtype"]
    assert (shown["items"] if twin["bits"] == 0 else shown["data"]) == expected
    assert bytes(pack_array(array)) == data


# -- accepted: documents ------------------------------------------------------------------------------


def content_of(index: Index) -> dict[str, Any]:
    """An index of the package, as twins show it."""
    tree, placement = index.tree, index.placement
    tensors = []
    for row in range(len(tree.tensor_dtypes)):
        dtype = tree.dtype(row)
        regions = []
        for region in range(*map(int, tree.tensor_region_starts[row : row + 2])):
            origin, extent = tree.box(region)
            chunks = [
                {
                    "raw": int(tree.chunk_raw[at]),
                    "digest": tree.chunk_digests[at].tobytes().hex(),
                    "file": int(placement.files[at]),
                    "offset": int(placement.offsets[at]),
                    "stored": int(placement.stored[at]),
                    "codec": int(placement.codecs[at]),
                    "stored_digest": (
                        tree.chunk_digests if placement.digests is None else placement.digests
                    )[at]
                    .tobytes()
                    .hex(),
                }
                for at in range(*map(int, tree.region_chunk_starts[region : region + 2]))
            ]
            regions.append({"origin": list(origin), "extent": list(extent), "chunks": chunks})
        shape = list(tree.shape(row))
        tensors.append(
            {"dtype": dtype.name, "bits": dtype.bits, "shape": shape, "regions": regions}
        )
    about = index.about
    rows = zip(tree.leaf_names, tree.leaf_kinds.tolist(), tree.leaf_rows.tolist())
    containers = zip(tree.container_names, tree.container_kinds, tree.container_arguments)
    return {
        "algorithm": index.header.algorithm,
        "minor": index.header.minor,
        "commit_id": index.header.commit_id.hex(),
        "about": {
            "name": about.name,
            "step": about.step,
            "created": about.created,
            "txn": about.txn.hex(),
            "parent": about.parent and [about.parent[0], about.parent[1].hex()],
            "writer": about.writer,
            "metrics": dict(about.metrics),
            "nbytes": about.nbytes,
            "tensors": about.tensors,
        },
        "files": [
            {"id": i, "nbytes": n} for i, n in zip(index.files.ids, index.files.nbytes.tolist())
        ],
        "leaves": [list(row) for row in rows],
        "values": [value.hex() for value in tree.values],
        "containers": [[name, kind, argument.hex()] for name, kind, argument in containers],
        "tensors": tensors,
        "attributes": {
            which: {
                key: [[row, value.hex()] for row, value in zip(a.rows.tolist(), a.values)]
                for key, a in table.items()
            }
            for which, table in (
                ("leaves", tree.leaf_attributes),
                ("containers", tree.container_attributes),
            )
        },
        "pipelines": [[list(stage) for stage in pipeline] for pipeline in placement.pipelines],
    }


def reference_content(index: Any) -> dict[str, Any]:
    """An index of the reference reader, as twins show it."""
    tensors = [
        {
            "dtype": tensor.dtype,
            "bits": tensor.bits,
            "shape": list(tensor.shape),
            "regions": [
                {
                    "origin": list(region.origin),
                    "extent": list(region.extent),
                    "chunks": [
                        {k: v.hex() if isinstance(v, bytes) else v for k, v in vars(chunk).items()}
                        for chunk in region.chunks
                    ],
                }
                for region in tensor.regions
            ],
        }
        for tensor in index.tensors
    ]
    about = {key: index.about.get(key) for key in ("name", "step", "created", "writer", "metrics")}
    about |= {key: index.about.get(key, 0) for key in ("nbytes", "tensors")}
    parent = index.about["parent"]
    about |= {
        "txn": index.about["txn"].hex(),
        "parent": parent and [parent[0], parent[1].hex()],
    }
    return {
        "algorithm": index.algorithm,
        "commit_id": index.commit_id.hex(),
        "about": about,
        "files": [{"id": i, "nbytes": n} for i, n in index.files],
        "leaves": [list(row) for row in index.leaves],
        "values": [value.hex() for value in index.values],
        "containers": [[name, kind, argument.hex()] for name, kind, argument in index.containers],
        "tensors": tensors,
        "attributes": {
            which: {key: [[r, v.hex()] for r, v in rows] for key, rows in table.items()}
            for which, table in index.attributes.items()
        },
        "pipelines": index.pipelines,
    }


@pytest.mark.parametrize("name", names("accept", "index"))
def test_index_is_what_its_twin_says_and_packs_back(name: str, reference: ModuleType) -> None:
    data, twin = vector("accept", name)
    index = parse_index(data)
    assert content_of(index) == twin["content"]
    expected = {key: item for key, item in twin["content"].items() if key != "minor"}
    assert reference_content(reference.parse_index(data)) == expected
    shown = reference.plain(reference.parse_value(pack_value(dict(index.about.metadata))))
    assert shown == twin["metadata"]
    packed = pack_index(
        index.about, index.files, index.placement, pack_tree(index.tree), index.header.commit_id
    )
    assert (packed == data) == twin["packs_back"]


@pytest.mark.parametrize("name", names("accept", "fragments"))
def test_fragments_make_the_tree_that_their_twin_says(name: str, reference: ModuleType) -> None:
    data, twin = vector("accept", name)
    documents = msgpack.unpackb(data)
    for order in (1, -1):  # they come in any order
        merged = package_reads(msgpack.packb(documents[::order]), twin)
        tree, algorithm = merged.tree, twin["ticket"]["digest"]
        assert digest(pack_tree(tree), algorithm).hex() == twin["tree_digest"]
        assert merged.files.ids == twin["files"]
        content = twin["content"]
        rows = zip(tree.leaf_names, tree.leaf_kinds.tolist(), tree.leaf_rows.tolist())
        assert [list(row) for row in rows] == content["leaves"]
        boxes = [[list(part) for part in tree.box(n)] for n in range(len(tree.region_tensors))]
        found = [
            {"tensor": tensor, "origin": origin, "extent": extent}
            for tensor, (origin, extent) in zip(tree.region_tensors.tolist(), boxes)
        ]
        assert found == content["regions"]
    for document, is_index in zip(documents, twin["indexes"], strict=True):
        for parse in (reference.parse_index, parse_index):  # one that tiles is an index to a reader
            if is_index:
                parse(document)
                continue
            with pytest.raises((reference.Refused, FormatError)) as caught:
                parse(document)
            assert caught.value.kind == "corrupt-regions"


@pytest.mark.parametrize("name", names("accept", "fragments"))
def test_a_fragment_with_any_flipped_byte_is_refused(name: str) -> None:
    document = msgpack.unpackb(vector("accept", name)[0])[-1]
    for position in range(0, len(document), 7):
        damaged = bytearray(document)
        damaged[position] ^= 0x10
        with pytest.raises(FormatError):
            parse_fragment(bytes(damaged))


@pytest.mark.parametrize("name", names("accept", "data-file"))
def test_data_file_is_what_its_twin_says_and_its_table_packs_back(
    name: str, reference: ModuleType
) -> None:
    data, twin = vector("accept", name)
    file = reference_reads(reference, data, twin)
    regions = json.loads(json.dumps(file.regions, default=bytes.hex))
    found = {"algorithm": file.algorithm, "salt": file.salt}
    found |= {"pipelines": file.pipelines, "regions": regions}
    assert found == twin["content"]
    assert file.id == twin["id"]
    if "unreadable" not in twin:
        check_data_file(data)
    footer = parse_footer(data[-64:], len(data))
    raw = data[footer.table_offset : footer.table_offset + footer.table_nbytes]
    table = parse_table(raw, footer)
    assert footer.id == twin["id"]
    assert pack_table(table) == raw
    rows = twin["content"]["regions"]
    assert table.salt == twin["content"]["salt"]
    assert table.region_names == [row["name"] for row in rows]
    chunks = [chunk for row in rows for chunk in row["chunks"]]
    assert table.chunk_offsets.tolist() == [chunk["offset"] for chunk in chunks]
    assert table.chunk_starts.tolist() == [chunk["start"] for chunk in chunks]
    digests = [table.stored_digest(row).hex() for row in range(len(chunks))]
    assert digests == [chunk["stored_digest"] for chunk in chunks]


def make_store(folder: Path, name: str) -> dict[str, Any]:
    """A store that holds an accepted index and its data files."""
    data, twin = vector("accept", name)
    for part in ("checkpoints", "data"):
        (folder / part).mkdir()
    (folder / "checkpoints" / f"{twin['content']['about']['name']}~0.index").write_bytes(data)
    for file in twin["data"]:
        content, file_twin = vector("accept", file)
        (folder / "data" / file_twin["id"]).write_bytes(content)
    return twin


WHOLE = [name for name in names("accept", "index") if name != "index-note"]


@pytest.mark.parametrize("name", WHOLE)
def test_reference_reader_reads_every_leaf_of_a_vector(
    name: str, reference: ModuleType, tmp_path: Path
) -> None:
    twin = make_store(tmp_path, name)
    checkpoint = reference.Store(tmp_path).latest()
    for leaf, kind, row in checkpoint.index.leaves:
        if leaf in twin["unreadable"]:
            with pytest.raises(reference.Refused, match="unsupported-codec"):
                checkpoint.leaf(kind, row)
            continue
        shown = dict(map(tuple, twin["leaves"]))[leaf]
        assert reference.plain(checkpoint.leaf(kind, row)) == shown
    if twin["tree"] is not None:
        assert reference.plain(checkpoint.tree()) == twin["tree"]
    if not twin["unreadable"]:
        assert reference.assert_reference_reads(tmp_path).keys() == {checkpoint.name}


@pytest.mark.parametrize("name", WHOLE)
def test_package_reads_every_leaf_of_a_vector(
    name: str, reference: ModuleType, tmp_path: Path
) -> None:
    import ckptfmt

    twin = make_store(tmp_path, name)

    def shown(leaf: Any) -> Any:
        if isinstance(leaf, ckptfmt.StoredTensor):
            made = shown_array(leaf.read())
            return {"tensor": {**made, "dtype": leaf.dtype_name}}
        return reference.plain(reference.parse_value(pack_value(leaf)))

    checkpoint = ckptfmt.open(tmp_path)
    for leaf, expected in twin["leaves"]:
        assert shown(checkpoint[leaf]) == expected
    for leaf in twin["unreadable"]:
        with pytest.raises(ckptfmt.UnsupportedError) as caught:
            checkpoint[leaf].read()
        assert caught.value.kind == "unsupported-codec"
    if not twin["unreadable"]:
        with warnings.catch_warnings():
            tree = ckptfmt.load(tmp_path)
        report = ckptfmt.Store(tmp_path).verify()
        assert report.ok, report.problems
        if twin["tree"] is not None:
            assert reference.plain(as_reference(tree, reference)) == twin["tree"]


def as_reference(tree: Any, reference: ModuleType) -> Any:
    """The package's tree with arrays as the reference reader has them."""
    if isinstance(tree, np.ndarray):
        dtype = dtype_of(tree)
        data = bytes.fromhex(shown_array(tree)["data"])
        return reference.Tensor(dtype.name, dtype.bits, tree.shape, data)
    if isinstance(tree, dict):
        items = {key: as_reference(item, reference) for key, item in tree.items()}
        for key, item in items.items():
            tree[key] = item
        return tree
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(as_reference(item, reference) for item in tree))
    if isinstance(tree, list | tuple):
        return type(tree)(as_reference(item, reference) for item in tree)
    return tree


# -- the files themselves ------------------------------------------------------------------------------


def test_every_vector_has_a_twin_that_says_what_it_is() -> None:
    for folder in ("accept", "reject"):
        files = {path.name for path in (VECTORS / folder).iterdir()}
        stems = {name.rpartition(".")[0] for name in files}
        assert files == {f"{stem}.{ext}" for stem in stems for ext in ("bin", "json")}
        for stem in stems:
            twin = vector(folder, stem)[1]
            assert twin["provenance"]
            assert twin["why"]
            assert folder == "accept" or twin["kind"]


def test_generator_makes_the_same_files_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib.util
    import sys

    spec = importlib.util.spec_from_file_location("generate_vectors", VECTORS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(sys, "argv", ["generate.py", "--check"])
    assert module.main() == 0
    assert len(module.MADE) == sum(
        1 for folder in ("accept", "reject") for _ in (VECTORS / folder).iterdir()
    )
