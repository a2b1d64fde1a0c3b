"""A SavedModel that others published, read as TensorFlow reads it.

`python tests/compat/import/fetch.py FOLDER` gets it; CKPTFMT_REAL_FILES names the folder.
"""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import pytest

import ckptfmt

FOLDER = Path(os.environ.get("CKPTFMT_REAL_FILES", "")) / "basic-pitch"
GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (FOLDER / "variables/variables.index").exists(), reason="not fetched (see above)"
    ),
]


def test_every_variable_is_read_bit_for_bit(tmp_path: Path) -> None:
    import tensorflow as tf

    reader = tf.train.load_checkpoint(str(FOLDER / "variables/variables"))
    report = ckptfmt.convert(FOLDER, tmp_path / "s", allow_partial=True, durable=False)
    assert report.format == "tensorbundle"
    foreign = ckptfmt.open_foreign(FOLDER).foreign
    wanted = {*reader.get_variable_to_shape_map()} - {GRAPH}
    found = {t.foreign_name: name for name, t in foreign.tensors.items()}
    assert found.keys() == wanted
    with ckptfmt.open(tmp_path / "s") as checkpoint:
        for key, name in found.items():
            want, array = np.asarray(reader.get_tensor(key)), checkpoint[name].read()
            assert (array.shape, array.dtype) == (want.shape, want.dtype)
            assert array.tobytes() == want.tobytes(), name
