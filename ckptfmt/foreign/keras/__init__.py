"""Files of Keras, read without Keras: `.weights.h5`, `.keras`, and the whole-model `.h5` before it.

A *holder* is a group of variables in the file; its *class* is guessed from its name, or told by the
model's configuration, and says what the variables are called, which the file only numbers.
"""

from __future__ import annotations

from ckptfmt.foreign.keras.importer import KerasImporter

__all__ = ["KerasImporter"]
