"""What is exported as a DCP directory is what `torch.distributed.checkpoint` loads."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptfmt
from ckptfmt import UnsupportedError, UsageError
from ckptfmt.foreign.exporters import tree as tree_module

torch = pytest.importorskip("torch")
dcp = pytest.importorskip("torch.distributed.checkpoint")

DTYPES = [
    *("bool", "uint8", "uint16", "int8", "int16", "int32", "int64", "float16", "float32"),
    *("float64", "complex64", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn_x2"),
]


def random(dtype: str, *shape: int) -> Any:
    kind = getattr(torch, dtype)
    raw = np.random.default_rng(3).integers(0, 2, int(np.prod(shape)) * kind.itemsize, np.uint8)
    return torch.from_numpy(raw).view(kind).reshape(shape)


def exported(tree: Any, folder: Path, **options: Any) -> Any:
    import ckptfmt.torch as ckt

    ckt.save(tree, folder / "s", durable=False, if_exists="replace")
    return ckptfmt.export(folder / "s", folder / "d", target_format="dcp", **options)


def loaded(target: Any, folder: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(target, checkpoint_id=str(folder / "d"))
    return target


def bits(tensor: Any) -> Any:
    return tensor.reshape(-1).view(torch.uint8).tolist()


def test_every_dtype_is_loaded_bit_for_bit_also_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tree_module, "PIECE_NBYTES", 37)
    tree = {name: random(name, 5, 4) for name in DTYPES}
    tree |= {"scalar": torch.tensor(2.5), "empty": torch.zeros(0, 3)}
    exported(tree, tmp_path)
    target = loaded({name: torch.zeros_like(tensor) for name, tensor in tree.items()}, tmp_path)
    for name, tensor in tree.items():
        assert bits(target[name]) == bits(tensor)
    metadata = dcp.FileSystemReader(str(tmp_path / "d")).read_metadata()
    assert len(metadata.state_dict_metadata["float64"].chunks) == 5


def test_modules_optimizers_lists_and_values_are_loaded(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    tree = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "list": [torch.ones(2), {"x": torch.zeros(1)}],
        "step": 3,
    }
    report = exported(tree, tmp_path)
    assert report.renamed["optimizer/state/~3i0/exp_avg"] == "optimizer.state.0.exp_avg"
    target = loaded(
        {
            "model": torch.nn.Linear(3, 2).state_dict(),
            "list": [torch.zeros(2), {"x": torch.ones(1)}],
            "step": 0,
        },
        tmp_path,
    )
    assert torch.equal(target["model"]["weight"], model.weight)
    assert target["list"][0].tolist() == [1, 1]
    assert target["list"][1]["x"].tolist() == [0]
    assert target["step"] == 3


def test_ties_are_copies_and_what_torch_cannot_hold_is_named(tmp_path: Path) -> None:
    w = torch.ones(2)
    assert exported({"a": w, "b": w}, tmp_path).transformed == {"b": "a copy of a"}
    target = loaded({"a": torch.zeros(2), "b": torch.zeros(2)}, tmp_path)
    assert target["b"].tolist() == [1, 1]
    with pytest.raises(ckptfmt.ExistsError):
        exported({"a": w}, tmp_path)
    report = exported({"a": w, "p": Path("x")}, tmp_path, if_exists="replace")
    assert report.transformed == {"p": "a note that an import reads"}
    assert ckptfmt.open_foreign(tmp_path / "d")["p"] == Path("x")
    with pytest.raises(UnsupportedError, match="t: torch has no dtype"):
        exported({"a": w, "t": np.zeros(1, "M8[s]")}, tmp_path, if_exists="replace")
    exported({"a": torch.zeros(3)}, tmp_path, if_exists="replace")
    assert loaded({"a": torch.ones(3)}, tmp_path)["a"].tolist() == [0, 0, 0]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["d", "s"]
    (tmp_path / "d/.metadata").unlink()
    with pytest.raises(UsageError, match="no export of this format"):
        exported({"a": w}, tmp_path, if_exists="replace")


@pytest.mark.parametrize("tree", [torch.zeros(2), {}])
def test_a_tree_that_is_one_leaf_is_refused(tmp_path: Path, tree: Any) -> None:
    with pytest.raises(UnsupportedError, match="is a dict"):
        exported(tree, tmp_path)
