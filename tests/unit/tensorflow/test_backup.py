"""BackupAndRestore: an interrupted fit ends as the uninterrupted one, bit for bit."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import ckptfmt
import ckptfmt.tensorflow as ckf
from ckptfmt.errors import CkptWarning, MismatchError, UsageError

X = np.random.default_rng(0).normal(size=(22, 4)).astype("float32")
Y = np.random.default_rng(1).integers(0, 3, 22)
EPOCHS = 3

pytestmark = pytest.mark.filterwarnings(
    "ignore:__array__ implementation:DeprecationWarning",  # Keras's own
    "ignore:Your input ran out of data",
    "ignore:`shuffle=True` was passed",
)


class Interrupted(Exception):
    """Stands for a crash."""


class Spy(keras.callbacks.Callback):
    """Writes down what a callback sees, and ends a fit behind its n-th batch."""

    def __init__(self, at: int = 0) -> None:
        super().__init__()
        self.at, self.count, self.seen = at, 0, list[Any]()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen.append((batch, logs))
        self.count += 1
        if self.count == self.at:
            raise Interrupted

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.seen.append((epoch, "epoch", logs))


class Late(keras.Model):
    """Has no variables before its first batch; draws numbers; changes state that is not trained."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.inner, self.drop = layers.Dense(width, activation="relu"), layers.Dropout(0.5)
        self.norm, self.out = layers.BatchNormalization(), layers.Dense(3)

    def call(self, x: Any, training: bool = False) -> Any:
        x = self.drop(self.inner(x), training=training)
        return self.out(self.norm(x, training=training))


def make(*, run_eagerly: bool = True, width: int = 5, **compile_options: Any) -> Any:
    """Eager unless asked: without tracing a fit takes a fraction of the time."""
    keras.utils.set_random_seed(7)
    model = Late(width)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"], run_eagerly=run_eagerly, **compile_options)
    return model


class Sequence(keras.utils.PyDataset):
    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Any:
        return X[index * 4 : index * 4 + 4], Y[index * 4 : index * 4 + 4]


class Reshuffled(Sequence):
    """Changes itself from epoch to epoch, and says how."""

    def __init__(self) -> None:
        super().__init__()
        self.rng = np.random.default_rng(3)
        self.order = np.arange(5)

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(int(self.order[index]))

    def on_epoch_end(self) -> None:
        self.rng.shuffle(self.order)

    def get_state(self) -> Any:
        return {"order": self.order.copy(), "rng": self.rng.bit_generator.state}

    def set_state(self, state: Any) -> None:
        self.order = np.array(state["order"])
        self.rng.bit_generator.state = state["rng"]


def forever() -> Iterator[Any]:
    while True:
        for start in range(0, 20, 4):
            yield X[start : start + 4], Y[start : start + 4]


def rows() -> Any:
    return tf.data.Dataset.from_tensor_slices((X, Y))


def generated() -> Any:
    spec = (tf.TensorSpec((None, 4)), tf.TensorSpec((None,), tf.int64))
    once = lambda: (Sequence()[i] for i in range(5))  # noqa: E731
    return tf.data.Dataset.from_generator(once, output_signature=spec).prefetch(2)


DATA: dict[str, Callable[[], dict[str, Any]]] = {
    "arrays": lambda: {"x": X, "y": Y, "batch_size": 4},
    "shuffled": lambda: {"x": rows().shuffle(30, seed=3).batch(4).prefetch(2)},
    "unknown length": lambda: {
        "x": rows().filter(lambda x, y: y < 2).shuffle(30, seed=3).batch(4).prefetch(2)
    },
    "repeated": lambda: {"x": rows().shuffle(9, seed=3).repeat().batch(4), "steps_per_epoch": 4},
    "sequence": lambda: {"x": Sequence()},
    "reshuffled sequence": lambda: {"x": Reshuffled()},
    "generator": lambda: {"x": forever(), "steps_per_epoch": 4},
    "from_generator": lambda: {"x": generated()},
}
LOSSY = ("generator", "from_generator")


def fit(model: Any, data: str, *callbacks: Any, epochs: int = EPOCHS, **more: Any) -> Any:
    return model.fit(**DATA[data](), epochs=epochs, verbose=0, callbacks=list(callbacks), **more)


def interrupted(data: str, folder: Path, at: int, every: Any, **options: Any) -> None:
    backup = ckf.BackupAndRestore(folder, save_freq=every, delete_checkpoint=False)
    with pytest.raises(Interrupted):
        fit(make(**options), data, Spy(at), backup)
    # The next process has other generators; the saves are done there, or they never were.
    backup._manager.wait()
    random.random()
    np.random.random()


def values(model: Any) -> list[bytes]:
    metrics = [v for metric in model.metrics for v in metric.variables]
    return [v.numpy().tobytes() for v in [*model.variables, *model.optimizer.variables, *metrics]]


def assert_resumes(
    data: str, folder: Path, at: int, every: Any, *, first: int, **options: Any
) -> None:
    whole, spy = make(**options), Spy()
    history = fit(whole, data, spy, ckf.BackupAndRestore(folder / "whole", save_freq=every))
    after = random.random(), np.random.random()
    folder = folder / "interrupted"
    interrupted(data, folder, at, every, **options)
    resumed, seen = make(**options), Spy()
    backup = ckf.BackupAndRestore(folder, save_freq=every)
    again = fit(resumed, data, seen, backup)
    assert values(resumed) == values(whole)
    assert again.history == history.history
    assert again.epoch == history.epoch
    assert seen.seen == spy.seen[-len(seen.seen) :]
    assert seen.seen[0][0] == first
    assert (random.random(), np.random.random()) == after
    assert ckptfmt.Store(folder).checkpoints() == []


@pytest.mark.parametrize("data", DATA)
@pytest.mark.filterwarnings("ignore:fit will resume by drawing")
def test_a_fit_resumes_behind_the_batch_that_was_saved(tmp_path: Path, data: str) -> None:
    assert_resumes(data, tmp_path, 5, 3, first=3)


def test_a_fit_in_graphs_of_several_steps_resumes_too(tmp_path: Path) -> None:
    assert_resumes("shuffled", tmp_path, 3, 2, first=5, run_eagerly=False, steps_per_execution=2)


@pytest.mark.slow
@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize(
    "options", [{}, {"run_eagerly": False}, {"run_eagerly": False, "steps_per_execution": 2}]
)
@pytest.mark.filterwarnings("ignore:fit will resume by drawing")
def test_a_fit_resumes_from_batches_of_every_epoch(
    tmp_path: Path, data: str, options: dict[str, Any]
) -> None:
    each = options.get("steps_per_execution", 1)
    whole, spy = make(**options), Spy()
    fit(whole, data, spy, ckf.BackupAndRestore(tmp_path / "whole"))
    batches = [row for row in spy.seen if row[1] != "epoch"]
    for at in range(2, len(batches) + 1, 4):
        folder = tmp_path / str(at)
        interrupted(data, folder, at, each, **options)
        resumed, seen = make(**options), Spy()
        fit(resumed, data, seen, ckf.BackupAndRestore(folder, save_freq=each))
        assert values(resumed) == values(whole), at
        assert not seen.seen or seen.seen == spy.seen[-len(seen.seen) :]


def test_a_fit_resumes_at_the_epoch_with_what_other_callbacks_knew(tmp_path: Path) -> None:
    def others() -> list[Any]:
        return [
            keras.callbacks.EarlyStopping("loss", patience=2, min_delta=10.0),
            keras.callbacks.ReduceLROnPlateau("loss", patience=1, factor=0.5, min_delta=10.0),
            keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9),
        ]

    whole = make()
    history = fit(whole, "arrays", *others(), epochs=9)
    assert len(history.epoch) == 3  # it stopped early
    backup = ckf.BackupAndRestore(tmp_path)
    with pytest.raises(Interrupted):
        fit(make(), "arrays", backup, *others(), Spy(9), epochs=9)
    backup._manager.wait()
    resumed = make()
    again = fit(resumed, "arrays", ckf.BackupAndRestore(tmp_path), *others(), epochs=9)
    assert again.history == history.history
    assert values(resumed) == values(whole)


class Halves(Late):
    """Its compiled optimizer has a part of it, and one of its own the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.head_optimizer = keras.optimizers.Adam()

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            out = self(x, training=True)
            loss = self.compute_loss(x, y, out)
        all_of_them = self.trainable_variables
        grads = tape.gradient(loss, all_of_them)
        self.optimizer.apply(grads[:-2], all_of_them[:-2])
        self.head_optimizer.apply(grads[-2:], all_of_them[-2:])
        return self.compute_metrics(x, y, out)


def test_a_fit_with_an_optimizer_for_each_part_resumes(tmp_path: Path) -> None:
    def make_halves() -> Any:
        keras.utils.set_random_seed(7)
        model = Halves()
        model.compile("adam", make().loss, run_eagerly=True)
        return model

    whole = make_halves()
    fit(whole, "arrays", epochs=1)
    backup = ckf.BackupAndRestore(tmp_path, save_freq=2)
    with pytest.raises(Interrupted):
        fit(make_halves(), "arrays", backup, Spy(3), epochs=1)
    backup._manager.wait()
    resumed = make_halves()
    fit(resumed, "arrays", ckf.BackupAndRestore(tmp_path), epochs=1)
    assert values(resumed) == values(whole)
    state = [[v.numpy().tobytes() for v in m.head_optimizer.variables] for m in (whole, resumed)]
    assert state[0] == state[1]


def test_a_fit_whose_averaged_weights_are_swapped_in_between_epochs_resumes(tmp_path: Path) -> None:
    def make_averaged() -> Any:
        model = make()
        optimizer = keras.optimizers.Adam(0.01, use_ema=True, ema_momentum=0.5)
        model.compile(optimizer, model.loss, metrics=["accuracy"], run_eagerly=True)
        return model

    def swap() -> Any:
        return keras.callbacks.SwapEMAWeights(swap_on_epoch=True)

    whole = make_averaged()
    history = fit(whole, "arrays", swap(), epochs=2)
    backup = ckf.BackupAndRestore(tmp_path)
    with pytest.raises(Interrupted):
        fit(make_averaged(), "arrays", backup, swap(), Spy(7), epochs=2)
    backup._manager.wait()
    resumed = make_averaged()
    again = fit(resumed, "arrays", ckf.BackupAndRestore(tmp_path), swap(), epochs=2)
    assert again.history == history.history
    assert values(resumed) == values(whole)


def test_validation_and_a_fit_that_was_over_change_nothing(tmp_path: Path) -> None:
    whole = make()
    fit(whole, "arrays", validation_data=(X, Y))
    model = make()
    backup = ckf.BackupAndRestore(tmp_path, save_freq=2, delete_checkpoint=False)
    fit(model, "arrays", backup, validation_data=(X, Y))
    assert values(model) == values(whole)
    again = make()
    fit(again, "arrays", ckf.BackupAndRestore(tmp_path, save_freq=2), validation_data=(X, Y))
    assert values(again)[: len(again.variables)] == values(whole)[: len(again.variables)]
    assert again._initial_epoch is None
    assert ckptfmt.Store(tmp_path).checkpoints() == []


def test_only_its_own_checkpoints_are_deleted(tmp_path: Path) -> None:
    ckptfmt.save({"a": 1}, tmp_path, name="mine")
    backup = ckf.BackupAndRestore(tmp_path, save_freq=2, keep=2)
    fit(make(), "arrays", backup, epochs=1)
    assert ckptfmt.Store(tmp_path).names() == ["mine"]


def test_a_damaged_newest_backup_is_passed_over_for_the_one_before(tmp_path: Path) -> None:
    backup = ckf.BackupAndRestore(
        tmp_path, save_freq=2, double_checkpoint=True, delete_checkpoint=False
    )
    whole = make()
    fit(whole, "arrays", backup)
    steps = ckptfmt.Store(tmp_path).steps()
    assert len(steps) == 2
    (index,) = (tmp_path / "checkpoints").glob(f"*{steps[-1]}~0.index")
    index.write_bytes(index.read_bytes()[:-9])
    resumed, spy = make(), Spy()
    with pytest.warns(CkptWarning, match="passed over|damaged|skipped"):
        fit(resumed, "arrays", spy, ckf.BackupAndRestore(tmp_path, save_freq=2))
    assert spy.seen
    assert values(resumed) == values(whole)


def test_other_data_or_other_steps_are_refused_and_nothing_changes(tmp_path: Path) -> None:
    interrupted("shuffled", tmp_path, 3, 2)
    model = make()
    backup = ckf.BackupAndRestore(tmp_path, save_freq=2)
    with pytest.raises(MismatchError, match="other data"):
        fit(model, "arrays", backup)
    with pytest.raises(MismatchError, match="another kind"):
        fit(model, "shuffled", backup, steps_per_epoch=3)
    assert int(model.optimizer.iterations) == 0
    with pytest.raises(MismatchError, match="shape"):
        fit(make(width=6), "shuffled", backup)


@pytest.mark.parametrize("data", ["arrays", "batched"])
def test_another_batch_size_is_refused_within_an_epoch_and_taken_between_two(
    tmp_path: Path, data: str
) -> None:
    def run(model: Any, size: int, *callbacks: Any) -> None:
        if data == "arrays":
            model.fit(X, Y, batch_size=size, epochs=2, verbose=0, callbacks=list(callbacks))
        else:
            rows = tf.data.Dataset.from_tensor_slices((X, Y)).batch(size)
            model.fit(rows, epochs=2, verbose=0, callbacks=list(callbacks))

    cuts: list[Any] = [(2, 3), ("epoch", 7)]
    for every, at in cuts:
        backup = ckf.BackupAndRestore(tmp_path / str(every), save_freq=every)
        with pytest.raises(Interrupted):
            run(make(), 4, backup, Spy(at))
        backup._manager.wait()
    model = make()
    with pytest.raises(MismatchError, match=r"other batches.*batches: 6.*batches: 3"):
        run(model, 8, ckf.BackupAndRestore(tmp_path / "2", save_freq=2))
    assert int(model.optimizer.iterations) == 0
    run(model, 8, ckf.BackupAndRestore(tmp_path / "epoch"))
    assert int(model.optimizer.iterations) == 6 + 3


def test_a_fit_that_was_killed_at_its_end_ends_as_it_would_have(tmp_path: Path) -> None:
    """Stopped early or not: no epoch more, the best weights, and the whole history."""

    class Killed(keras.callbacks.Callback):
        def on_train_end(self, logs: Any = None) -> None:
            raise Interrupted

    def early(patience: int = 1) -> Any:
        return keras.callbacks.EarlyStopping(
            "loss", patience=patience, min_delta=10.0, restore_best_weights=True
        )

    for epochs in (9, 1):
        whole, folder = make(), tmp_path / str(epochs)
        history = fit(whole, "arrays", early(), epochs=epochs)
        backup = ckf.BackupAndRestore(folder)
        with pytest.raises(Interrupted):
            fit(make(), "arrays", Killed(), early(), backup, epochs=epochs)
        backup._manager.wait()
        patient, anew = tmp_path / f"{epochs}-patient", make()
        shutil.copytree(folder, patient)
        again = fit(anew, "arrays", early(), ckf.BackupAndRestore(folder), epochs=epochs)
        assert again.history == history.history
        assert [v.tobytes() for v in anew.get_weights()] == [
            v.tobytes() for v in whole.get_weights()
        ]
        longer = fit(make(), "arrays", early(9), ckf.BackupAndRestore(patient), epochs=4)
        assert len(longer.epoch) == 4


@pytest.mark.parametrize("data", LOSSY)
def test_where_the_position_is_lost_a_warning_says_so(tmp_path: Path, data: str) -> None:
    with pytest.warns(CkptWarning, match="drawing and dropping"):
        fit(make(), data, ckf.BackupAndRestore(tmp_path, save_freq=2), epochs=1)


def test_a_sequence_that_changes_itself_in_secret_is_warned_of_and_made_to_do_so_again(
    tmp_path: Path,
) -> None:
    class Secret(Reshuffled):
        get_state = set_state = None  # type: ignore[assignment]

    DATA["secret"] = lambda: {"x": Secret()}
    try:
        with pytest.warns(CkptWarning, match="get_state and set_state"):
            assert_resumes("secret", tmp_path, 9, 7, first=2)
    finally:
        del DATA["secret"]


def test_data_that_end_too_early_are_refused(tmp_path: Path) -> None:
    with pytest.warns(CkptWarning, match="drawing and dropping"):
        interrupted("generator", tmp_path, 4, 3)
    model = make()
    short = ((X[:4], Y[:4]) for _ in range(2))
    with (
        pytest.warns(CkptWarning, match="drawing and dropping"),
        pytest.raises(MismatchError, match="the data end before"),
    ):
        model.fit(
            short, steps_per_epoch=4, epochs=2, verbose=0,
            callbacks=[ckf.BackupAndRestore(tmp_path, save_freq=3)],
        )  # fmt: skip


def test_an_error_of_a_background_save_ends_the_fit(tmp_path: Path) -> None:
    class Unplug(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 2:
                (tmp_path / "data").rename(tmp_path / "gone")
                (tmp_path / "data").write_text("in the way")

    with pytest.raises(ckptfmt.CheckpointError):
        fit(make(), "arrays", ckf.BackupAndRestore(tmp_path, save_freq=2), Unplug())
    (tmp_path / "data").unlink()
    (tmp_path / "gone").rename(tmp_path / "data")


@pytest.mark.parametrize("save_freq", [0, -1, "batch", 2.0, True])
def test_a_frequency_that_is_none_is_refused(tmp_path: Path, save_freq: Any) -> None:
    with pytest.raises(UsageError, match="save_freq"):
        ckf.BackupAndRestore(tmp_path, save_freq=save_freq)


def test_it_is_of_no_use_outside_of_fit(tmp_path: Path) -> None:
    backup = ckf.BackupAndRestore(tmp_path)
    backup.set_model(make())
    with pytest.raises(UsageError, match=r"within model\.fit"):
        backup.on_train_begin()


def mirrored(strategy: Any) -> Any:
    keras.utils.set_random_seed(7)
    with strategy.scope():
        model = keras.Sequential([layers.Dense(5, "relu"), layers.Dropout(0.5), layers.Dense(3)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss, metrics=["accuracy"])
    return model


def copies(model: Any) -> list[bytes]:
    """Of each variable, on each replica."""
    metrics = [v for metric in model.metrics for v in metric.variables]
    found = [v.value for v in [*model.variables, *model.optimizer.variables, *metrics]]
    return [copy.numpy().tobytes() for one in found for copy in one.values]


@pytest.mark.parametrize("data", ["shuffled", pytest.param("arrays", marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore:fit will resume by drawing")
def test_a_fit_under_a_mirrored_strategy_resumes_with_both_callbacks(
    tmp_path: Path, data: str, strategy: Any
) -> None:
    """In its second epoch, with what each replica has counted so far."""

    def callbacks(run: str) -> list[Any]:
        backup = ckf.BackupAndRestore(tmp_path / run, save_freq=4)
        return [backup, ckf.ModelCheckpoint(tmp_path / f"{run}-models", save_freq=4, keep=None)]

    whole = mirrored(strategy)
    history = fit(whole, data, *callbacks("whole"), epochs=2)
    stopped = callbacks("stopped")
    with pytest.raises(Interrupted):
        fit(mirrored(strategy), data, *stopped, Spy(9), epochs=2)
    for callback in stopped:
        callback._manager.wait()
    np.random.random()
    assert ckptfmt.Store(tmp_path / "stopped").steps() == [8]
    resumed = mirrored(strategy)
    again = fit(resumed, data, *callbacks("stopped"), epochs=2)
    assert copies(resumed) == copies(whole)
    assert again.history == history.history
    assert ckptfmt.Store(tmp_path / "stopped-models").steps() == [4, 8, 12]
    alone = keras.Sequential([keras.Input((4,)), *map(layers.Dense, (5, 3))])
    ckf.restore({"model": alone}, tmp_path / "whole-models", at=12, names="model/dense*")
    assert np.array_equal(alone.get_weights()[0], whole.get_weights()[0])


def test_a_later_fit_begins_where_it_is_told_though_a_callback_failed(tmp_path: Path) -> None:
    class Refuses(keras.callbacks.Callback):
        def on_train_begin(self, logs: Any = None) -> None:
            raise Interrupted

    interrupted("arrays", tmp_path, 8, 2)
    model, spy = make(), Spy()
    with pytest.raises(Interrupted):
        fit(model, "arrays", ckf.BackupAndRestore(tmp_path, save_freq=2), Refuses())
    assert model._initial_epoch is None
    fit(model, "arrays", spy, epochs=1)
    assert spy.seen[-1][:2] == (0, "epoch")
    assert model._initial_epoch is None
    resumed = Spy()
    fit(make(), "arrays", ckf.BackupAndRestore(tmp_path, save_freq=2), resumed)
    assert [row[0] for row in resumed.seen if row[1] == "epoch"] == [1, 2]


def test_two_callbacks_with_one_store_are_refused_before_anything_is_saved(tmp_path: Path) -> None:
    def callbacks() -> list[Any]:
        return [ckf.BackupAndRestore(f"{tmp_path}/"), ckf.ModelCheckpoint(tmp_path)]

    for given in (callbacks(), callbacks()[::-1]):
        with pytest.raises(
            UsageError,
            match=r"one store serves one callback.*"
            r"(BackupAndRestore and ModelCheckpoint|ModelCheckpoint and BackupAndRestore), both in "
            r"this fit; give each its own folder.*in the other's: (BackupAndRestore|ModelCheckpoint)\(",
        ):
            fit(make(), "arrays", *given)
    best = [ckf.ModelCheckpoint(tmp_path, save_best_only=flag) for flag in (True, False)]
    with pytest.raises(UsageError, match="ModelCheckpoint and ModelCheckpoint"):
        fit(make(), "arrays", *best)
    assert list(tmp_path.iterdir()) == []


def test_two_backups_of_one_fit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="two BackupAndRestore"):
        fit(make(), "arrays", *(ckf.BackupAndRestore(tmp_path / name) for name in "ab"))


def test_a_store_that_another_callback_has_used_is_refused(tmp_path: Path) -> None:
    interrupted("arrays", tmp_path / "a", 8, 2)
    with pytest.raises(UsageError, match=r"step-\d+6, which BackupAndRestore saved"):
        fit(make(), "arrays", ckf.ModelCheckpoint(tmp_path / "a"))
    fit(make(), "arrays", ckf.ModelCheckpoint(tmp_path / "b"), epochs=1)
    with pytest.raises(UsageError, match=r"step-\d+6, which ModelCheckpoint saved"):
        fit(make(), "arrays", ckf.BackupAndRestore(tmp_path / "b"), epochs=1)
    ckptfmt.save({"a": 1}, tmp_path / "c", step=1)
    with pytest.raises(UsageError, match="which BackupAndRestore did not save"):
        fit(make(), "arrays", ckf.BackupAndRestore(tmp_path / "c"), epochs=1)


def test_a_callback_derived_from_ours_goes_on_from_its_own_store(tmp_path: Path) -> None:
    class Mine(ckf.BackupAndRestore):
        pass

    first, spy = Mine(tmp_path, save_freq=2), Spy()
    with pytest.raises(Interrupted):
        fit(make(), "arrays", first, Spy(4), epochs=1)
    first._manager.wait()
    fit(make(), "arrays", Mine(tmp_path, save_freq=2), spy, epochs=1)
    assert spy.seen[0][0] == 2


def test_another_epoch_to_begin_with_is_refused(tmp_path: Path) -> None:
    interrupted("arrays", tmp_path, 4, 2)
    backup = ckf.BackupAndRestore(tmp_path, save_freq=2)
    with pytest.raises(UsageError, match="expected 0, found 1; leave out initial_epoch="):
        fit(make(), "arrays", backup, initial_epoch=1)


def test_the_store_of_one_may_lie_in_that_of_the_other(tmp_path: Path) -> None:
    """As the error says."""
    backup = ckf.BackupAndRestore(tmp_path / "backup", save_freq=2, delete_checkpoint=False)
    fit(make(), "arrays", backup, ckf.ModelCheckpoint(tmp_path, keep=None), epochs=2)
    assert ckptfmt.Store(tmp_path).steps() == [6, 12]
    assert ckptfmt.Store(tmp_path / "backup").steps() == [12]


class Several(tf.distribute.MultiWorkerMirroredStrategy):
    """As one of two workers sees it, with no other to wait for."""

    cluster_resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec({"worker": ["a:1", "b:1"]}), task_type="worker", task_id=0
    )

    def __init__(self) -> None:
        pass


def test_several_workers_are_refused_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = (
        rf"Keras {keras.__version__} has no fit for several workers, so \w+ cannot serve one.*"
        r"Several with 2 workers.*ckptfmt.Manager\(..., group=strategy\) on every worker"
    )
    model = make()
    model._distribute_strategy = Several()
    kinds = (ckf.BackupAndRestore, ckf.ModelCheckpoint)
    for kind in kinds:
        callback: Any = kind(tmp_path)
        callback.set_model(model)
        with pytest.raises(UsageError, match=expected):
            callback.on_train_begin()
    monkeypatch.setattr(tf.distribute, "get_strategy", Several)
    for kind in kinds:
        with pytest.raises(UsageError, match=expected):
            kind(tmp_path)
