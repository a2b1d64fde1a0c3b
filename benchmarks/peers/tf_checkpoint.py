"""tf.train.Checkpoint: variables written to a bundle, and read into new variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peers.durable import sync_below

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")  # of no use here, and it prints a banner

PACKAGE = "tensorflow"
PREFIX = "model"


def convert(flat: Mapping[str, Any]) -> dict[str, Any]:
    import tensorflow as tf

    return {name: tf.Variable(array) for name, array in flat.items()}


def _checkpoint(own: Mapping[str, Any]) -> Any:
    import tensorflow as tf

    return tf.train.Checkpoint(**{name.replace("/", "."): value for name, value in own.items()})


def save(own: dict[str, Any], folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    _checkpoint(own).write(str(folder / PREFIX))
    sync_below(folder)


def load(folder: Path) -> Mapping[str, Any]:
    """By the raw reader, which needs no variables."""
    import tensorflow as tf

    reader = tf.train.load_checkpoint(str(folder / PREFIX))
    names = (name for name in reader.get_variable_to_shape_map() if "VARIABLE_VALUE" in name)
    return {name: reader.get_tensor(name) for name in names}


def restore(own: dict[str, Any], folder: Path) -> None:
    _checkpoint(own).read(str(folder / PREFIX)).assert_existing_objects_matched()


def part(folder: Path, name: str) -> Any:
    import tensorflow as tf

    reader = tf.train.load_checkpoint(str(folder / PREFIX))
    return reader.get_tensor(f"{name.replace('/', '.')}/.ATTRIBUTES/VARIABLE_VALUE")
