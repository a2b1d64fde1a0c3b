"""`make demo`: a real model is trained, killed in the middle of a save, and resumed bit for bit.

Two runs of demo_train.py do the same work. One is left alone. The other is killed with SIGKILL while
a checkpoint is half written, and started again. Then both are compared, byte by byte and without any
help of ckptfmt; the checkpoint is opened by NumPy alone and by TensorFlow; and the command line shows
what is there. It ends with a table, and with exit code 0 only if every line of it holds.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "2",
    "MKL_NUM_THREADS": "2",
    "OMP_WAIT_POLICY": "PASSIVE",  # a busy machine: a waiting thread must not hold a core
    "PYTHONHASHSEED": "0",
    "PYTHONUNBUFFERED": "1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "TF_ENABLE_ONEDNN_OPTS": "0",
}
CLOSE_ENOUGH = 1e-5  # between float32 sums in another order: PyTorch, NumPy, TensorFlow

console = Console(width=min(max(Console().width, 80), 100), highlight=False)


@dataclass
class Outcome:
    """The lines of the closing table: what was claimed, what was seen, whether it held."""

    lines: list[tuple[str, str, bool]] = field(default_factory=list)

    def add(self, claim: str, seen: str, held: bool) -> None:
        self.lines.append((claim, seen, held))

    def compare(self, claim: str, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
        """Equal keys, and equal values for each."""
        same = sum(key in theirs and theirs[key] == value for key, value in ours.items())
        self.add(claim, f"{same} of {len(ours)} equal", ours == theirs and bool(ours))


@dataclass
class Kill:
    """What lay in the store right after the SIGKILL."""

    step: int
    newest: int
    unfinished: list[str]
    part_nbytes: int


def train(store: Path, result: Path, options: argparse.Namespace, every: int) -> list[str]:
    sizes = ["--steps", str(options.steps), "--every", str(every)]
    return [
        *(sys.executable, str(HERE / "demo_train.py")),
        *("--store", str(store), "--result", str(result), *sizes),
    ]


def run(command: list[str]) -> None:
    """Run to the end, its output indented below ours; stop the demo if it fails."""
    with subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            console.print(f"    {line.rstrip()}", markup=False)
    if process.returncode:
        raise SystemExit(f"failed with exit code {process.returncode}: {' '.join(command)}")


def steps_in(store: Path) -> list[int]:
    """Steps whose index exists. Looked up in the folder itself: ckptfmt is what is being tested."""
    found = (path.name for path in (store / "checkpoints").glob("step-*.index"))
    return sorted(int(name.removeprefix("step-").split("~")[0]) for name in found)


def in_flight(store: Path) -> tuple[list[str], int]:
    """Saves that have begun and not ended, and the bytes of their files not yet in place."""
    parts = sorted(str(path.relative_to(store)) for path in (store / "parts").glob("*/*"))
    nbytes = 0
    for path in (store / "tmp").glob("*"):
        try:
            nbytes += path.stat().st_size
        except FileNotFoundError:
            continue  # it was moved into place between the listing and now
    return parts, nbytes


def run_and_kill(command: list[str], store: Path, after: int) -> Kill | None:
    """Start the training; SIGKILL it half-way through the save that follows step `after`.

    None if the save was done before the signal arrived: then there is nothing to show.
    """
    with subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            console.print(f"    {line.rstrip()}", markup=False)
            if "saving" in line and max(steps_in(store), default=0) >= after:
                step = int(line.split()[1])
                break
        else:
            raise SystemExit("the training ended before it could be killed")
        before = set(in_flight(store)[0])
        while process.poll() is None and step not in steps_in(store):
            parts, nbytes = in_flight(store)
            if set(parts) - before and nbytes:
                break
        process.send_signal(signal.SIGKILL)
    console.print("    [bold red]killed[/] (SIGKILL)")
    parts, nbytes = in_flight(store)
    unfinished = [part for part in parts if part not in before]
    if step in steps_in(store) or not unfinished:
        return None
    return Kill(step, max(steps_in(store), default=0), unfinished, nbytes)


def ckptfmt(*arguments: str) -> int:
    """Show a command, run it, and give its exit code."""
    console.print(f"\n[bold]$ ckptfmt {' '.join(arguments)}[/]")
    command = [sys.executable, "-m", "ckptfmt", *arguments]
    return subprocess.run(command, env=ENVIRONMENT, stdin=subprocess.DEVNULL).returncode


def read_elsewhere(reader: str, store: Path, folder: Path) -> dict[str, Any]:
    """Open the newest checkpoint in a process that cannot import PyTorch."""
    result = folder / f"{reader}.json"
    paths = ["--store", str(store), "--probe", str(folder / "killed.json"), "--result", str(result)]
    run([sys.executable, str(HERE / "demo_read.py"), reader, *paths])
    read: dict[str, Any] = json.loads(result.read_text())
    console.print(f"    {len(read['weights'])} tensors as {read['type']}")
    return read


def distance(ours: list[list[float]], theirs: list[list[float]]) -> float:
    return max(
        abs(a - b) for x, y in zip(ours, theirs, strict=True) for a, b in zip(x, y, strict=True)
    )


def check_runs(alone: Mapping[str, Any], killed: Mapping[str, Any], outcome: Outcome) -> None:
    """The two runs, by fingerprints that each took of its own memory."""
    losses = [{f"step {n}": loss for n, loss in enumerate(r["losses"], 1)} for r in (alone, killed)]
    outcome.compare("loss of every step, bit for bit", *losses)
    outcome.compare("weights, bit for bit", alone["weights"], killed["weights"])
    outcome.compare("AdamW state, bit for bit", alone["optimizer"], killed["optimizer"])
    rest = ("scheduler", "order", "dropout")
    outcome.compare(
        "scheduler, data order, dropout RNG", *({k: r[k] for k in rest} for r in (alone, killed))
    )


def check_readers(store: Path, folder: Path, killed: Mapping[str, Any], outcome: Outcome) -> None:
    titles = (("numpy", "NumPy alone"), ("tensorflow", "TensorFlow"))
    for number, (reader, title) in enumerate(titles, 4):
        console.rule(f"{number}. the same checkpoint in {title}", align="left")
        read = read_elsewhere(reader, store, folder)
        apart = distance(read["vectors"], killed["vectors"])
        console.print(f"    sentences encoded there are within {apart:.1e} of PyTorch's")
        outcome.compare(f"read by {title}, bit for bit", killed["weights"], read["weights"])
        outcome.add(f"sentences encoded by {title}", f"within {apart:.1e}", apart < CLOSE_ENOUGH)


def check_store(store: Path, reference: Path, kill: Kill, outcome: Outcome) -> None:
    console.rule("6. the command line", align="left")
    here, other = os.path.relpath(store), os.path.relpath(reference)
    listed = ckptfmt("ls", here)
    ckptfmt("diff", f"{here}@{kill.newest}", here, "--names", "model/embeddings*")
    differs = ckptfmt("diff", other, here)
    outcome.add("diff against the run left alone", "differs" if differs else "same", not differs)
    damaged = ckptfmt("verify", here)
    found = "damage" if damaged else "no damage"
    outcome.add("every byte of the store verified", found, not damaged and not listed)
    left = in_flight(store)
    outcome.add("left behind by the killed save", f"{len(left[0])} files", left == ([], 0))


def report(outcome: Outcome, kill: Kill, store: Path, page: Path, seconds: float) -> int:
    table = Table()
    table.add_column("")
    table.add_column("claim")
    table.add_column("seen", justify="right")
    for claim, seen, held in outcome.lines:
        table.add_row("[green]yes[/]" if held else "[bold red]NO[/]", claim, seen)
    console.rule("what was promised, what was seen", align="left")
    console.print(table)
    console.print(
        f"Killed while saving step {kill.step}, resumed from step {kill.newest}; "
        f"{seconds:.0f} s in all.\n"
        f"Look around: [bold].venv/bin/ckptfmt show {os.path.relpath(store)}[/]\n"
        f"The run on one page: open [bold]{os.path.relpath(page)}[/] in a browser"
    )
    return 0 if all(held for _, _, held in outcome.lines) else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=HERE.parents[1] / ".demo")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--every", type=int, default=4)
    options = parser.parse_args()
    began = time.perf_counter()
    folder: Path = options.folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    reference, store = folder / "alone", folder / "killed"
    outcome = Outcome()

    console.rule("1. a run that is left alone (it saves once, at its end)", align="left")
    run(train(reference, folder / "alone.json", options, options.steps))

    console.rule("2. the same run, killed in the middle of a save", align="left")
    command = train(store, folder / "killed.json", options, options.every)
    kill = None
    for after in range(2 * options.every, options.steps - options.every, options.every):
        kill = run_and_kill(command, store, after)
        if kill is not None:
            break
        console.print("    the save was faster than the signal; once more, at the next one")
    if kill is None:
        raise SystemExit("no save could be caught in the middle: more --steps, please")
    console.print(f"    unfinished in the store: {', '.join(kill.unfinished)}", markup=False)
    console.print(
        f"    and {kill.part_nbytes / 1e6:.0f} MB not yet in place; newest checkpoint: {kill.newest}"
    )

    console.rule("3. the same command again, in a new process", align="left")
    run(command)
    alone, killed = (json.loads((folder / f"{n}.json").read_text()) for n in ("alone", "killed"))
    outcome.add(
        "killed saving a step, resumed from one",
        f"at {kill.step}, from {killed['start']}",
        killed["start"] == kill.newest < kill.step,
    )
    check_runs(alone, killed, outcome)
    check_readers(store, folder, killed, outcome)
    check_store(store, reference, kill, outcome)
    page = folder / "report.html"
    written = ckptfmt("report", str(store), "-o", str(page)) == 0
    outcome.add("its story on one page", f"{page.stat().st_size / 1e3:.0f} kB", written)
    return report(outcome, kill, store, page, time.perf_counter() - began)


if __name__ == "__main__":
    sys.exit(main())
