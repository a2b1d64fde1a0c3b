"""The bounds of the code are those of the specification. Spec: 09-versions-and-errors §9.3."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ckptfmt.format import dtypes, limits

SPEC = (Path(__file__).parents[3] / "spec" / "09-versions-and-errors.md").read_text()


def row(words: str) -> str:
    """The row of the table of limits that begins with these words."""
    table = SPEC.partition("## 9.3")[2].partition("## 9.4")[0]
    found = [line for line in table.splitlines() if line.startswith(f"| {words}")]
    assert len(found) == 1, words
    return found[0].split("|")[2].replace(",", "")


@pytest.mark.parametrize(
    ("words", "number"),
    [
        ("raw length of the four sections", limits.SECTIONS_NBYTES_MAX),
        ("raw length of a section", limits.SECTION_RATIO_MAX),
        ("table of a data file", limits.SECTIONS_NBYTES_MAX),
        ("nesting of a value", limits.VALUE_DEPTH_MAX),
        ("stages of a codec pipeline", limits.PIPELINE_LENGTH_MAX),
        ("pipelines of a document", limits.PIPELINES_MAX),
        ("dimensions of a tensor", limits.NDIM_MAX),
        ("elements of a tensor", limits.INT63_MAX + 1),
        ("elements of a tensor", limits.TENSOR_NBYTES_MAX),
        ("a leaf's name", limits.NAME_NBYTES_MAX),
        ("raw length of a chunk", limits.CHUNK_NBYTES_MAX),
        ("a dtype's name", dtypes.NAME_MAX),
        ("a packed value", limits.VALUE_NBYTES_MAX),
    ],
)
def test_a_limit_is_that_of_the_specification(words: str, number: int) -> None:
    found = [
        int(base) ** int(power) if power else int(base)
        for base, power in re.findall(r"(\d+)(?:\^(\d+))?", row(words))
    ]
    assert number in found


def test_sizes_fit_one_another() -> None:
    assert limits.CHUNK_NBYTES_MIN % limits.BLOCK_NBYTES == 0
    assert limits.CHUNK_NBYTES_DEFAULT % limits.CHUNK_NBYTES_MIN == 0
    assert limits.CHUNK_NBYTES_MIN <= limits.CHUNK_NBYTES_DEFAULT <= limits.CHUNK_NBYTES_MAX
    assert limits.BLOCK_NBYTES % limits.ALIGN_NBYTES == 0
    assert limits.SECTION_RATIO_NBYTES < limits.SECTIONS_NBYTES_MAX
    assert limits.CHUNK_NBYTES_MAX < 1 << 32  # `raw` and `stored` are u32
    assert (limits.MAJOR, limits.MINOR) == (1, 0)
