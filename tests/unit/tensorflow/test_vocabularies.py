"""Preprocessing layers give equal outputs after a restore, whatever they were built with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import ckptfmt
import ckptfmt.tensorflow as ckf

WORDS = tf.constant(["a", "b", "zzz", "[UNK]", "a\x00", "ü\nb", ""])
NUMBERS = np.array([3, 5, 9, -1])
TEXTS = tf.constant(["a b a", "c b", "none of it"])


def text_layer(**options: Any) -> Any:
    return layers.TextVectorization(**options)


def adapted(layer: Any, data: Any) -> Any:
    layer.adapt(data)
    return layer


CASES: dict[str, tuple[Callable[[], Any], Any, Any]] = {
    "strings": (layers.StringLookup, ["b", "a", "b", "ü\nb", "a\x00"], WORDS),
    "strings-masked": (
        lambda: layers.StringLookup(mask_token="", num_oov_indices=2),
        ["b", "a", "b"],
        WORDS,
    ),
    "one-hot": (lambda: layers.StringLookup(output_mode="one_hot"), ["b", "a"], WORDS),
    "counts-of-numbers": (
        lambda: layers.IntegerLookup(output_mode="count", max_tokens=7, pad_to_max_tokens=True),
        [3, 3, 5],
        NUMBERS,
    ),
    "numbers": (layers.IntegerLookup, [3, 5, 5], NUMBERS),
    "text": (text_layer, TEXTS, TEXTS),
    "text-idf": (lambda: text_layer(output_mode="tf_idf"), TEXTS, TEXTS),
    "text-idf-padded": (
        lambda: text_layer(output_mode="tf_idf", max_tokens=9, pad_to_max_tokens=True),
        TEXTS,
        TEXTS,
    ),
    "ngrams": (lambda: text_layer(ngrams=2, output_mode="multi_hot"), TEXTS, TEXTS),
    "bins": (lambda: layers.Discretization(num_bins=4), np.arange(50.0), np.arange(-3.0, 60.0)),
}


@pytest.mark.parametrize("case", CASES)
def test_outputs_are_equal_after_a_restore_into_a_fresh_layer(tmp_path: Path, case: str) -> None:
    make, data, probe = CASES[case]
    saved, fresh = adapted(make(), data), make()
    ckf.save({"layer": saved}, tmp_path)
    ckf.restore({"layer": fresh}, tmp_path).assert_consumed()
    expected, found = np.asarray(saved(probe)), np.asarray(fresh(probe))
    assert len(np.unique(expected)) > 1
    assert np.array_equal(expected, found)


def test_a_layer_that_was_given_a_vocabulary_keeps_it_and_one_given_another_takes_it(
    tmp_path: Path,
) -> None:
    ckf.save({"layer": layers.StringLookup(vocabulary=["b", "a"])}, tmp_path)
    other = layers.StringLookup(vocabulary=["x", "y", "z"])
    ckf.restore({"layer": other}, tmp_path)
    assert other.get_vocabulary() == ["[UNK]", "b", "a"]


def test_a_vocabulary_is_a_tensor_of_bytes_for_other_readers(tmp_path: Path) -> None:
    layer = adapted(layers.StringLookup(), ["b", "a", "b"])
    ckf.save({"layer": layer}, tmp_path)
    assert ckptfmt.load(tmp_path)["layer"]["vocabulary"].tolist() == [b"b", b"a"]


def test_a_token_that_is_spelled_like_the_unknown_one_stays_a_token(tmp_path: Path) -> None:
    saved, fresh = layers.StringLookup(vocabulary=["[UNK]", "[UNK]", "a"]), layers.StringLookup()
    assert int(saved(tf.constant(["a"]))[0]) == 2
    ckf.save({"layer": saved}, tmp_path)
    ckf.restore({"layer": fresh}, tmp_path)
    assert int(fresh(tf.constant(["a"]))[0]) == 2


def test_inverse_lookup_gives_the_tokens_back(tmp_path: Path) -> None:
    saved = layers.StringLookup(vocabulary=["b", "a"], invert=True)
    fresh = layers.StringLookup(vocabulary=["q"], invert=True)
    ckf.save({"layer": saved}, tmp_path)
    ckf.restore({"layer": fresh}, tmp_path)
    assert fresh(np.array([1, 2, 9])).numpy().tolist() == [b"b", b"a", b"[UNK]"]


def model_of(lookup: Any, norm: Any) -> Any:
    text, number = keras.Input((), dtype="string"), keras.Input((2,))
    row = keras.layers.Embedding(9, 2)(lookup(text))
    return keras.Model([text, number], keras.layers.Dense(1)(row + norm(number)))


def test_layers_in_a_model_come_back_with_it(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    data = random.normal(3.0, 2.0, (64, 2)).astype(np.float32)
    saved = model_of(
        adapted(layers.StringLookup(), ["b", "a"]), adapted(layers.Normalization(), data)
    )
    fresh = model_of(layers.StringLookup(), layers.Normalization())
    inputs = [tf.constant(["a", "c"]), tf.constant(data[:2])]
    ckf.save({"model": saved}, tmp_path)
    assert "model/string_lookup/vocabulary" in ckptfmt.open(tmp_path).names()
    ckf.restore({"model": fresh}, tmp_path).assert_consumed()
    assert np.array_equal(saved(inputs), fresh(inputs))
    assert len(np.unique(saved(inputs))) == 2


def test_a_layer_that_was_never_adapted_is_restored_as_such_and_never_over_a_vocabulary(
    tmp_path: Path,
) -> None:
    ckf.save({"a": layers.StringLookup(), "b": layers.Discretization(num_bins=3)}, tmp_path)
    fresh = layers.StringLookup()
    ckf.restore({"a": fresh, "b": layers.Discretization(num_bins=3)}, tmp_path).assert_consumed()
    assert fresh.get_vocabulary() == ["[UNK]"]
    used = adapted(layers.StringLookup(), ["x"])
    bins = adapted(layers.Discretization(num_bins=3), np.arange(9.0))
    with pytest.raises(ckptfmt.MismatchError, match=r"(?s)a: .*not adapted.*b: .*not adapted"):
        ckf.restore({"a": used, "b": bins}, tmp_path)
    assert used.get_vocabulary() == ["[UNK]", "x"]


@pytest.mark.parametrize(
    ("target", "found"),
    [
        (lambda: layers.StringLookup(max_tokens=2), "at most 2 tokens"),
        (
            lambda: adapted(layers.StringLookup(output_mode="multi_hot"), ["q"]),
            "2 tokens, by which",
        ),
    ],
)
def test_a_vocabulary_that_does_not_fit_is_refused_before_anything_is_touched(
    tmp_path: Path, target: Callable[[], Any], found: str
) -> None:
    ckf.save({"layer": adapted(layers.StringLookup(), ["a", "b", "c"])}, tmp_path)
    layer = target()
    before = layer.get_vocabulary()
    with pytest.raises(ckptfmt.MismatchError, match=found):
        ckf.restore({"layer": layer}, tmp_path)
    assert layer.get_vocabulary() == before


def test_numbers_are_not_taken_for_words(tmp_path: Path) -> None:
    ckf.save({"layer": adapted(layers.IntegerLookup(), [1, 2])}, tmp_path)
    with pytest.raises(ckptfmt.MismatchError, match=r"layer/vocabulary.*bytes.*int64"):
        ckf.restore({"layer": layers.StringLookup()}, tmp_path)


def test_a_vocabulary_that_is_half_learned_is_refused(tmp_path: Path) -> None:
    layer = layers.StringLookup()
    layer.update_state(tf.constant(["a", "b"]))
    with pytest.raises(ckptfmt.UsageError, match=r"still being learned: layer.*finalize_state"):
        ckf.save({"layer": layer}, tmp_path)


def test_a_layer_gets_its_old_vocabulary_back_if_the_restore_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ckf.save({"layer": adapted(layers.StringLookup(), ["a"]), "n": layers.StringLookup()}, tmp_path)
    target, other = adapted(layers.StringLookup(), ["q", "r"]), layers.StringLookup()
    set_vocabulary = target.set_vocabulary

    def fail(*args: Any, **options: Any) -> None:
        set_vocabulary(*args, **options)
        raise OSError("no")

    monkeypatch.setattr(target, "set_vocabulary", fail)
    with pytest.raises(OSError, match="no"):
        ckf.restore({"layer": target, "n": other}, tmp_path)
    assert sorted(target.get_vocabulary()) == ["[UNK]", "q", "r"]


def test_normalization_uses_the_restored_mean_and_the_old_one_after_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = np.arange(12, dtype=np.float32).reshape(6, 2)
    saved, fresh = adapted(layers.Normalization(), data), adapted(layers.Normalization(), data * 3)
    ckf.save({"layer": saved}, tmp_path)
    before = np.asarray(fresh(data))
    with monkeypatch.context() as patch:
        patch.setattr(fresh.count, "_value", None)
        with pytest.raises(ckptfmt.UsageError):
            ckf.restore({"layer": fresh}, tmp_path)
    assert np.array_equal(fresh(data), before)
    ckf.restore({"layer": fresh}, tmp_path)
    assert np.array_equal(fresh(data), saved(data))
    assert not np.array_equal(before, saved(data))


def test_words_in_another_encoding_stay_the_bytes_they_are(tmp_path: Path) -> None:
    saved = layers.StringLookup(encoding="latin-1")
    saved.adapt(tf.constant([b"\xff", b"\xe9", b"\xff"]))
    fresh = layers.StringLookup(encoding="latin-1")
    ckf.save({"layer": saved}, tmp_path)
    ckf.restore({"layer": fresh}, tmp_path)
    assert fresh(tf.constant([b"\xff", b"\xe9", b"x"])).numpy().tolist() == [1, 2, 0]


def test_a_vocabulary_with_a_word_twice_is_refused_and_the_old_one_stays(tmp_path: Path) -> None:
    ckptfmt.save({"layer": {"vocabulary": np.array([b"a", b"a"], object)}}, tmp_path)
    layer = adapted(layers.StringLookup(), ["q"])
    with pytest.raises(ckptfmt.MismatchError, match="did not take the stored vocabulary: layer"):
        ckf.restore({"layer": layer}, tmp_path)
    assert layer.get_vocabulary() == ["[UNK]", "q"]


def test_a_feature_space_with_its_layers_comes_back(tmp_path: Path) -> None:
    data = {"word": np.array(["a", "b", "b"]), "size": np.array([1.0, 2.0, 4.0], np.float32)}

    def make() -> Any:
        return keras.utils.FeatureSpace(
            {"word": "string_categorical", "size": "float_normalized"}, output_mode="concat"
        )

    saved, fresh = make(), make()
    saved.adapt(tf.data.Dataset.from_tensor_slices(data).batch(3))
    fresh.adapt(tf.data.Dataset.from_tensor_slices({**data, "size": data["size"] * 9}).batch(3))
    ckf.save({"features": saved}, tmp_path)
    ckf.restore({"features": fresh}, tmp_path)
    inputs = {key: tf.constant(value[:2]) for key, value in data.items()}
    assert np.array_equal(saved(inputs), fresh(inputs))
