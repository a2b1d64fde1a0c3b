"""Tensors made of tensors: sparse, quantized, nested, wrapper subclasses; stored as their parts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

import ckptfmt
import ckptfmt.torch as ckt
from ckptfmt.engine.targets import StatefulTarget
from ckptfmt.errors import CkptWarning, CorruptError, MismatchError, UsageError
from ckptfmt.torch import composites
from ckptfmt.torch.composites import kind_of, split
from ckptfmt.torch.targets import TensorTarget
from ckptfmt.torch.tensors import bits, memory_format_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.quantize_per"),
    pytest.mark.filterwarnings("ignore:Sparse"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
    pytest.mark.filterwarnings("ignore:.*ComplexHalf"),
]

Make = Callable[[float], Any]
"""A tensor of one structure; the argument changes its values."""


def dense(x: float) -> Any:
    return torch.tensor([[1.0, 0, 2, 0], [0, 0, 0, 0], [0, 3, -0.0, x], [x, 0, 0, float("nan")]])


def ranges(shape: tuple[int, ...], x: float) -> Any:
    return torch.arange(float(np.prod(shape))).reshape(shape) * x


def per_channel(dtype: torch.dtype, x: float, shape: tuple[int, ...] = (3, 5)) -> Any:
    count = torch.arange(1, shape[0] + 1)
    scales, zeros = count * (0.1 + x / 1000), torch.zeros(shape[0])
    if dtype not in (torch.quint4x2, torch.quint2x4):
        scales, zeros = scales.double(), count
    return torch.quantize_per_channel(ranges(shape, x / 40), scales, zeros, 0, dtype)


def per_tensor(dtype: torch.dtype, x: float) -> Any:
    return torch.quantize_per_tensor(ranges((3, 5), x / 40), 0.1 + x / 1000, 3, dtype)


def image(x: float) -> Any:
    last = ranges((2, 3, 4, 5), x / 100).contiguous(memory_format=torch.channels_last)
    return torch.quantize_per_tensor(last, 0.1, 0, torch.quint8)


def uncoalesced(x: float) -> Any:
    return torch.sparse_coo_tensor([[0, 2, 0], [1, 1, 1]], torch.tensor([x, 2.0, 3.0]), (3, 4))


def jagged(x: float) -> Any:
    return torch.nested.nested_tensor([ranges((2, 3), x), ranges((4, 3), x)], layout=torch.jagged)


def holes(x: float) -> Any:
    padded = ranges((2, 4, 3), x)
    starts, lengths = torch.tensor([0, 1]), torch.tensor([2, 3])
    return torch.nested.narrow(padded, 1, starts, lengths, layout=torch.jagged)


COMPOSITES: dict[str, Make] = {
    "coo": lambda x: dense(x).to_sparse(),
    "coo not coalesced": uncoalesced,
    "coo hybrid": lambda x: torch.sparse_coo_tensor([[0, 3]], ranges((2, 2), x), (4, 2)),
    "coo bfloat16": lambda x: dense(x).bfloat16().to_sparse(),
    "coo complex": lambda x: torch.complex(dense(x), dense(x)).to_sparse(),
    "coo int": lambda x: torch.tensor([[0, int(x)]]).to_sparse(),
    "coo empty": lambda x: torch.sparse_coo_tensor(size=(2, 0, 3)),
    "coo without nonzeros": lambda x: torch.zeros(3, 4).to_sparse(),
    "coo 0-d": lambda x: torch.tensor(x).to_sparse(),
    "coo grad": lambda x: dense(x).to_sparse().requires_grad_(True),
    "csr": lambda x: dense(x).to_sparse_csr(),
    "csr int32": lambda x: torch.sparse_csr_tensor(
        torch.tensor([0, 1, 1], dtype=torch.int32), torch.tensor([1], dtype=torch.int32),
        torch.tensor([x]), (2, 2)
    ),
    "csr batched": lambda x: torch.stack([dense(x), dense(x)]).to_sparse_csr(),
    "csr hybrid": lambda x: ranges((2, 3, 4), x).to_sparse_csr(dense_dim=1),
    "csc": lambda x: dense(x).to_sparse_csc(),
    "bsr": lambda x: dense(x).to_sparse_bsr((2, 2)),
    "bsc": lambda x: dense(x).to_sparse_bsc((2, 1)),
    "qint8": lambda x: per_tensor(torch.qint8, x),
    "quint8": lambda x: per_tensor(torch.quint8, x),
    "qint32": lambda x: per_tensor(torch.qint32, x),
    "qint8 transposed": lambda x: per_tensor(torch.qint8, x).t(),
    "quint8 channels_last": image,
    "qint8 per channel": lambda x: per_channel(torch.qint8, x),
    "quint8 per channel": lambda x: per_channel(torch.quint8, x),
    "qint32 per channel": lambda x: per_channel(torch.qint32, x),
    "quint4x2": lambda x: per_channel(torch.quint4x2, x),
    "quint2x4": lambda x: per_channel(torch.quint2x4, x, (4, 7)),
    "quint4x2 per tensor": lambda x: torch.quantize_per_tensor(
        torch.zeros(3, 3), 0.1 + x, 0, torch.quint4x2
    ),
    "nested": lambda x: torch.nested.nested_tensor([ranges((2, 3), x), ranges((4, 3), x)]),
    "nested transposed": lambda x: torch.nested.nested_tensor(
        [ranges((2, 3), x), ranges((4, 3), x)]
    ).transpose(1, 2),
    "nested scalars": lambda x: torch.nested.nested_tensor([torch.tensor(x), torch.tensor(2.0)]),
    "nested empty": lambda x: torch.nested.nested_tensor([]),
    "nested with an empty one": lambda x: torch.nested.nested_tensor(
        [ranges((2, 3), x), torch.zeros(0, 3)]
    ),
    "jagged": jagged,
    "jagged transposed": lambda x: jagged(x).transpose(1, 2),
    "jagged with holes": holes,
    "two": lambda x: TwoTensor(ranges((2, 3), x), ranges((2, 3), -x)),
    "two of two": lambda x: TwoTensor(
        TwoTensor(ranges((2, 3), x), ranges((2, 3), -x)),
        TwoTensor(ranges((2, 3), x), torch.ones(2, 3)),
    ),
}  # fmt: skip


def value(tensor: Any) -> Any:
    """Everything about a tensor that a checkpoint keeps; equal only if every bit is."""
    kind = kind_of(tensor)
    if not kind:
        raw = tensor.detach().resolve_conj().contiguous()
        raw = bits(raw).numpy().tobytes()
        return str(tensor.dtype), tuple(tensor.shape), memory_format_of(tensor), raw
    parts = split(tensor)
    items = [
        (name, value(item) if isinstance(item, torch.Tensor) else _plain(item))
        for name, item in parts.items.items()
    ]
    return (
        kind,
        str(tensor.dtype),
        tensor.requires_grad,
        sorted(map(repr, parts.facts.items())),
        items,
    )


def _plain(item: Any) -> Any:
    fetch = getattr(item, "fetch", None)
    return item if fetch is None else (item.dtype, fetch().tobytes())


@pytest.mark.parametrize("make", COMPOSITES.values(), ids=COMPOSITES)
def test_a_composite_comes_back_as_the_same_tensor(make: Make, tmp_path: Path) -> None:
    tensor = make(5.0)
    ckt.save({"t": tensor, "l": [tensor]}, tmp_path)
    loaded = ckt.load(tmp_path)
    assert type(loaded["t"]) is type(tensor)
    assert value(loaded["t"]) == value(tensor)
    # One that had to be copied to be saved is two, and so is one without elements in a part.
    parts = [p for p in split(tensor).items.values() if isinstance(p, torch.Tensor)]
    if all(p.numel() for p in parts) and not (tensor.is_nested and not tensor.is_contiguous()):
        assert loaded["l"][0] is loaded["t"]


@pytest.mark.parametrize("make", COMPOSITES.values(), ids=COMPOSITES)
def test_numpy_readers_get_the_parts_by_name_without_a_warning(make: Make, tmp_path: Path) -> None:
    tensor = make(5.0)
    ckt.save({"t": tensor}, tmp_path)
    loaded = ckptfmt.load(tmp_path)["t"]
    assert list(loaded) == list(split(tensor).items)
    arrays = [a for a in loaded.values() if isinstance(a, np.ndarray | dict)]
    assert arrays


def test_numpy_can_compute_with_the_parts(tmp_path: Path) -> None:
    q, c = per_channel(torch.qint8, 5.0), per_channel(torch.quint4x2, 5.0)
    s = dense(5.0).to_sparse_csr()
    ckt.save({"q": q, "c": c, "s": s}, tmp_path)
    loaded = ckptfmt.load(tmp_path)
    for name, tensor in {"q": q, "c": c}.items():
        parts = loaded[name]
        whole = parts["int_repr"].astype(np.float64) - parts["zero_points"][:, None]
        whole *= parts["scales"][:, None]
        assert np.allclose(whole, tensor.dequantize().numpy(), atol=1e-5)
    rows = np.repeat(np.arange(4), np.diff(loaded["s"]["crow_indices"]))
    whole = np.zeros(loaded["s"]["shape"], np.float32)
    whole[rows, loaded["s"]["col_indices"]] = loaded["s"]["values"]
    assert np.array_equal(whole, dense(5.0).numpy(), equal_nan=True)


def lost(self: Any, staged: Any) -> None:
    raise RuntimeError("device lost")


class Last:
    """An object whose turn comes after all tensors, in a test that lets it fail."""

    def state_dict(self) -> dict[str, Any]:
        return {"a": 0}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@pytest.mark.parametrize("make", COMPOSITES.values(), ids=COMPOSITES)
def test_a_composite_target_takes_the_value_and_an_error_gives_the_old_one_back(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor, target = make(5.0), make(1.0)
    ckt.save({"t": tensor, "w": torch.ones(2)}, tmp_path)
    before, kept = value(target), id(target)

    with monkeypatch.context() as patch:
        patch.setattr(TensorTarget, "bind", lost)  # of "w", whose turn comes later
        with pytest.raises(RuntimeError, match="device lost"):
            ckt.restore({"t": target, "w": torch.zeros(2)}, tmp_path)
    assert value(target) == before
    assert ckt.restore({"t": target, "w": torch.zeros(2)}, tmp_path).clean
    assert id(target) == kept
    assert value(target)[4] == value(tensor)[4]
    assert value(target)[2] == before[2]  # requires_grad is the target's


def test_storage_stays_where_the_value_fits_into_it(tmp_path: Path) -> None:
    for name in ("csr", "bsr", "qint8", "qint8 per channel", "nested", "jagged", "coo hybrid"):
        tensor, target = COMPOSITES[name](5.0), COMPOSITES[name](2.0)
        part = "int_repr" if kind_of(target) == "quantized" else "values"
        address = split(target).items[part].data_ptr()
        ckt.save({"t": tensor}, tmp_path / name.replace(" ", "-"))
        ckt.restore({"t": target}, tmp_path / name.replace(" ", "-"))
        assert split(target).items[part].data_ptr() == address
        assert value(target) == value(tensor)


def test_a_pattern_that_another_tensor_shares_is_not_written() -> None:
    rows, columns = torch.tensor([0, 1, 2]), torch.tensor([0, 1])
    target, other = (torch.sparse_csr_tensor(rows, columns, torch.ones(2)) for _ in range(2))
    assert target.col_indices().data_ptr() == other.col_indices().data_ptr()
    stored = torch.sparse_csr_tensor(rows, columns.flip(0), torch.tensor([5.0, 6.0]))
    before = value(other)
    ckt.restore({"t": target}, {"t": stored})
    assert value(target)[4] == value(stored)[4]
    assert value(other) == before


def test_another_number_of_elements_is_a_value_like_any_other(tmp_path: Path) -> None:
    many = torch.nested.nested_tensor([torch.ones(5, 3), torch.ones(1, 3)], layout=torch.jagged)
    tree = {
        "s": dense(1.0).to_sparse(),
        "c": dense(1.0).to_sparse_csr(),
        "p": dense(1.0).to_sparse_csc(),
        "j": many,
        "n": torch.nested.nested_tensor([torch.ones(5, 3), torch.ones(1, 3)]),
    }
    target = {
        "s": torch.zeros(4, 4).to_sparse(),
        "c": torch.eye(4).to_sparse_csr(),
        "p": torch.nn.Parameter(torch.eye(4).to_sparse_csc()),
        "j": jagged(1),
        "n": torch.nn.Parameter(COMPOSITES["nested"](1.0)),
    }
    ckt.save(tree, tmp_path)
    before, kept = {n: value(t) for n, t in target.items()}, {n: id(t) for n, t in target.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StatefulTarget, "bind", lost)
        patch.setattr(StatefulTarget, "order", 9)
        with pytest.raises(RuntimeError, match="lost"):
            ckt.restore({**target, "last": Last()}, {**tree, "last": {"a": 1}})
    assert {n: value(t) for n, t in target.items()} == before
    assert ckt.restore(target, tmp_path).clean
    for name, tensor in tree.items():
        assert value(target[name])[4] == value(tensor)[4]
    assert {n: id(t) for n, t in target.items()} == kept
    assert isinstance(target["p"], torch.nn.Parameter)
    assert isinstance(target["n"], torch.nn.Parameter)


def test_parameters_and_buffers_of_a_module_may_be_composites(tmp_path: Path) -> None:
    def net(x: float) -> Any:
        module = torch.nn.Linear(4, 4)
        module.weight = torch.nn.Parameter(dense(x).to_sparse_csr())
        module.register_buffer("q", per_tensor(torch.qint8, x))
        module.register_buffer("two", TwoTensor(torch.full((2,), x), torch.zeros(2)))
        return module

    module, target = net(5.0), net(1.0)
    weight = target.weight
    ckt.save({"m": module}, tmp_path)
    assert ckt.restore({"m": target}, tmp_path).clean
    assert target.weight is weight
    assert isinstance(target.weight, torch.nn.Parameter)
    assert target.weight.requires_grad
    for name, tensor in module.state_dict().items():
        assert value(target.state_dict()[name]) == value(tensor)
    loaded = ckt.load(tmp_path)["m"]
    assert value(loaded["q"]) == value(module.q)


def test_a_quantized_module_with_code_of_its_own_comes_back(tmp_path: Path) -> None:
    class Packed(torch.nn.Module):
        """As torch's quantized modules do it: the weight is no parameter."""

        def __init__(self, x: float) -> None:
            super().__init__()
            self.bias = torch.nn.Parameter(torch.full((3,), x))
            self.packed = per_channel(torch.qint8, x)

        def get_extra_state(self) -> Any:
            return {"packed": (self.packed, 3)}

        def set_extra_state(self, state: Any) -> None:
            self.packed, _ = state["packed"]

    module, target = Packed(5.0), Packed(1.0)
    ckt.save({"m": module}, tmp_path)
    assert ckt.restore({"m": target}, tmp_path).clean
    assert value(target.packed) == value(module.packed)
    assert torch.equal(target.bias, module.bias)


def test_the_state_of_an_unknown_object_gets_its_composites_back(tmp_path: Path) -> None:
    class Cache:
        def __init__(self, x: float) -> None:
            self.state = {"s": dense(x).to_sparse(), "q": per_channel(torch.quint4x2, x), "n": x}

        def state_dict(self) -> dict[str, Any]:
            return self.state

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.state = state

    cache, target = Cache(5.0), Cache(1.0)
    ckt.save({"c": cache}, tmp_path)
    ckt.restore({"c": target}, tmp_path)
    assert target.state["n"] == 5.0
    for name in "sq":
        assert value(target.state[name]) == value(cache.state[name])


def test_load_like_makes_new_composites(tmp_path: Path) -> None:
    tree = {"s": dense(5.0).to_sparse(), "j": jagged(5.0), "w": torch.ones(2)}
    like = {"s": dense(1.0).to_sparse(), "j": jagged(1.0), "w": torch.zeros(2)}
    ckt.save(tree, tmp_path)
    loaded = ckt.load(tmp_path, like=like)
    for name in "sj":
        assert value(loaded[name]) == value(tree[name])
        assert value(like[name]) != value(tree[name])


def test_device_and_dtype_reach_composites_as_wholes(tmp_path: Path) -> None:
    tree = {"s": dense(5.0).to_sparse(), "q": per_channel(torch.qint8, 5.0), "j": jagged(5.0)}
    ckt.save(tree, tmp_path)
    loaded = ckt.load(tmp_path, dtype={"s": torch.float64, "**": torch.bfloat16})
    assert value(loaded["s"]) == value(tree["s"].double())
    assert value(loaded["q"]) == value(tree["q"])
    assert loaded["j"].dtype == torch.bfloat16
    assert ckt.load(tmp_path, device={"s": "meta"})["s"].is_meta


def test_a_part_of_a_composite_is_a_part(tmp_path: Path) -> None:
    ckt.save({"s": dense(5.0).to_sparse()}, tmp_path)
    loaded = ckt.load(tmp_path, names="s/indices")
    assert list(loaded["s"]) == ["indices"]
    assert torch.equal(loaded["s"]["indices"], dense(5.0).to_sparse().indices())


def test_jagged_tensors_of_one_ragged_axis_still_fit_each_other(tmp_path: Path) -> None:
    a = jagged(2.0)
    b = torch.nested.nested_tensor_from_jagged(torch.ones(6, 3), a.offsets())
    ckt.save({"a": a, "b": b}, tmp_path)
    loaded = ckt.load(tmp_path)
    assert (loaded["a"] + loaded["b"]).shape == loaded["a"].shape


class Scaled(torch.Tensor):
    """A wrapper as torchao writes them: integers and a scale in a class, an enum in the context."""

    @staticmethod
    def __new__(cls, ints: Any, scale: Any, block: tuple[int, ...]) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, ints.shape, dtype=torch.float32)

    def __init__(self, ints: Any, scale: Any, block: tuple[int, ...]) -> None:
        self.ints, self.scale, self.block = ints, scale, block

    def __tensor_flatten__(self) -> Any:
        return ["ints", "scale"], {"block": self.block, "dtype": torch.float32}

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Any:
        return cls(inner["ints"], inner["scale"], context["block"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].ints, args[0].scale, args[0].block)
        if func is torch.ops.aten.clone.default:
            return cls(args[0].ints.clone(), args[0].scale.clone(), args[0].block)
        raise NotImplementedError(str(func))


@pytest.fixture
def registered() -> Any:
    ckt.register_tensor_class(Scaled, "tests.Scaled")
    yield
    del composites._registered["tests.Scaled"]


def scaled(x: int) -> Any:
    return Scaled(torch.full((4, 2), x, dtype=torch.int8), torch.rand(4), (1, 2))


def test_an_unregistered_subclass_is_refused_and_the_cure_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="register_tensor_class") as caught:
        ckt.save({"w": scaled(1)}, tmp_path)
    assert caught.value.where == "w"


def test_a_registered_subclass_comes_back_and_is_a_target(registered: Any, tmp_path: Path) -> None:
    tensor, target = scaled(3), torch.nn.Parameter(scaled(1), requires_grad=False)
    ckt.save({"w": tensor}, tmp_path)
    loaded = ckt.load(tmp_path)["w"]
    assert type(loaded) is Scaled
    assert loaded.block == (1, 2)
    assert value(loaded) == value(tensor)
    ints = target.ints
    ckt.restore({"w": target}, tmp_path)
    assert target.ints is ints
    assert value(target) == value(tensor)


def test_where_a_class_is_not_registered_the_parts_come_with_a_warning(
    registered: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ckt.save({"w": scaled(3)}, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(composites, "_registered", {})
        with pytest.warns(CkptWarning, match="tests.Scaled"):
            loaded = ckt.load(tmp_path)["w"]
    assert sorted(loaded) == ["ints", "scale"]
    assert loaded["ints"].dtype == torch.int8


def test_a_name_stands_for_one_class(registered: Any) -> None:
    with pytest.raises(UsageError, match="another tensor class"):
        ckt.register_tensor_class(TwoTensor, "tests.Scaled")
    with pytest.raises(UsageError, match="__tensor_flatten__"):
        ckt.register_tensor_class(torch.nn.Parameter)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: torch.sparse_coo_tensor([[9]], torch.ones(1), (2,), check_invariants=False),
         "out of bounds"),
        (lambda: torch.empty(2, 3, layout=torch.sparse_coo, device="meta"), "meta"),
        (lambda: torch.ones(2, 2).to_mkldnn(), "layout torch._mkldnn"),
        (lambda: torch.nested.nested_tensor_from_jagged(torch.ones(3, 2), torch.tensor([0, 9])),
         "offsets end"),
    ],
)  # fmt: skip
def test_what_a_load_would_refuse_is_refused_at_save(
    make: Callable[[], Any], text: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=text) as caught:
        ckt.save({"a": {"b": make()}}, tmp_path)
    assert caught.value.where == "a/b"


HOSTILE: dict[str, tuple[str, dict[str, Any]]] = {
    "coo out of bounds": ("coo", {"indices": np.array([[0, 9], [0, 0]])}),
    "coo negative": ("coo", {"indices": np.array([[0, -1], [0, 0]])}),
    "coo of other sizes": ("coo", {"values": np.ones(5, np.float32)}),
    "coo negative shape": ("coo", {"shape": [-4, 4]}),
    "coo shape of text": ("coo", {"shape": "4x4"}),
    "coo indices of floats": ("coo", {"indices": np.zeros((2, 2), np.float32)}),
    "csr falling": ("csr", {"crow_indices": np.array([0, 2, 1, 3, 6])}),
    "csr not to the end": ("csr", {"crow_indices": np.array([0, 2, 2, 3, 4])}),
    "csr beyond the end": ("csr", {"crow_indices": np.array([0, 2, 2, 3, 99])}),
    "csr column": ("csr", {"col_indices": np.array([0, 2, 1, 4, 0, 3])}),
    "bsr rows": ("bsr", {"crow_indices": np.array([0, 1])}),
    "jagged falling": ("jagged", {"offsets": np.array([0, 5, 2])}),
    "jagged beyond": ("jagged", {"offsets": np.array([0, 2, 7])}),
    "jagged lengths": ("jagged with holes", {"lengths": np.array([2, 30])}),
    "nested sizes": ("nested", {"sizes": np.array([[2, 3], [9, 3]])}),
    "nested wrap": ("nested", {"sizes": np.array([[1 << 32, 1 << 32], [6, 3]])}),
    "nested negative": ("nested", {"sizes": np.array([[-2, -3], [4, 3]])}),
    "quantized integers": ("qint8", {"int_repr": np.zeros((3, 5), np.uint8)}),
    "quantized scale": ("qint8", {"scale": "big"}),
    "channels": ("qint8 per channel", {"scales": np.ones(2)}),
    "axis": ("qint8 per channel", {"axis": 7}),
    "two": ("two", {"a": np.zeros((2, 4), np.float32)}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_parts_are_an_error_before_torch_sees_them(name: str, tmp_path: Path) -> None:
    base, changed = HOSTILE[name]
    tensor = COMPOSITES[base](5.0)
    parts = split(tensor)
    items = {**parts.items, **changed}

    original = composites.capture

    def forged(obj: Any) -> Any:
        captured = original(obj)
        captured.tree = items
        return captured

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(composites, "capture", forged)
        ckt.save({"t": tensor}, tmp_path)
    with pytest.raises(CorruptError) as caught:
        ckt.load(tmp_path)
    assert caught.value.where == "t"
    if base != "two":
        assert "Error" not in str(caught.value.found)  # of ours, not of torch
    before = value(tensor)
    with pytest.raises((CorruptError, MismatchError)):
        ckt.restore({"t": tensor}, tmp_path)
    assert value(tensor) == before
    assert set(ckptfmt.load(tmp_path)["t"]) == set(items)


def test_one_composite_under_two_names_takes_no_two_values(tmp_path: Path) -> None:
    ckt.save({"a": per_tensor(torch.qint8, 1.0), "b": per_tensor(torch.qint8, 5.0)}, tmp_path)
    one = per_tensor(torch.qint8, 2.0)
    before = value(one)
    with pytest.raises(MismatchError, match="two stored values"):
        ckt.restore({"a": one, "b": one}, tmp_path)
    assert value(one) == before


def test_scales_of_one_tensor_under_two_names_must_agree(tmp_path: Path) -> None:
    ints = torch.zeros(2, dtype=torch.int8)
    a = torch._make_per_tensor_quantized_tensor(ints, 0.1, 0)
    b = torch._make_per_tensor_quantized_tensor(ints, 0.2, 0)
    ckt.save({"a": a, "b": b}, tmp_path)
    one = torch.quantize_per_tensor(torch.ones(2), 0.5, 0, torch.qint8)
    with pytest.raises(MismatchError, match="two stored values"):
        ckt.restore({"a": one, "b": one}, tmp_path)
    assert one.q_scale() == 0.5


def test_expanded_values_are_filled_and_other_tensors_of_the_pattern_left_alone(
    tmp_path: Path,
) -> None:
    new = torch.sparse_coo_tensor([[1, 2, 4]], [5.0, 6.0, 7.0], (6,), is_coalesced=True)
    ckt.save({"t": new}, tmp_path)
    pattern = torch.tensor([[0, 1, 2]])
    values = torch.zeros(1).expand(3)
    target = torch.sparse_coo_tensor(pattern, values, (6,), is_coalesced=True)
    other = torch.sparse_coo_tensor(pattern, torch.ones(3), (6,), is_coalesced=True)
    ckt.restore({"t": target}, tmp_path)
    assert torch.equal(target.to_dense(), new.to_dense())
    assert torch.equal(other._indices(), torch.tensor([[0, 1, 2]]))


def test_an_error_half_way_through_a_composite_puts_its_first_part_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor, target = COMPOSITES["two of two"](5.0), COMPOSITES["two of two"](2.0)
    ckt.save({"t": tensor}, tmp_path)
    before = value(target)
    calls: list[Any] = []
    fails_at = 0

    def fails_late(of: Any) -> Any:
        calls.append(of)
        if len(calls) == fails_at:
            raise RuntimeError("device lost")
        return bits(of)

    for fails_at in range(1, 40):
        calls.clear()
        with monkeypatch.context() as patch:
            patch.setattr("ckptfmt.torch.composite_targets.bits", fails_late)
            try:
                ckt.restore({"t": target}, tmp_path)
            except RuntimeError:
                pass
            else:
                break
        assert value(target) == before, fails_at
    assert len(calls) > 3
    assert value(target) == value(tensor)
