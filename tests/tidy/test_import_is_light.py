"""`import ckptfmt` and `ckptfmt --help` load next to nothing, in a fresh process."""

from __future__ import annotations

import json
import subprocess
import sys
import time

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


def test_import_is_fast() -> None:
    """The best of several runs, less the interpreter's own start: the machine may be busy."""

    def best(code: str) -> float:
        times = []
        for _ in range(5):
            start = time.perf_counter()
            subprocess.run([sys.executable, "-c", code], check=True)
            times.append(time.perf_counter() - start)
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
