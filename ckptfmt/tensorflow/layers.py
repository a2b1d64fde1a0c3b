"""What a conversion between frameworks asks about live Keras layers: class and constants of each."""

from __future__ import annotations

from typing import Any

import keras

from ckptfmt.tensorflow.objects import survey

_FACTS = ("epsilon", "momentum", "num_heads", "reset_after", "depth_multiplier")


def layers_of(obj: Any) -> list[tuple[str, str, dict[str, float]]]:
    """(path as a leaf's name has it, Keras's own class, its constants) of every layer below."""
    made = []
    for path, layer in survey(obj, "").nodes:
        if isinstance(layer, keras.layers.Layer):
            name = next(
                c.__name__ for c in type(layer).__mro__ if c.__module__.startswith("keras.")
            )
            made.append((path, name, _facts(layer)))
    return made


def _facts(layer: Any) -> dict[str, float]:
    found = {name: getattr(layer, name, None) for name in _FACTS}
    return {name: float(item) for name, item in found.items() if isinstance(item, (int, float))}
