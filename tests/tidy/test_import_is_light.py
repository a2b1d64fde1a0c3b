"""`import ckptfmt` and `ckptfmt --help` load next to nothing, in a fresh process."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import ckptfmt

HEAVY = {
    *{"numpy", "ml_dtypes", "msgpack", "xxhash", "zstandard", "fsspec", "rich", "tensorstore"},
    *{"torch", "tensorflow", "keras", "jax", "s3fs", "gcsfs", "adlfs", "boto3", "botocore", "h5py"},
    *{"asyncio", "multiprocessing", "concurrent", "urllib", "http", "ssl", "unittest"},
}
IMPORT_S_MAX = 0.2


def loaded_after(statement: str) -> set[str]:
    """Top-level names in sys.modules after a statement, less those of a bare interpreter."""
    report = "import sys, json; print(json.dumps(sorted({m.split('.')[0] for m in sys.modules})))"
    bare, after = (
        set(
            json.loads(
                subprocess.run([sys.executable, "-c", c], check=True, capture_output=True).stdout
            )
        )
        for c in (report, f"{statement}; {report}")
    )
    return after - bare


def test_import_loads_neither_numpy_nor_a_framework_nor_a_client() -> None:
    loaded = loaded_after("import ckptfmt")
    assert loaded & HEAVY == set()
    assert "ckptfmt" in loaded


def test_import_loads_no_module_of_the_package_but_itself() -> None:
    code = "import sys, ckptfmt; print([m for m in sys.modules if m.startswith('ckptfmt.')])"
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert run.stdout.strip() == "[]"


def test_saving_numpy_loads_no_framework_and_no_client() -> None:
    statement = (
        "import ckptfmt, numpy as np; ckptfmt.save({'a': np.zeros(3)}, 'memory://light');"
        "ckptfmt.load('memory://light')"
    )
    loaded = loaded_after(statement)
    assert (
        loaded & {"torch", "tensorflow", "keras", "jax", "s3fs", "botocore", "tensorstore"} == set()
    )
    assert "numpy" in loaded


# Beside NumPy, a command of a small store costs what it imports: half a millisecond a module, and
# several where a module makes classes or brings a library along. What these brought, once:
NOT_FOR_A_COMMAND = {
    *{"logging", "hashlib", "secrets", "urllib.parse", "pathlib", "shutil", "zlib", "difflib"},
    *{"concurrent.futures", "traceback", "zstandard", "ml_dtypes", "rich", "fsspec", "tensorstore"},
    *{"ckptfmt.foreign", "ckptfmt.engine.api", "ckptfmt.engine.save", "ckptfmt.engine.restore"},
    *{"ckptfmt.engine.background", "ckptfmt.engine.bind", "ckptfmt.storage.memory"},
}
NOT_FOR_A_LISTING = NOT_FOR_A_COMMAND | {
    *{"ckptfmt.events", "ckptfmt.reports", "ckptfmt.format.index", "ckptfmt.format.datafile"},
    *{"ckptfmt.format.chunk", "ckptfmt.format.tree_section", "ckptfmt.format.tree_parse"},
    *{"ckptfmt.engine.coordinate", "ckptfmt.engine.commit", "ckptfmt.engine.notes"},
    *{"ckptfmt.engine.open", "ckptfmt.engine.tree", "ckptfmt.engine.plan", "ckptfmt.engine.read"},
}


def modules_of(*code: str) -> set[str]:
    """Names in sys.modules after these lines; what they print is left out."""
    lines = ["import sys", *code, "sys.stderr.write(' '.join(sys.modules))"]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], check=True, capture_output=True, text=True
    )
    return set(done.stderr.split())


@pytest.fixture(scope="module")
def with_numpy() -> set[str]:
    return modules_of("import numpy")


@pytest.mark.parametrize(
    "command", ["ls {}", "show {}", "cat {} w", "diff {}@1 {}@2", "verify {}", "tag {}@1 best"]
)
def test_a_command_loads_what_it_needs(command: str, tmp_path: Path, with_numpy: set[str]) -> None:
    for step in (1, 2):
        ckptfmt.save({"w": np.arange(step)}, tmp_path, step=step, metadata={"epoch": step})
    main = f"main({command.format(*[tmp_path] * 2).split()!r})"
    loaded = modules_of("from ckptfmt.cli import main", main)
    assert "ckptfmt.engine.store" in loaded
    heavy = NOT_FOR_A_LISTING if command.startswith("ls") else NOT_FOR_A_COMMAND
    assert (loaded - with_numpy) & heavy == set()


def test_import_is_fast() -> None:
    """The best of several runs, less the interpreter's own start, in seconds of a core: the machine
    may be busy."""

    def spent() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    def best(code: str) -> float:
        times = []
        for _ in range(5):
            start = spent()
            subprocess.run([sys.executable, "-c", code], check=True)
            times.append(spent() - start)
        return min(times)

    assert best("import ckptfmt") - best("pass") < IMPORT_S_MAX


def test_help_loads_no_numpy() -> None:
    loaded = loaded_after(
        "import sys; sys.argv = ['ckptfmt', '--help']\n"
        "import runpy, contextlib, io\n"
        "with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):\n"
        "    runpy.run_module('ckptfmt', run_name='__main__')\n"
        "pass"
    )
    assert loaded & (HEAVY - {"concurrent", "urllib", "unittest", "http"}) == set()
