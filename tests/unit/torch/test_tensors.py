"""torch tensors to arrays and back: every dtype, every layout, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import ckptfmt.torch as ckt
from ckptfmt.errors import MismatchError, UnsupportedError, UsageError
from ckptfmt.torch import composites, quantized
from ckptfmt.torch.dtypes import CARRIED
from ckptfmt.torch.tensors import (
    Overwrite,
    bits,
    from_array,
    identity_of,
    plain_array,
    source,
    stored_shape,
    to_array,
)

NARROW_BITS = {"int1": 1, "int2": 2, "int4": 4, "uint1": 1, "uint2": 2, "uint4": 4}
DTYPES = sorted(CARRIED.values(), key=lambda row: row.name)


def patterns(name: str) -> Any:
    """A tensor of the dtype with all bit patterns that it can have, up to 65,536 of them."""
    dtype = getattr(torch, name)
    if name in NARROW_BITS:
        n = NARROW_BITS[name]
        low = 0 if name.startswith("u") else -(1 << (n - 1))
        values = torch.arange(low, low + (1 << n)).to(torch.int8)
        return values.view(torch.uint8).view(dtype)
    width = torch.empty(0, dtype=dtype).element_size()
    if name == "bool":
        return torch.tensor([True, False, True])
    if width == 1:
        return torch.arange(256, dtype=torch.int32).to(torch.uint8).view(dtype)
    if width == 2:
        return torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)
    generator = torch.Generator().manual_seed(len(name))
    raw = torch.randint(0, 256, (512 * width,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype)


def same_bits(a: Any, b: Any) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    plain = [t.detach().resolve_conj().resolve_neg() for t in (a, b)]
    flat = [bits(t).reshape(-1) for t in plain]
    left, right = (t.view(torch.int64) if t.dtype == torch.complex128 else t for t in flat)
    return bool(torch.equal(left, right))


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("row", DTYPES, ids=lambda row: row.name)
def test_every_bit_pattern_of_every_dtype_survives_the_way_through_numpy(row: Any) -> None:
    tensor = patterns(row.name)
    array = to_array(tensor)
    assert array.dtype.name == row.stored
    assert array.shape == stored_shape(tensor)
    back = from_array(array, source(tensor, "t").attributes)
    assert same_bits(tensor, back)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("row", DTYPES, ids=lambda row: row.name)
def test_a_tensor_that_lies_as_it_is_stored_is_taken_as_an_array(row: Any) -> None:
    tensor = patterns(row.name)
    array = plain_array(tensor)
    if array is None:
        assert row.narrow or row.attributes or row.name == "float4_e2m1fn_x2"
        return
    assert array.dtype.name == row.stored
    assert array.tobytes() == bits(tensor).contiguous().numpy().tobytes()
    assert array.__array_interface__["data"][0] == tensor.data_ptr()


def test_a_tensor_with_more_to_say_is_not_taken_as_an_array() -> None:
    class Own(torch.Tensor):
        pass

    z = torch.ones(3, dtype=torch.complex64)
    freed = torch.ones(3)
    freed.untyped_storage().resize_(0)
    others = [
        torch.ones(4, 4).t(), torch.ones(3)[::2], torch.ones(0), z.conj(), z.conj().imag,
        torch.ones(3, device="meta"), torch.ones(3).to_sparse(), freed, torch.ones(3).as_subclass(Own),
        torch._efficientzerotensor((3,)),
    ]  # fmt: skip
    assert [plain_array(tensor) for tensor in others] == [None] * len(others)
    lent = torch.ones(3)
    assert plain_array(lent) is not None
    lent.resize_(100)  # is not forbidden, as `numpy()` would


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("row", DTYPES, ids=lambda row: row.name)
def test_zero_size_and_0d_tensors_keep_shape_and_dtype(row: Any) -> None:
    dtype = getattr(torch, row.name)
    shapes: list[tuple[int, ...]] = [(0,), (2, 0), (0, 4)]
    for shape in shapes:
        tensor = torch.empty(shape, dtype=dtype)
        back = from_array(to_array(tensor), source(tensor, "t").attributes)
        assert back.shape == tensor.shape
        assert back.dtype == dtype
        assert identity_of(tensor) is None
    if row.name != "float4_e2m1fn_x2":
        scalar = patterns(row.name)[1]
        back = from_array(to_array(scalar), source(scalar, "t").attributes)
        assert back.shape == ()
        assert same_bits(back, scalar)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_every_torch_dtype_comes_back_from_a_checkpoint_or_is_quantized(tmp_path: Path) -> None:
    """Enumerated from torch, so that a dtype that nobody thought of fails here."""
    every = {d for d in vars(torch).values() if isinstance(d, torch.dtype)}
    quantized_ones = {getattr(torch, name) for name in quantized.STORED}
    assert every - quantized_ones == set(CARRIED)
    tree = {row.name: patterns(row.name) for row in DTYPES}
    ckt.save(tree, tmp_path)
    loaded = ckt.load(tmp_path)
    for name, tensor in tree.items():
        assert same_bits(loaded[name], tensor), name
    target = {name: torch.zeros_like(bits(t)).view(t.dtype) for name, t in tree.items()}
    assert ckt.restore(target, tmp_path).clean
    for name, tensor in tree.items():
        assert same_bits(target[name], tensor), name


def test_every_torch_layout_is_carried_or_refused_by_name() -> None:
    every = {x for x in vars(torch).values() if isinstance(x, torch.layout)}
    carried = {torch.strided, torch.jagged, *composites._LAYOUTS}
    assert {str(x) for x in every - carried} == {"torch._mkldnn"}
    with pytest.raises(UsageError, match="_mkldnn"):
        source(torch.ones(2, 2).to_mkldnn(), "t")


def test_numpy_sees_the_ml_dtypes_type_with_the_same_bytes() -> None:
    tensor = torch.tensor([1.5, -0.0, float("nan")], dtype=torch.bfloat16)
    array = to_array(tensor)
    assert array.dtype == np.dtype(ml_dtypes.bfloat16)
    assert array.tobytes() == tensor.view(torch.uint8).numpy().tobytes()


def test_pairs_of_4_bit_floats_become_single_ones_low_half_first() -> None:
    tensor = torch.tensor([[0x21, 0x43]], dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    array = to_array(tensor)
    assert array.shape == (1, 4)
    assert array.astype(np.float32).tolist() == [[0.5, 1.0, 1.5, 2.0]]


LAYOUTS: dict[str, Callable[[], Any]] = {
    "transposed": lambda: torch.arange(12.0).reshape(3, 4).t(),
    "strided": lambda: torch.arange(12.0)[::3],
    "permuted": lambda: torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1),
    "expanded": lambda: torch.arange(3.0).expand(4, 3),
    "channels_last": lambda: (
        torch.arange(120.0).reshape(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    ),
    "channels_last_3d": lambda: (
        torch.arange(720.0).reshape(2, 3, 4, 5, 6).contiguous(memory_format=torch.channels_last_3d)
    ),
    "conjugate": lambda: torch.complex(torch.arange(3.0), torch.arange(3.0)).conj(),
    "negative": lambda: torch.complex(torch.arange(3.0), torch.arange(3.0)).conj().imag,
    "offset": lambda: torch.arange(10.0)[4:7],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_is_stored_as_its_values_at_the_views_size(layout: str) -> None:
    tensor = LAYOUTS[layout]()
    array = to_array(tensor)
    assert array.flags.c_contiguous
    assert array.nbytes == tensor.numel() * tensor.element_size()
    assert torch.equal(from_array(array), tensor.resolve_conj().resolve_neg())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.float16, torch.complex128])
def test_a_tensor_that_was_saved_can_still_be_resized(dtype: Any, tmp_path: Path) -> None:
    tensor = torch.zeros(2, dtype=dtype)
    ckt.save({"t": tensor}, tmp_path)
    tensor.resize_(1000)  # what an observer does when it first sees data


def test_a_contiguous_tensor_is_not_copied() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e5m2, torch.bool, torch.complex128):
        tensor = torch.zeros(8, dtype=dtype)
        array = to_array(tensor)
        assert array.__array_interface__["data"][0] == tensor.data_ptr()
        assert from_array(array).data_ptr() == tensor.data_ptr()


@pytest.mark.parametrize("name", ["channels_last", "channels_last_3d"])
def test_channels_last_is_recorded_and_kept(name: str) -> None:
    tensor = LAYOUTS[name]()
    attributes = source(tensor, "t").attributes
    assert attributes == {"torch.memory_format": name}
    back = from_array(to_array(tensor), attributes)
    assert back.stride() == tensor.stride()
    assert torch.equal(back, tensor)
    assert from_array(to_array(tensor)).is_contiguous()


def test_requires_grad_is_recorded_for_a_leaf_but_not_for_a_parameter() -> None:
    leaf = torch.zeros(2, requires_grad=True)
    assert source(leaf, "t").attributes == {"torch.requires_grad": True}
    assert source(torch.nn.Parameter(torch.zeros(2)), "t").attributes == {}


def test_one_tensor_is_one_identity_and_views_that_overlap_are_not() -> None:
    base = torch.arange(20.0)
    assert identity_of(base) == identity_of(base.detach())
    assert identity_of(base[2:5]) == identity_of(base[2:5])
    assert identity_of(base[:12]) != identity_of(base[8:])
    assert identity_of(base) != identity_of(base.view(torch.int32))
    assert identity_of(base[:10]) != identity_of(base[::2])
    z = torch.zeros(3, dtype=torch.complex64)
    assert identity_of(z) != identity_of(z.conj())


class Subclass(torch.Tensor):
    pass


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: torch.zeros(2).as_subclass(Subclass), "Subclass"),
        (lambda: torch.empty(3, device="meta"), "meta tensor"),
        (lambda: torch.nn.parameter.UninitializedParameter(), "lazy"),
        (lambda: torch.zeros((), dtype=torch.float4_e2m1fn_x2), "0-d"),
    ],
)
def test_what_cannot_be_carried_is_refused_by_name(make: Callable[[], Any], text: str) -> None:
    with pytest.raises(UsageError, match=text) as caught:
        source(make(), "a/b")
    assert caught.value.where == "a/b"
    assert caught.value.do


def test_spare_bits_of_a_narrow_integer_are_refused_not_dropped() -> None:
    tensor = torch.tensor([0x7F], dtype=torch.uint8).view(torch.int4)
    with pytest.raises(UsageError, match="spare bits"):
        to_array(tensor, "w")


def test_a_numpy_type_that_torch_lacks_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="float6_e2m3fn"):
        from_array(np.zeros(2, ml_dtypes.float6_e2m3fn))
    with pytest.raises(UsageError, match="even last axis"):
        from_array(np.zeros(3, ml_dtypes.float4_e2m1fn))


def test_default_device_and_dtype_do_not_touch_what_is_loaded() -> None:
    torch.set_default_device("meta")
    torch.set_default_dtype(torch.float64)
    try:
        tensor = from_array(np.arange(3, dtype=np.float32))
        narrow = from_array(np.arange(3).astype(ml_dtypes.bfloat16))
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
    assert tensor.device.type == narrow.device.type == "cpu"
    assert tensor.dtype == torch.float32
    assert narrow.dtype == torch.bfloat16


def overwritten(tensor: Any, value: Any) -> Overwrite:
    overwrite = Overwrite(tensor)
    overwrite.apply(value)
    return overwrite


TARGETS: dict[str, Callable[[], Any]] = {
    "plain": lambda: torch.arange(6.0).reshape(2, 3),
    "parameter": lambda: torch.nn.Parameter(torch.arange(6.0).reshape(2, 3)),
    "transposed": lambda: torch.arange(6.0).reshape(3, 2).t(),
    "view": lambda: torch.arange(60.0).reshape(6, 10)[1:3, 2:8:2],
    "nan": lambda: torch.full((2, 3), float("nan")),
    "negative": lambda: torch.zeros(2, 3, dtype=torch.complex64).conj().imag,
}


@pytest.mark.parametrize("target", TARGETS)
def test_overwriting_keeps_object_storage_and_strides_and_can_be_undone(target: str) -> None:
    tensor = TARGETS[target]()
    before = tensor.detach().clone()
    kept = (tensor.data_ptr(), tensor.stride(), tensor.requires_grad)
    value = torch.tensor([[1.0, -0.0, float("nan")], [float("inf"), 2.0, 3.0]])
    overwrite = overwritten(tensor, value)
    assert torch.equal(
        tensor.detach().resolve_neg().contiguous().view(torch.int32), value.view(torch.int32)
    )
    assert (tensor.data_ptr(), tensor.stride(), tensor.requires_grad) == kept
    overwrite.undo()
    assert same_bits(tensor, before)


def test_a_type_without_a_copy_kernel_is_overwritten_too() -> None:
    target = torch.zeros(4, dtype=torch.uint8).view(torch.int4)
    value = torch.tensor([1, 2, 3, -1], dtype=torch.int8).view(torch.int4)
    overwrite = overwritten(target, value)
    assert target.view(torch.int8).tolist() == [1, 2, 3, -1]
    overwrite.undo()
    assert target.view(torch.int8).tolist() == [0, 0, 0, 0]


def test_a_meta_parameter_becomes_real_and_stays_the_same_object() -> None:
    module = torch.nn.Linear(3, 2, device="meta")
    weight = module.weight
    overwrite = overwritten(weight, torch.ones(2, 3))
    assert module.weight is weight
    assert not weight.is_meta
    assert weight.requires_grad
    assert isinstance(weight, torch.nn.Parameter)
    overwrite.undo()
    assert module.weight is weight
    assert weight.is_meta


def test_an_expanded_target_gets_its_own_storage_and_its_old_one_back() -> None:
    base = torch.zeros(3)
    tensor = base.expand(2, 3)
    overwrite = overwritten(tensor, torch.arange(6.0).reshape(2, 3))
    assert tensor.tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert base.tolist() == [0.0, 0.0, 0.0]
    overwrite.undo()
    assert tensor.data_ptr() == base.data_ptr()
    assert tensor.stride() == (0, 1)


def test_an_inference_tensor_is_overwritten() -> None:
    with torch.inference_mode():
        tensor = torch.zeros(3)
    overwritten(tensor, torch.ones(3))
    assert tensor.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("special", [float("inf"), float("-inf"), float("nan")])
def test_a_cast_never_drops_an_infinity_or_a_nan(special: float, tmp_path: Path) -> None:
    """Some dtypes have no infinity; it must not become a NaN in silence."""
    ckt.save({"w": torch.tensor([special, 1.0])}, tmp_path)
    for dtype in (torch.float16, torch.float8_e5m2, torch.float8_e4m3fn, torch.float8_e8m0fnu):
        target = torch.ones(2).to(dtype)
        try:
            ckt.restore({"w": target}, tmp_path, allow_cast=True)
        except MismatchError:
            assert torch.equal(target.to(torch.float32), torch.ones(2))
            assert torch.tensor(special).to(dtype).float() != special
        else:
            expected = torch.tensor([special, 1.0])
            assert torch.equal(target.float().nan_to_num(7, 8, 9), expected.nan_to_num(7, 8, 9))
