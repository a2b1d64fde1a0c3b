"""TensorFlow and Keras 3: trees of variables, modules, layers, models and optimizers.

A *survey* lists the variables of an object and what each is called; a *target* fills them again.
"""

from __future__ import annotations

from ckptfmt.tensorflow.adapter import TensorFlowAdapter

ADAPTER = TensorFlowAdapter()

__all__ = ["ADAPTER"]
