"""Thousands of names become few rows, whose counts and sizes lose nothing."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ckptfmt.cli.grouping import (
    PARTS_MAX,
    automatic_depth,
    build,
    format_ranges,
    rows_to_depth,
    split_parts,
)
from ckptfmt.cli.leaves import TENSOR, VALUE, Leaf, totals


def tensor(name: str, shape: tuple[int, ...] = (2,), dtype: str = "float32") -> Leaf:
    nbytes = 4
    for n in shape:
        nbytes *= n
    return Leaf(name, TENSOR, dtype, shape, nbytes)


def transformer(layers: int) -> list[Leaf]:
    leaves = [tensor("model/embed.weight", (30, 8))]
    for layer in range(layers):
        for part in ("attn.q", "attn.k", "mlp.up"):
            leaves.append(tensor(f"model/layer.{layer}.{part}.weight", (8, 8)))
            leaves.append(tensor(f"model/layer.{layer}.{part}.bias", (8,)))
    return [*leaves, Leaf("step", VALUE, "int", value=7)]


def test_layers_that_are_alike_share_a_row() -> None:
    root = build(transformer(12))
    rows = rows_to_depth(root, 9)
    labels = [row.label for row in rows]
    assert "layer.[0-11]" in labels
    row = rows[labels.index("layer.[0-11]")]
    assert row.tensors == 72
    assert row.nbytes == 12 * 3 * (8 * 8 + 8) * 4
    assert len(rows) < 20


def test_a_layer_that_differs_has_a_row_of_its_own() -> None:
    leaves = transformer(4)
    leaves.append(tensor("model/layer.2.extra"))
    labels = [row.label for row in rows_to_depth(build(leaves), 9)]
    assert "[0-1,3]" in labels
    assert "2" in labels
    assert "extra" in labels


def test_numbers_within_a_name_are_grouped_too() -> None:
    leaves = [tensor(f"model/dense_{n}/kernel") for n in range(5)]
    (row,) = rows_to_depth(build(leaves), 9)
    assert (row.label, row.tensors) == ("model/dense_[0-4]/kernel", 5)


def test_sums_at_every_depth_are_the_totals() -> None:
    leaves = transformer(6)
    sums = totals(leaves)
    root = build(leaves)
    for depth in range(1, 6):
        top = [row for row in rows_to_depth(root, depth) if row.level == 0]
        assert sum(row.tensors for row in top) == sums.tensors
        assert sum(row.values for row in top) == sums.values
        assert sum(row.nbytes for row in top) == sums.nbytes


def test_a_level_without_likeness_is_cut_and_the_rest_is_counted() -> None:
    leaves = [tensor(chr(97 + n % 26) * (n + 1), (n + 1,)) for n in range(500)]
    rows = rows_to_depth(build(leaves), 1, 40)
    assert len(rows) == 40
    assert rows[-1].label == "… 461 more"
    assert sum(row.tensors for row in rows) == 500
    assert sum(row.nbytes for row in rows) == totals(leaves).nbytes


def test_the_depth_is_chosen_so_that_rows_fit() -> None:
    root = build(transformer(200))
    depth = automatic_depth(root, 10, 40)
    assert len(rows_to_depth(root, depth, 40)) <= 10
    assert automatic_depth(build([tensor("a.b"), tensor("a.c")]), 40, 40) == 2


def test_a_tied_tensor_counts_once() -> None:
    leaves = [tensor("a", (4,)), Leaf("b", TENSOR, "float32", (4,), 64, tied_to="a")]
    row_a, row_b = rows_to_depth(build(leaves), 1)
    assert (row_a.tensors, row_b.tensors) == (1, 0)
    assert row_b.content == "[4] = a"
    assert row_b.nbytes == 0


def test_a_name_of_a_million_dots_is_harmless() -> None:
    name = "a." * 1_000_000 + "b"
    assert len(split_parts(name)) == PARTS_MAX
    assert "".join(split_parts(name)) == name
    assert rows_to_depth(build([tensor(name), tensor("c" + "/d" * 100_000)]), 99)


@given(st.lists(st.text("ab01./~3", min_size=1, max_size=12), unique=True, max_size=30))
def test_no_leaf_is_lost_whatever_the_names(names: list[str]) -> None:
    leaves = [tensor(name) for name in names]
    rows = rows_to_depth(build(leaves), 1)
    assert sum(row.tensors for row in rows) == len(names)
    for name in names:
        assert "".join(split_parts(name)) == name


def test_ranges_are_short() -> None:
    assert format_ranges([str(n) for n in range(12)]) == "0-11"
    assert format_ranges(["3", "1", "0", "7"]) == "0-1,3,7"
    assert format_ranges([str(n) for n in range(0, 100, 2)]) == "0,2,4,…,98"
    assert format_ranges(["00", "01", "10"]) == "00-01,10"
