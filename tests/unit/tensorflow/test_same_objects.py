"""The same objects held in another way: a dict, a module, a tf.train.Checkpoint that counts saves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import ckptfmt
import ckptfmt.tensorflow as ckf

FORMS = ("dict", "module", "tf.train.Checkpoint")


def objects(start: float, *, built: bool = True) -> dict[str, Any]:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, name="head")])
    optimizer = keras.optimizers.Adam()
    if built:
        optimizer.build(model.trainable_variables)
        for variable in optimizer.variables[2:]:
            variable.assign(tf.fill(variable.shape, start))
    return {"model": model, "optimizer": optimizer, "v": tf.Variable(start)}


def held(form: str, parts: dict[str, Any]) -> Any:
    if form == "dict":
        return parts
    if form == "tf.train.Checkpoint":
        return tf.train.Checkpoint(**parts)
    module = tf.Module()
    for name, part in parts.items():
        setattr(module, name, part)
    return module


@pytest.mark.parametrize("built", [True, False], ids=["built", "not built"])
@pytest.mark.parametrize("there", FORMS)
@pytest.mark.parametrize("here", FORMS)
def test_what_holds_the_objects_makes_no_difference(
    tmp_path: Path, here: str, there: str, built: bool
) -> None:
    first, fresh = objects(3.0), objects(5.0, built=built)
    ckf.save(held(here, first), tmp_path, step=1)
    ckf.restore(held(there, fresh), tmp_path).assert_consumed()
    for name in ("model", "optimizer"):
        values = [[v.numpy() for v in one[name].variables] for one in (first, fresh)]
        assert len(values[0]) == len(values[1])
        assert all(map(np.array_equal, *values))
    assert float(fresh["v"]) == 3.0


def test_a_counter_of_saves_alone_is_no_difference_and_the_report_says_so(tmp_path: Path) -> None:
    first, fresh = objects(3.0), objects(5.0)
    counted = tf.train.Checkpoint(**first)
    counted.save(tmp_path / "theirs" / "c")
    ckf.save(counted, tmp_path / "ours", step=1)
    for source in (tmp_path / "ours", ckptfmt.open_foreign(str(tmp_path / "theirs" / "c-1"))):
        status = ckf.Checkpoint(**fresh).restore(source)
        status.assert_consumed()
        assert status.report.unexpected == status.report.spare == ("save_counter",)
        assert "save_counter (spare)" in str(status.report)
        assert float(fresh["v"]) == 3.0
        fresh["v"].assign(0.0)
    back = tf.train.Checkpoint(**fresh)
    back.save_counter.assign(7)
    ckf.restore(back, tmp_path / "ours").assert_consumed()
    assert int(back.save_counter) == 1, "who counts is given the count"


def test_a_counter_that_is_not_stored_stays_what_it_is(tmp_path: Path) -> None:
    first, fresh = objects(3.0), objects(5.0)
    ckf.Checkpoint(**first).save(tmp_path, step=1)
    counted = tf.train.Checkpoint(**fresh)
    counted.save_counter.assign(7)
    status = ckf.restore(counted, tmp_path)
    status.assert_consumed()
    assert status.report.missing == status.report.spare == ("save_counter",)
    assert (int(counted.save_counter), float(fresh["v"])) == (7, 3.0)


def test_a_counter_of_saves_is_no_match(tmp_path: Path) -> None:
    counted = tf.train.Checkpoint(a=tf.Variable(1.0))
    counted.save_counter.assign(7)
    ckf.save(counted, tmp_path, step=1)
    with pytest.raises(ckptfmt.MismatchError, match=r"(?s)missing in the checkpoint: b.*target: a"):
        ckf.restore({"b": tf.Variable(1.0)}, tmp_path)
