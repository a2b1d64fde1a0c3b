"""The table of docs/production.md is what `when.young_daly` comes to."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ckptfmt.manager.when import Costs, young_daly_s

PAGE = Path(__file__).parents[3] / "docs" / "production.md"
BETWEEN_S = [7 * 86400.0, 86400.0, 86400.0 / 4, 86400.0 / 24]
ROWS = re.findall(r"^\| ([\d.]+) s \|(.+)\|$", PAGE.read_text(), re.M)


def text(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def cell(cost_s: float, between_s: float) -> str:
    costs = Costs(cost_s, 0.0, 0.0)
    chosen, free = (young_daly_s(costs, between_s, budget) for budget in (0.01, 0.999))
    return text(chosen) if chosen == pytest.approx(free) else f"{text(chosen)} ({text(free)})"


@pytest.mark.parametrize(("cost", "cells"), ROWS)
def test_the_table_how_often_to_save_is_computed(cost: str, cells: str) -> None:
    assert [c.strip() for c in cells.split("|")] == [cell(float(cost), s) for s in BETWEEN_S]


def test_the_table_is_there() -> None:
    assert len(ROWS) == 4
