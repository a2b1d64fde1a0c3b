"""Any damage to any file of a store, and any index an attacker writes: a call gives what was saved,
or a typed error, and never a wrong value, a crash, or memory out of proportion. Spec: 09 §9.2, §9.6."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ckptfmt
from ckptfmt.errors import CheckpointError, CkptWarning, UsageError
from ckptfmt.testing import difference

RANDOM = st.integers(0, 2**32 - 1).map(random.Random)
Tree = dict[str, Any]


def trees() -> dict[int | str, Tree]:
    rng = np.random.default_rng(0)
    shared = rng.standard_normal(3000).astype(np.float32)
    made: dict[int | str, Tree] = {}
    for step in (1, 2):
        tied = rng.standard_normal((7, 5))
        made[step] = {
            "model": {"a": tied, "b": tied, "frozen": shared, 3: np.float16(step)},
            "opt": [{"lr": 0.1 * step, "m": rng.integers(0, 9, 5000)}, ("x", b"y", step)],
            "zeros": np.zeros(30_000),
            "half": rng.standard_normal(9).astype(ml_dtypes.bfloat16),
            "four": rng.integers(-8, 8, (3, 3)).astype(ml_dtypes.int4),
            "words": np.array(["a", "", "ü" * step], np.dtypes.StringDType()),
            "long": list(range(2000 * step)),
        }
    made["main"] = {"w": rng.standard_normal(100), "note": "main", "zeros": np.zeros(600)}
    return made


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps that share a tensor, `main`, a tag and a note; chunks of 4 KiB, raw and zstd."""
    path = tmp_path_factory.mktemp("fuzz") / "store"
    for at, tree in trees().items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CkptWarning)
            ckptfmt.save(
                tree, path, step=at if isinstance(at, int) else None, codec={"zeros": "zstd"},
                chunk_nbytes=4096,
            )  # fmt: skip
    opened = ckptfmt.Store(path)
    opened.tag("best", 1)
    opened.annotate(2, metrics={"loss": 0.5})
    return path


def files_of(store: Path) -> list[str]:
    return sorted(str(p.relative_to(store)) for p in store.rglob("*") if p.is_file())


def damage(store: Path, rng: random.Random) -> str:
    """One accident or attack on one file; says which."""
    names = files_of(store)
    name = rng.choice(names)
    path = store / name
    data = path.read_bytes()
    at = rng.randrange(len(data)) if data else 0
    what = rng.choice(
        ["flip"] * 6 + ["cut", "cut", "grow", "zero", "other", "delete", "folder", "link", "empty"]
    )
    path.unlink()
    match what:
        case "flip" if data:
            path.write_bytes(data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :])
        case "cut":
            path.write_bytes(data[:at])
        case "grow":
            path.write_bytes(data + bytes(rng.choice([1, 4096])))
        case "zero":
            path.write_bytes(data[:at] + bytes(min(4096, len(data) - at)) + data[at + 4096 :])
        case "other":
            path.write_bytes((store / rng.choice([n for n in names if n != name])).read_bytes())
        case "folder":
            path.mkdir()
        case "link":
            path.symlink_to("/etc/hostname")
        case "empty":
            path.write_bytes(b"")
        case _:
            pass
    return f"{what} of {name} at {at}"


def attempt(call: Callable[[], Any]) -> Any:
    """What a call gives, or the kind of its error; every other exception goes through."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", CkptWarning)
        try:
            return call()
        except CheckpointError as error:
            assert str(error)  # noqa: PT017
            return error.kind


def is_refused(found: Any) -> bool:
    return isinstance(found, str)


def check_damaged(store: Path, rng: random.Random) -> None:
    saved = trees()
    done = ", ".join(damage(store, rng) for _ in range(rng.choice([1, 1, 1, 2, 3])))
    opened = ckptfmt.Store(store)
    good: dict[int | str, bool] = {}
    for at, tree in saved.items():
        mode: Any = rng.choice(["auto", "read"])  # one tensor is encoded: no map
        found = attempt(lambda: ckptfmt.load(store, at=at, mode=mode))  # noqa: B023
        good[at] = not is_refused(found)
        assert is_refused(found) or not difference(found, tree), f"{done}: {at} is another tree"
    part = attempt(lambda: ckptfmt.load(store, at=2, names="model", mode="mmap"))
    assert is_refused(part) or not difference(part["model"], saved[2]["model"]), done
    latest = attempt(lambda: ckptfmt.load(store))
    if not is_refused(latest):
        assert any(not difference(latest, tree) for tree in saved.values()), done
        assert good[2] or difference(latest, saved[2]), done
    tagged = attempt(lambda: ckptfmt.load(store, at="best"))
    assert is_refused(tagged) or not difference(tagged, saved[1]), done
    for call in (opened.latest, opened.checkpoints, opened.tags, opened.steps, opened.names):
        attempt(call)
    report = attempt(opened.verify)
    if not is_refused(report):
        bad = {damaged.checkpoint for damaged in report.problems}
        for at in saved:
            name = f"step-{at:016d}" if isinstance(at, int) else at
            assert good[at] or name in bad or report.problems or not _is_there(store, name), done
    attempt(lambda: opened.gc(grace_s=0))
    attempt(lambda: opened.gc(grace_s=0))
    for at, tree in saved.items():
        if good[at]:
            found = attempt(lambda: ckptfmt.load(store, at=at))  # noqa: B023
            assert not is_refused(found), f"{done}: gc took what {at} needs: {found}"
            assert not difference(found, tree), done
    again = attempt(lambda: ckptfmt.save(saved[2], store, step=3))
    if not is_refused(again):
        assert not difference(attempt(lambda: ckptfmt.load(store, at=3)), saved[2]), done


def _is_there(store: Path, name: str) -> bool:
    return any(
        path.is_file() and not path.is_symlink()
        for path in (store / "checkpoints").glob(f"{name}~*.index")
    )


@settings(max_examples=60)
@given(RANDOM)
def test_a_damaged_store_gives_what_was_saved_or_a_typed_error(
    store: Path, tmp_path_factory: pytest.TempPathFactory, rng: random.Random
) -> None:
    copy = tmp_path_factory.mktemp("damaged") / "store"
    shutil.copytree(store, copy)
    check_damaged(copy, rng)
    shutil.rmtree(copy.parent)


def check_hostile(store: Path, rng: random.Random, documents: ModuleType, mutator: Any) -> None:
    keys = sorted((store / "checkpoints").glob("step-*"))
    document = documents.take_apart(rng.choice(keys).read_bytes())
    for _ in range(rng.choice([1, 1, 2, 3])):
        mutator(rng).mutate(document, ("about", "files", "tree", "placement"))
    key = keys[-1]
    key.write_bytes(document.pack())
    target = trees()[2]
    for call in (
        lambda: ckptfmt.load(store, max_nbytes=1 << 26),
        lambda: ckptfmt.load(store, at=2, mode="read", max_nbytes=1 << 26),
        lambda: ckptfmt.load(store, at=2, names="model/**", max_nbytes=1 << 26),
        lambda: ckptfmt.load(store, at=2, mode="mmap", verify=False, max_nbytes=1 << 26),
        lambda: ckptfmt.open(store, at=2).tree(),
        lambda: dict(ckptfmt.open(store, at=2).items()),
        lambda: ckptfmt.plan(target, store, at=2),
        lambda: ckptfmt.restore(target, store, at=2, max_nbytes=1 << 26),
        ckptfmt.Store(store).verify,
        ckptfmt.Store(store).checkpoints,
        lambda: ckptfmt.Store(store).gc(grace_s=0),
    ):
        attempt(call)
    assert not difference(attempt(lambda: ckptfmt.load(store, at=1)), trees()[1])


@settings(max_examples=60)
@given(RANDOM)
def test_a_hostile_index_gives_a_tree_or_a_typed_error(
    store: Path, tmp_path_factory: pytest.TempPathFactory, documents: ModuleType, mutator: Any,
    rng: random.Random,
) -> None:  # fmt: skip
    copy = tmp_path_factory.mktemp("hostile") / "store"
    shutil.copytree(store, copy)
    check_hostile(copy, rng, documents, mutator)
    shutil.rmtree(copy.parent)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("attack", ["damage", "index"])
def test_two_thousand_stores(
    store: Path, tmp_path: Path, documents: ModuleType, mutator: Any, seed: int, attack: str
) -> None:
    for number in range(2000):
        copy = tmp_path / "store"
        shutil.copytree(store, copy)
        rng = random.Random(seed + number)
        try:
            if attack == "damage":
                check_damaged(copy, rng)
            else:
                check_hostile(copy, rng, documents, mutator)
        except BaseException as error:
            error.add_note(f"random.Random({seed + number})")
            raise
        shutil.rmtree(copy)


def test_a_document_taken_apart_packs_back(store: Path, documents: ModuleType) -> None:
    for path in sorted((store / "checkpoints").iterdir()):
        assert documents.take_apart(path.read_bytes()).pack() == path.read_bytes()


# -- claims that memory cannot hold -----------------------------------------------------------------

PROGRAM = """
import resource, sys
import ckptfmt
from ckptfmt.errors import CheckpointError
import numpy, ml_dtypes
store, calls = sys.argv[1], sys.argv[2:]
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (512 << 20), -1))
for mode in calls:
    try:
        if mode == "verify":
            print("ok" if ckptfmt.Store(store).verify().ok else "problems")
        else:
            ckptfmt.load(store, mode=mode)
            print("loaded")
    except CheckpointError as error:
        print(error.kind)
"""


def claim(documents: ModuleType, store: Path, count: int, chunk_nbytes: int) -> None:
    """An index of one tensor whose chunks, `count` times `chunk_nbytes`, are in no file."""
    key = max((store / "checkpoints").glob("step-*"))
    document = documents.take_apart(key.read_bytes())
    total = count * chunk_nbytes
    document.tree |= {
        "dtypes": {"name": ["uint8"], "bits": np.array([8], "<u4")},
        "leaves": {"name": ["w"], "kind": b"\0", "row": bytes(4)},
        "values": [], "containers": {"name": [], "kind": [], "argument": []},
        "tensors": {"dtype": b"\0\0", "ndim": b"\1", "dims": np.array([total], "<u8")},
        "regions": {
            "tensor": bytes(4), "origin": bytes(8), "extent": np.array([total], "<u8"),
            "nchunks": np.array([count], "<u4"),
        },
        "chunks": {"raw": np.full(count, chunk_nbytes, "<u4"), "digest": bytes(16 * count)},
        "attributes": {},
    }  # fmt: skip
    document.files = {
        "id": document.files["id"][:1], "nbytes": np.array([total + 8192], "<u8")
    }  # fmt: skip
    document.placement = {
        "file": bytes(4 * count), "offset": 4096 + chunk_nbytes * np.arange(count, dtype="<u8"),
        "stored": np.full(count, chunk_nbytes, "<u4"), "codec": bytes(count), "pipelines": [[]],
    }  # fmt: skip
    key.write_bytes(document.pack())


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
@pytest.mark.parametrize(("count", "chunk_nbytes"), [(1000, 1 << 30), (3, 1 << 30), (100, 4 << 20)])
def test_a_tensor_larger_than_its_file_is_refused_before_memory_is_taken(
    store: Path, tmp_path: Path, documents: ModuleType, count: int, chunk_nbytes: int
) -> None:
    copy = tmp_path / "store"
    shutil.copytree(store, copy)
    claim(documents, copy, count, chunk_nbytes)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, str(copy), "auto", "read", "mmap", "verify"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    # What no memory could hold is refused by its size alone, before the file is looked at.
    first = "usage-max-nbytes" if count == 1000 else "corrupt-short-file"
    found = done.stdout.split()
    assert found == [first, first, "corrupt-short-file", "problems"], done.stderr


def test_max_nbytes_refuses_before_anything_is_read(store: Path, tmp_path: Path) -> None:
    copy = tmp_path / "store"
    shutil.copytree(store, copy)
    for path in (copy / "data").iterdir():
        path.unlink()
    with pytest.raises(UsageError, match="max_nbytes"):
        ckptfmt.load(copy, max_nbytes=1000)


def test_no_file_outside_of_the_store_is_opened(store: Path, tmp_path: Path) -> None:
    copy = tmp_path / "store"
    shutil.copytree(store, copy)
    for path in sorted((copy / "data").iterdir()):
        outside = tmp_path / path.name
        os.replace(path, outside)
        path.symlink_to(outside)
    modes: tuple[Any, ...] = ("auto", "read", "mmap")
    for mode in modes:
        assert is_refused(attempt(lambda: ckptfmt.load(copy, mode=mode)))  # noqa: B023
