"""Iterators over tf.data go on where the saved ones stood; what cannot be saved is refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

import ckptfmt
import ckptfmt.tensorflow as ckf

Range = tf.data.Dataset.range


def shuffled(batch: int = 3) -> Any:
    return Range(40).shuffle(10, seed=5).map(lambda x: x * 2).batch(batch).repeat(2).prefetch(2)


def rest(iterator: Any) -> Any:
    return [item.numpy().tolist() for item in iterator]


def advanced(dataset: Any, count: int) -> Any:
    iterator = iter(dataset)
    for _ in range(count):
        next(iterator)
    return iterator


@pytest.mark.parametrize("count", [0, 5, 15, 27])
def test_an_iterator_goes_on_where_the_saved_one_stood(tmp_path: Path, count: int) -> None:
    saved = advanced(shuffled(), count)
    ckf.save({"data": saved}, tmp_path)
    fresh = advanced(shuffled(), 2)
    ckf.restore({"data": fresh}, tmp_path).assert_consumed()
    expected = rest(saved)
    assert rest(fresh) == expected
    assert len(expected) == 28 - count


def test_saving_does_not_move_the_iterator(tmp_path: Path) -> None:
    iterator, other = advanced(shuffled(), 4), advanced(shuffled(), 4)
    ckf.save({"data": iterator}, tmp_path)
    assert rest(iterator) == rest(other)


def test_an_iterator_inside_of_a_module_and_one_of_numpy(tmp_path: Path) -> None:
    module, other = tf.Module(), tf.Module()
    module.data, other.data = advanced(shuffled(), 3), advanced(shuffled(), 0)
    arrays, fresh = Range(9).as_numpy_iterator(), Range(9).as_numpy_iterator()
    next(arrays)
    ckf.save({"m": module, "n": arrays}, tmp_path)
    assert ckptfmt.open(tmp_path).names() == ["m/data/state", "n/state"]
    ckf.restore({"m": other, "n": fresh}, tmp_path).assert_consumed()
    assert rest(other.data) == rest(module.data)
    assert list(fresh) == list(range(1, 9))


def numbers() -> Iterator[int]:
    yield from range(10)


def generated() -> Any:
    return tf.data.Dataset.from_generator(numbers, output_signature=tf.TensorSpec((), tf.int64))


@pytest.mark.parametrize("count", [0, 1, 5])
@pytest.mark.parametrize(
    "dataset",
    [
        lambda: generated().batch(2),
        lambda: tf.data.Dataset.zip((Range(9), generated())),
        lambda: Range(3).interleave(lambda x: generated().take(2)),
    ],
    ids=["batched", "zipped", "made by a function"],
)
def test_a_transformation_without_state_to_save_is_refused_by_name(
    tmp_path: Path, dataset: Callable[[], Any], count: int
) -> None:
    """Before it gave anything, in the middle, and at its end."""
    with pytest.raises(
        ckptfmt.UsageError,
        match=r"input pipeline cannot be saved: data: found from_generator.*does not support "
        r"checkpointing.*ckptfmt.tensorflow.resumable",
    ):
        ckf.save({"data": advanced(dataset(), count)}, tmp_path)


def test_an_iterator_that_could_not_be_moved_back_is_not_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:  # as before generators were refused before they begin
        patch.setattr("ckptfmt.tensorflow.iterators.is_generated", lambda dataset: False)
        with pytest.warns(ckptfmt.CkptWarning, match="PyFunc"):
            ckf.save({"data": iter(generated())}, tmp_path)
    target = advanced(generated(), 3)
    with pytest.raises(ckptfmt.MismatchError, match=r"could not be moved back: data/state"):
        ckf.restore({"data": target}, tmp_path)
    assert rest(target) == list(range(3, 10))


def test_state_of_its_functions_is_warned_of_by_op(tmp_path: Path) -> None:
    random = Range(5).map(lambda x: tf.random.uniform(()))
    with pytest.warns(ckptfmt.CkptWarning, match="data: its position is saved.*RandomUniform"):
        ckf.save({"data": iter(random)}, tmp_path)


@pytest.mark.parametrize(
    ("other", "found"),
    [
        (lambda: Range(40).batch(3), "Range.*expected Range.* > Batch"),
        (lambda: shuffled().map(lambda x: tf.cast(x, tf.float32)), "float32"),
    ],
)
def test_another_pipeline_is_refused_before_the_iterator_is_touched(
    tmp_path: Path, other: Callable[[], Any], found: str
) -> None:
    ckf.save({"data": advanced(shuffled(), 4)}, tmp_path)
    target, twin = advanced(other(), 1), advanced(other(), 1)
    with pytest.raises(ckptfmt.MismatchError, match=r"(?s)data/state"):
        ckf.restore({"data": target}, tmp_path)
    assert rest(target) == rest(twin)


def test_another_batch_size_is_warned_of(tmp_path: Path) -> None:
    ckf.save({"data": advanced(shuffled(3), 1)}, tmp_path)
    with pytest.warns(ckptfmt.CkptWarning, match=r"batch_size=3.*batch_size=4"):
        ckf.restore({"data": iter(shuffled(4))}, tmp_path)


def test_other_speed_is_not_warned_of(tmp_path: Path) -> None:
    ckf.save({"data": advanced(Range(9).map(lambda x: x).prefetch(2), 4)}, tmp_path)
    other = iter(Range(9).map(lambda x: x).prefetch(5))
    ckf.restore({"data": other}, tmp_path)
    assert rest(other) == [4, 5, 6, 7, 8]


def test_bytes_that_tensorflow_does_not_take_leave_the_iterator_where_it_was(
    tmp_path: Path,
) -> None:
    ckf.save({"data": advanced(shuffled(), 1)}, tmp_path)
    tree = ckptfmt.load(tmp_path)
    tree["data"]["state"][20:40] ^= 255
    target, twin = advanced(shuffled(), 3), advanced(shuffled(), 3)
    with pytest.raises(ckptfmt.MismatchError, match="did not take the stored position: data/state"):
        ckf.restore({"data": target}, tree)
    assert rest(target) == rest(twin)


def test_an_iterator_is_moved_back_if_the_restore_fails_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variable = tf.Variable(1.0)
    ckf.save({"data": advanced(shuffled(), 9), "v": variable}, tmp_path)
    target, twin = advanced(shuffled(), 2), advanced(shuffled(), 2)

    calls: list[Any] = []

    def fail_at_first(value: Any) -> None:
        calls.append(value)
        if len(calls) == 1:
            raise RuntimeError("no")

    monkeypatch.setattr(variable, "assign", fail_at_first)
    with pytest.raises(RuntimeError, match="no"):
        ckf.restore({"data": target, "v": variable}, tmp_path)
    assert rest(target) == rest(twin)
