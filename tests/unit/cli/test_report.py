"""`ckptfmt report` and `ckptfmt watch`: what they tell of a run with some trouble in it."""

from __future__ import annotations

import os
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
from ckptfmt.cli.charts import Point, thin, ticks

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
    """Text by tag, and every address that a browser would ask for."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.titles: list[str] = []
        self.heads: list[str] = []
        self.cells: list[str] = []
        self.asked: list[str] = []
        self.tags: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)
        self.tags.append(tag)
        self.asked += [
            value or "" for name, value in attrs if name in ("src", "href", "xlink:href")
        ]

    def handle_endtag(self, tag: str) -> None:
        while self.open and self.open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        where = self.open[-1] if self.open else ""
        for tag, kept in (("title", self.titles), ("h2", self.heads), ("td", self.cells)):
            if where == tag:
                kept.append(data)


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
    assert "script" not in page.tags
    assert {"Checkpoints over time", "What saves took", "Bytes of each save"} <= set(page.heads)
    assert {"Metric loss", "What the newest checkpoint holds"} <= set(page.heads)
    assert any("6: set aside" in tip for tip in page.titles)
    assert any("5: tagged" in tip for tip in page.titles)
    assert any("1: deleted" in tip for tip in page.titles)
    assert any("resumed here" in tip for tip in page.titles)
    assert any("reused" in tip and not tip.endswith(" 0 B reused") for tip in page.titles)
    assert "alarm: stall" in page.cells
    assert any("not </script> finite" in cell for cell in page.cells)
    assert "prefers-color-scheme: dark" in text


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
    assert run("report", tmp_path / "none", "-o", tmp_path / "r.html").code == 0
    assert "No checkpoint" in (tmp_path / "r.html").read_text()
    assert not (tmp_path / "none").exists()


def test_watch_once_shows_checkpoints_and_trouble(trained: Path, run: Run) -> None:
    result = run("watch", trained, "--once")
    assert result.code == 0
    assert result.out.splitlines()[0].split()[:2] == ["CHECKPOINT", "AGE"]
    assert "set aside" in result.out
    assert "alarm step-0000000000000007 slow" in result.out
    document = run("watch", trained, "--json").json
    assert document["latest"] == "step-0000000000000007"
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


def test_ticks_are_round_and_within() -> None:
    assert ticks(0, 10) == [0, 5, 10]
    assert ticks(0.13, 0.87) == pytest.approx([0.2, 0.4, 0.6, 0.8])
    assert ticks(3, 3) == [3]


def test_thinning_keeps_peaks() -> None:
    points = [Point(float(n), 9.0 if n == 1234 else 1.0, "") for n in range(5000)]
    made = thin(points, 100)
    assert len(made) <= 100
    assert max(point.y for point in made) == 9.0
