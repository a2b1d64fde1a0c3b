"""A resumable data set goes on with exactly the elements that would have come."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

import ckptfmt
import ckptfmt.tensorflow as ckf


def numbers() -> Iterator[int]:
    yield from range(20)


def epoch_of(epoch: int) -> Any:
    """A pipeline whose position TensorFlow cannot save."""
    spec = tf.TensorSpec((), tf.int64)
    data = tf.data.Dataset.from_generator(numbers, output_signature=spec)
    return data.shuffle(7, seed=epoch + 1).batch(3)


@pytest.mark.parametrize("count", [0, 1, 6, 7, 10, 16])
def test_it_goes_on_where_it_was_saved_across_epochs(tmp_path: Path, count: int) -> None:
    data, fresh = ckf.resumable(epoch_of), ckf.resumable(epoch_of)
    for _ in range(count):
        next_of(data)
    ckf.save({"data": data}, tmp_path)
    next_of(fresh)
    ckf.restore({"data": fresh}, tmp_path).assert_consumed()
    assert (fresh.epoch, fresh.position) == (data.epoch, data.position)
    assert [next_of(fresh) for _ in range(9)] == [next_of(data) for _ in range(9)]


def next_of(data: Any) -> list[int]:
    """The next batch, of the next epoch if this one is over."""
    while True:
        for batch in data:
            return list(batch.numpy().tolist())


def test_each_loop_is_an_epoch_in_an_order_of_its_own() -> None:
    data = ckf.resumable(epoch_of)
    first, second = ([batch.numpy().tolist() for batch in data] for _ in range(2))
    assert data.epoch == 2
    assert sorted(chain(*first)) == sorted(chain(*second)) == list(range(20))
    assert first != second


def test_its_position_is_two_numbers_that_anybody_reads(tmp_path: Path) -> None:
    data = ckf.resumable(tf.data.Dataset.range(5))
    next(data)
    ckf.save({"data": data}, tmp_path)
    assert ckptfmt.load(tmp_path) == {"data": {"epoch": 0, "position": 1}}


def test_a_distributed_data_set_is_skipped_before_it_is_distributed(
    tmp_path: Path, strategy: Any
) -> None:
    def make() -> Any:
        return ckf.resumable(
            tf.data.Dataset.range(12).batch(4), wrap=strategy.experimental_distribute_dataset
        )

    data, fresh = make(), make()
    next(data)
    ckf.save({"data": data}, tmp_path)
    ckf.restore({"data": fresh}, tmp_path)
    halves = strategy.experimental_local_results(next(fresh))
    assert [half.numpy().tolist() for half in halves] == [[4, 5], [6, 7]]


def test_a_distributed_iterator_itself_is_refused_with_that_cure(
    tmp_path: Path, strategy: Any
) -> None:
    iterator = iter(strategy.experimental_distribute_dataset(tf.data.Dataset.range(4).batch(2)))
    with pytest.raises(ckptfmt.UsageError, match=r"distributed iterator .*data.*resumable"):
        ckf.save({"data": iterator}, tmp_path)


def test_an_order_that_cannot_be_made_again_is_refused() -> None:
    tf.random.set_seed(None)  # an earlier test's would be every shuffle's
    unseeded = tf.data.Dataset.range(9).shuffle(3).batch(2)
    with pytest.raises(ckptfmt.UsageError, match="a shuffle without a seed"):
        ckf.resumable(unseeded)
    with pytest.raises(ckptfmt.UsageError, match="a shuffle without a seed"):
        next(ckf.resumable(lambda epoch: unseeded))
    with pytest.raises(ckptfmt.UsageError, match=r"another order.*lambda epoch"):
        ckf.resumable(tf.data.Dataset.range(9).shuffle(3, seed=1))
    fixed = tf.data.Dataset.range(9).shuffle(3, seed=1, reshuffle_each_iteration=False)
    assert sorted(int(number) for number in ckf.resumable(fixed)) == list(range(9))


@pytest.mark.parametrize(
    "state", [{"epoch": 1}, {"epoch": 1, "position": -1}, {"epoch": 0, "position": True}, 3]
)
def test_another_state_is_refused_and_the_position_stays(tmp_path: Path, state: Any) -> None:
    ckf.save({"data": state}, tmp_path)
    data = ckf.resumable(tf.data.Dataset.range(5))
    next(data)
    with pytest.raises(ckptfmt.MismatchError):
        ckf.restore({"data": data}, tmp_path)
    assert int(next(data)) == 1


def test_data_that_are_shorter_than_the_position_are_refused(tmp_path: Path) -> None:
    def of(length: int) -> Any:
        return ckf.resumable(lambda epoch: tf.data.Dataset.range(length).batch(2))

    data = of(8)
    next(data)
    next(data)
    ckf.save({"data": data}, tmp_path)
    short = of(2)
    ckf.restore({"data": short}, tmp_path)
    with pytest.raises(ckptfmt.MismatchError, match="end before the position"):
        next(short)
    exact = of(4)
    ckf.restore({"data": exact}, tmp_path)
    assert list(exact) == []
    assert exact.epoch == 1


def test_what_is_no_data_set_is_refused() -> None:
    number: Any = 3
    of_range: Any = range
    with pytest.raises(ckptfmt.UsageError, match=r"not a data set.*found int"):
        ckf.resumable(number)
    with pytest.raises(ckptfmt.UsageError, match=r"not a data set.*found range"):
        next(ckf.resumable(of_range))
