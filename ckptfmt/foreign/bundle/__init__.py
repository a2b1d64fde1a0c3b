"""TensorFlow's TensorBundle: `prefix.index` and `prefix.data-00000-of-00001`, without TensorFlow.

What `tf.train.Checkpoint`, `tf.compat.v1.train.Saver` and SavedModels (`variables/`) write. An
*entry* says where a tensor's bytes are; a *shard* is a data file; a *slice* is a part of a variable
that was written on its own; the *object graph* knows the variables' other names.
"""

from __future__ import annotations

from ckptfmt.foreign.bundle.importer import TensorBundleImporter

__all__ = ["TensorBundleImporter"]
