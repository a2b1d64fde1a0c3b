"""Names of Keras layers as this package's own checkpoints have them.

A name that somebody chose stays. One that Keras made (`dense_7`) is numbered anew within the list
that holds the layer, since Keras counts on from model to model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_NUMBER = re.compile(r"_[0-9]+\Z")
# Of other classes a name that Keras gave cannot be told from a chosen one: nothing else says it.
_AUTOMATIC_TEXT = """
    dense einsum_dense embedding reversible_embedding conv1d conv2d conv3d conv1d_transpose
    conv2d_transpose conv3d_transpose depthwise_conv1d depthwise_conv2d separable_conv1d
    separable_conv2d batch_normalization layer_normalization group_normalization
    unit_normalization spectral_normalization rms_normalization normalization simple_rnn rnn gru
    lstm simple_rnn_cell gru_cell lstm_cell stacked_rnn_cells bidirectional time_distributed
    conv_lstm1d conv_lstm2d conv_lstm3d attention additive_attention multi_head_attention
    grouped_query_attention p_re_lu dropout spatial_dropout1d spatial_dropout2d spatial_dropout3d
    gaussian_dropout gaussian_noise alpha_dropout random_flip random_rotation random_zoom
    random_crop random_translation random_contrast random_brightness seed_generator sequential
    functional model
"""
_AUTOMATIC = frozenset(_AUTOMATIC_TEXT.split())


def without_number(name: str) -> str:
    """`dense` of `dense_7`."""
    return _NUMBER.sub("", name)


def is_automatic(name: str) -> bool:
    """Whether Keras makes such names."""
    return without_number(name) in _AUTOMATIC


def counted(names: Iterable[str]) -> list[str]:
    """The names of one list's layers, in order: chosen ones, and the others numbered anew."""
    given = list(names)
    taken = {name for name in given if not is_automatic(name)}
    counts: dict[str, int] = {}
    made = []
    for name in given:
        if is_automatic(name):
            base = without_number(name)
            while True:
                count = counts.get(base, 0)
                counts[base] = count + 1
                name = f"{base}_{count}" if count else base
                if name not in taken:
                    break
        made.append(name)
    return made
