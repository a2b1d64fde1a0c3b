"""TensorFlow and Keras 3: trees of variables, modules, layers, models and optimizers.

`save` and `save_async` are those of `ckptfmt`, which knows their objects through `ADAPTER`; `load`
returns tf tensors and `restore` a status object; `Checkpoint` names the objects once for all. A *survey* lists the variables of an object and what each is called;
a *target* fills them again.
"""

from __future__ import annotations

from ckptfmt.engine import PerRank, api, per_rank
from ckptfmt.tensorflow.adapter import TensorFlowAdapter
from ckptfmt.tensorflow.backup import BackupAndRestore
from ckptfmt.tensorflow.checkpoint import Checkpoint
from ckptfmt.tensorflow.loading import load, restore
from ckptfmt.tensorflow.model_checkpoint import ModelCheckpoint
from ckptfmt.tensorflow.resumable import Resumable, resumable
from ckptfmt.tensorflow.rng import RngState, rng_state
from ckptfmt.tensorflow.status import RestoreStatus

ADAPTER = TensorFlowAdapter()
save = api.save
save_async = api.save_async

__all__ = [
    "ADAPTER",
    "BackupAndRestore",
    "Checkpoint",
    "ModelCheckpoint",
    "PerRank",
    "RestoreStatus",
    "Resumable",
    "RngState",
    "load",
    "per_rank",
    "restore",
    "resumable",
    "rng_state",
    "save",
    "save_async",
]
