"""`ckptfmt report` and `ckptfmt watch`: what they tell of a run with some trouble in it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptfmt
from ckptfmt import CkptWarning, Event, Manager, Store, hooks
from ckptfmt.cli.story import read_story

Run = Callable[..., Any]


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """Six steps, of which three are kept; the newest was damaged and set aside; one is tagged."""
    path = tmp_path / "run"
    told = hooks.jsonl(path / "events.jsonl")
    big = np.arange(50_000, dtype=np.float32)

    def state(step: int) -> dict[str, Any]:
        return {"model": {"frozen": big, "w": np.full(9000, step, np.float32)}, "step": step}

    with Manager(path, keep=3, hooks=[told]) as manager:
        for step in range(1, 7):
            manager.save(state(step), step=step, metrics={"loss": 1 / step, "<b>": float("nan")})
    Store(path).tag("best", 5)

    def refuse(_: object, info: ckptfmt.CheckpointInfo) -> None:
        if info.step == 6:
            raise ArithmeticError("not </script> finite")

    with Manager(path, hooks=[told], validate=[refuse]) as manager:
        with pytest.warns(CkptWarning):
            manager.restore(state(0))
        manager.save(state(60), step=7)
    told(
        Event(
            "alarm",
            time.time(),
            "step-0000000000000007",
            7,
            data={"alarm": "stall", "reason": "slow"},
        )
    )
    return path


class Page(HTMLParser):
    """What is in a page by tag, its places for charts, and every address that a browser would ask for."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.scripts: list[str] = []
        self.heads: list[str] = []
        self.cells: list[str] = []
        self.asked: list[str] = []
        self.charts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "link", "br"):
            self.open.append(tag)
        found = dict(attrs)
        self.asked += [
            value or "" for name, value in attrs if name in ("src", "href", "xlink:href")
        ]
        if "chart" in (found.get("class") or "").split():
            self.charts.append(found.get("id") or "")
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        while self.open and self.open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        where = self.open[-1] if self.open else ""
        if where == "script":
            self.scripts[-1] += data
        for tag, kept in (("h2", self.heads), ("td", self.cells)):
            if where == tag:
                kept.append(data)

    @property
    def story(self) -> Any:
        """What the charts are drawn from."""
        return json.loads(self.scripts[0], parse_constant=lambda text: pytest.fail(text))


def test_the_page_tells_the_whole_story_and_asks_for_nothing(
    trained: Path, run: Run, tmp_path: Path
) -> None:
    out = tmp_path / "r.html"
    result = run("report", trained, "-o", out)
    assert result.code == 0
    assert result.out == f"{out}\n"
    text = out.read_text()
    page = Page(text)
    assert page.asked == []
    assert "url(" not in text
    assert "default-src 'none'" in text
    assert "prefers-color-scheme: dark" in text
    assert "uPlot" in page.scripts[1]
    assert len(page.scripts) == 3
    assert {"Checkpoints over time", "What saves took", "Bytes of each save"} <= set(page.heads)
    assert {"Metric loss", "What the newest checkpoint holds"} <= set(page.heads)
    assert page.charts == ["timeline", "costs", "volumes", "metric-1"]  # NaN alone is no curve
    assert "alarm: stall" in page.cells
    assert any("not </script> finite" in cell for cell in page.cells)
    assert "one of the last 3" in page.cells
    assert text.count('data-head="held"') == 7  # for where the heads of columns have no room
    assert any(cell.startswith("no rule keeps it, and step ") for cell in page.cells)


def test_the_charts_are_drawn_from_the_story(trained: Path, run: Run, tmp_path: Path) -> None:
    run("report", trained, "-o", tmp_path / "r.html")
    story = Page((tmp_path / "r.html").read_text()).story
    fates = {commit["step"]: commit["fate"] for commit in story["commits"]}
    assert fates == {
        1: "deleted", 2: "deleted", 3: "deleted", 4: "there", 5: "tagged", 6: "set aside", 7: "there",
    }  # fmt: skip
    first, second = story["commits"][:2]
    assert first["written_nbytes"] > second["written_nbytes"] > 0
    assert 0 < first["stage_s"] <= first["stall_s"] <= first["durable_s"]
    assert [commit["metrics"]["loss"] for commit in story["commits"][:2]] == [1.0, 0.5]
    assert first["metrics"]["<b>"] is None
    kinds = [row["kind"] for row in story["told"]]
    assert kinds == ["restore.rejected", "restore.done", "alarm"]
    assert story["told"][1]["text"] == "resumed from step 5"


def test_a_save_that_a_kill_cut_off_is_part_of_the_story(tmp_path: Path) -> None:
    told = hooks.jsonl(tmp_path / "events.jsonl")
    for second, (kind, step) in enumerate(
        [
            ("save.start", 1), ("save.commit", 1), ("save.start", 2), ("restore.start", None),
            ("save.start", 2), ("save.error", 2), ("save.start", 3), ("restore.start", None),
            ("save.start", 4),
        ]
    ):  # fmt: skip
        told(Event(kind, float(second), None if step is None else f"step-{step:016d}", step))
    story = read_story(Store(tmp_path), str(tmp_path / "events.jsonl"))
    lost = [(row["step"], row["time_s"]) for row in story.told if row["kind"] == "save.cut-off"]
    assert lost == [(2, 2.0), (3, 6.0)]
    assert story.saving == ("step-0000000000000004", 8.0)  # that one may still be under way


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_draws_every_chart(trained: Path, run: Run, tmp_path: Path, scheme: str) -> None:
    run("report", trained, "-o", tmp_path / "r.html")
    dark = ["--blink-settings=preferredColorScheme=0"] if scheme == "dark" else []
    done = subprocess.run(
        [
            *("chromium", "--headless=new", "--no-sandbox", "--disable-gpu"),
            *("--virtual-time-budget=2000", "--enable-logging=stderr", *dark),
            *("--dump-dom", (tmp_path / "r.html").as_uri()),
        ],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert (
        "CONSOLE" not in done.stderr
    )  # an error of a script, or something the page may not ask for
    assert done.stdout.count("<canvas") == 4


def test_the_page_without_an_event_file_shows_what_the_store_has(
    trained: Path, run: Run, tmp_path: Path
) -> None:
    os.remove(trained / "events.jsonl")
    result = run("report", trained, "-o", tmp_path / "r.html", "--json")
    assert result.json["checkpoints"] == 4  # 4, 5, 7, and 6 that was set aside
    assert result.json["events"] is None
    page = Page((tmp_path / "r.html").read_text())
    assert "What saves took" in page.heads  # kept with each checkpoint


def test_the_page_of_an_empty_store_says_so(tmp_path: Path, run: Run) -> None:
    ckptfmt.save({"w": 1}, tmp_path / "none", step=1)
    ckptfmt.Store(tmp_path / "none").delete(1)
    assert run("report", tmp_path / "none", "-o", tmp_path / "r.html").code == 0
    assert "No checkpoint" in (tmp_path / "r.html").read_text()


def test_watch_once_shows_checkpoints_and_trouble(trained: Path, run: Run) -> None:
    result = run("watch", trained, "--once")
    assert result.code == 0
    heading, columns = result.out.splitlines()[:2]
    assert heading.startswith(f"{trained} · 3 of 7 checkpoints kept · the last ")
    assert columns.split()[:2] == ["CHECKPOINT", "AGE"]
    assert "set aside" in result.out
    assert "alarm step 7: slow" in result.out
    assert "restore.rejected step 6: a validator says: not </script> finite\n" in result.out
    document = run("watch", trained, "--json").json
    assert (document["latest"], document["saving"]) == ("step-0000000000000007", None)
    hooks.jsonl(trained / "events.jsonl")(
        Event("save.start", time.time(), "step-0000000000000008", 8)
    )
    assert run("watch", trained, "--json").json["saving"] == "step-0000000000000008"
    assert "saving step 8 for " in run("watch", trained, "--once").out
    assert run("watch", trained, "--every", 0).code == 2


def test_watch_in_a_pipe_gives_a_line_for_each_new_checkpoint(trained: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "ckptfmt", "watch", str(trained), "--every", "0.05"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        while "alarm" not in process.stdout.readline():
            pass  # the frame at the beginning
        ckptfmt.save({"w": np.zeros(3)}, trained, step=77)
        assert process.stdout.readline().rstrip().endswith("checkpoint 77, 24 B")
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_place_without_a_store_has_no_page(tmp_path: Path, run: Run) -> None:
    made = run("report", tmp_path / "runs", "-o", tmp_path / "r.html")
    assert made.code == 10
    assert "there is no store" in made.err
    assert not (tmp_path / "r.html").exists()
    assert not (tmp_path / "runs").exists()
