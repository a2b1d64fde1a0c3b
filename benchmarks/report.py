"""What a benchmark prints: ratios first, then seconds and CPU; as a table or as JSON.

A ratio compares two peers within one round, so that what slows the machine for a while slows both;
its median and its range over the rounds are shown. Absolute seconds belong to one machine and one
hour: nothing checks them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from rounds import Round

US, LIMIT = "ckptfmt", "limit"
SMALL_NBYTES = 4_000_000
"""Of tensors, with --small."""


def parser(question: str) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=question)
    made.add_argument("--rounds", type=int, default=5, help="how many are counted (default 5)")
    made.add_argument("--small", action="store_true", help="tiny: to see that it runs")
    made.add_argument("--json", metavar="FILE", help="write all timings there; - is stdout")
    made.add_argument("--dir", default=".", help="a folder on the disk to measure (default: here)")
    return made


def arguments(question: str, *, gb: float | None) -> tuple[argparse.Namespace, int]:
    """What the command line says, and how many bytes of tensors that means.

    Args:
        gb: The default size; None where a benchmark has sizes of its own.
    """
    made = parser(question)
    made.add_argument("--peers", metavar="A,B", help="only these beside ckptfmt")
    if gb is not None:
        made.add_argument("--gb", type=float, default=gb, help=f"of tensors (default {gb:g})")
    found = made.parse_args()
    if found.small:
        found.rounds = min(found.rounds, 1)
        return found, SMALL_NBYTES
    return found, int((0 if gb is None else found.gb) * 1e9)


def chosen(peers: Mapping[str, Any], arguments: argparse.Namespace) -> dict[str, Any]:
    """The peers that take part."""
    if arguments.peers is None:
        return dict(peers)
    wanted = {US, *arguments.peers.split(",")}
    return {name: peer for name, peer in peers.items() if name in wanted}


@contextmanager
def workplace(folder: str) -> Iterator[Path]:
    """A new folder on that disk, removed at the end."""
    made = Path(tempfile.mkdtemp(prefix="ckptfmt-bench-", dir=folder))
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def machine() -> dict[str, Any]:
    """What a number is worth nothing without."""
    model = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.split(":", 1)[1].strip() for line in lines if "model name" in line)
    except (OSError, StopIteration):
        pass
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        load = os.getloadavg()[0]
    except (OSError, ValueError, AttributeError):
        memory, load = 0, -1.0
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "memory_nbytes": memory,
        "load_average": round(load, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        "commit": done.stdout.strip() or "unknown",
        "command": " ".join(["python", *sys.argv]),
    }


def summary(rounds: list[Round], nbytes: int) -> list[dict[str, Any]]:
    """A row for each operation and peer."""
    made = []
    operations = dict.fromkeys(op for peer in rounds[0].values() for op in peer)
    for operation in operations:
        for peer in sorted(rounds[0], key=lambda name: (name != US, name)):
            if operation not in rounds[0][peer]:
                continue
            seconds = [r[peer][operation]["seconds"] for r in rounds]
            cpu = [r[peer][operation]["cpu_s"] for r in rounds]
            row: dict[str, Any] = {
                "operation": operation,
                "peer": peer,
                "seconds": seconds,
                "cpu_s": cpu,
                "cpu_s_per_gb": median(cpu) / (nbytes / 1e9),
            }
            for key in rounds[0][peer][operation].keys() - {"seconds", "cpu_s"}:
                row.setdefault("numbers", {})[key] = [r[peer][operation][key] for r in rounds]
            if operation in rounds[0][US] and peer != US:
                row["ratios"] = [r[US][operation]["seconds"] / s for r, s in zip(rounds, seconds)]
            if peer not in (US, LIMIT) and operation in rounds[0].get(LIMIT, {}):
                limits = [r[LIMIT][operation]["seconds"] for r in rounds]
                row["of_limit"] = [s / limit for s, limit in zip(seconds, limits)]
            made.append(row)
    return made


def show(title: str, rows: list[dict[str, Any]], nbytes: int, rounds: int) -> None:
    """Ratios first: our time over the peer's, below 1 where we are faster."""
    about = machine()
    print(f"{title}: {nbytes / 1e6:.1f} MB, {rounds} rounds")
    print(
        f"{about['cpu']}, {about['cores']} cores, load {about['load_average']}, "
        f"commit {about['commit']}"
    )
    print(f"\n{'operation':<21} {US + ' takes':>14}  of the time of    (lowest to highest round)")
    for row in rows:
        if "ratios" in row:
            ratios = row["ratios"]
            spread = f"({min(ratios):.2f} to {max(ratios):.2f})"
            print(f"{row['operation']:<21} {median(ratios):>13.2f}x  {row['peer']:<16}  {spread}")
    beyond = [row for row in rows if "of_limit" in row]
    if beyond:
        print(f"\n{'operation':<21} {'takes, of the time of ' + LIMIT:>28}    (lowest to highest)")
    for row in beyond:
        ratios = row["of_limit"]
        spread = f"({min(ratios):.2f} to {max(ratios):.2f})"
        print(f"{row['operation']:<21} {row['peer']:<16} {median(ratios):>10.2f}x    {spread}")
    print(
        f"\n{'operation':<21} {'who':<16} {'seconds':>9} {'lowest':>9} {'highest':>9} {'CPU s/GB':>9}"
    )
    for row in rows:
        seconds = row["seconds"]
        print(
            f"{row['operation']:<21} {row['peer']:<16} {median(seconds):>9.4f} "
            f"{min(seconds):>9.4f} {max(seconds):>9.4f} {row['cpu_s_per_gb']:>9.2f}"
        )

    for row in rows:
        for key, found in sorted(row.get("numbers", {}).items()):
            spread = f"({min(found):.6g} to {max(found):.6g})"
            print(
                f"{row['operation']:<21} {row['peer']:<16} {key:<20} {median(found):.6g}  {spread}"
            )


def finish(
    title: str, rounds: list[Round], nbytes: int, arguments: argparse.Namespace,
    more: Mapping[str, Any],
) -> None:  # fmt: skip
    rows = summary(rounds, nbytes)
    document = {
        "schema": 1,
        "benchmark": title,
        "nbytes": nbytes,
        "machine": machine(),
        **more,
        "results": rows,
    }
    if arguments.json == "-":
        print(json.dumps(document, indent=1))
        return
    show(title, rows, nbytes, len(rounds))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(document, indent=1) + "\n")
