"""TensorFlow and Keras 3: trees of variables, modules, layers, models and optimizers.

`save` is that of `ckptfmt`, which knows their objects through `ADAPTER`; `load` returns tf tensors
and `restore` a status object. A *survey* lists the variables of an object and what each is called;
a *target* fills them again.
"""

from __future__ import annotations

from ckptfmt.engine import api
from ckptfmt.tensorflow.adapter import TensorFlowAdapter
from ckptfmt.tensorflow.loading import load, restore
from ckptfmt.tensorflow.status import RestoreStatus

ADAPTER = TensorFlowAdapter()
save = api.save

__all__ = ["ADAPTER", "RestoreStatus", "load", "restore", "save"]
