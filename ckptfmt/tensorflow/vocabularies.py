"""What Keras's preprocessing layers learned by `adapt`: vocabularies and bin boundaries.

Saved for layers that were given a vocabulary too, so that a restored layer gives equal outputs
whatever it was built with. `Normalization` keeps its state in variables; what it derives from them
is derived again by `settle`.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import keras
import numpy as np

from ckptfmt.engine import ORDER_USER_CODE, Captured, Comparison, Staged
from ckptfmt.errors import MismatchError, UsageError
from ckptfmt.format import join_name
from ckptfmt.tensorflow.tensors import host_array
from ckptfmt.tensorflow.whole import identity, part_source

_LOOKUPS = (keras.layers.StringLookup, keras.layers.IntegerLookup)


def settle(obj: Any) -> None:
    """Let a layer derive again what it keeps beside its variables, once these have new values."""
    if isinstance(obj, keras.layers.Normalization):
        obj.finalize_state()


def _lookup_of(layer: Any) -> Any:
    """The layer that has the vocabulary: TextVectorization has one inside."""
    return layer._lookup_layer if isinstance(layer, keras.layers.TextVectorization) else layer


class _Vocabularies:
    def holds(self, obj: object) -> bool:
        return isinstance(obj, (*_LOOKUPS, keras.layers.TextVectorization))

    def capture(self, obj: Any, name: str) -> Captured:
        layer = _lookup_of(obj)
        if not layer._has_input_vocabulary and int(layer.token_counts.size()):
            raise UsageError(
                "a vocabulary is still being learned",
                reason="vocabulary",
                where=name,
                found=f"{int(layer.token_counts.size())} tokens counted since the last adapt",
                do="call finalize_state() first",
            )
        tokens = _tokens(layer)
        tree: dict[str, object] = {"vocabulary": part_source(tokens, layer, "vocabulary")}
        if layer.output_mode == "tf_idf" and len(tokens):
            weights = host_array(layer.idf_weights_const)
            tree["idf_weights"] = part_source(weights, layer, "idf_weights")
        return Captured(tree)

    def target(self, obj: Any, name: str) -> VocabularyTarget:
        return VocabularyTarget(obj, name)


VOCABULARIES = _Vocabularies()


def _tokens(layer: Any) -> Any:
    """The tokens by index, without those that stand for masked and unknown ones."""
    if not layer._has_input_vocabulary and layer.vocabulary_size() <= layer._token_start_index():
        return _empty(layer)  # its table has no content yet and could not be exported
    keys, values = map(host_array, layer.lookup_table.export())
    tokens, rows = (values, keys) if layer.invert else (keys, values)
    return tokens[np.argsort(rows)]


def _empty(layer: Any) -> Any:
    return np.empty(0, object if layer.vocabulary_dtype == "string" else layer.vocabulary_dtype)


class VocabularyTarget:
    """A lookup layer, or a TextVectorization, whose table is replaced by another one."""

    order = ORDER_USER_CODE
    _KEPT = ("lookup_table", "_frozen_vocab_size", "idf_weights", "idf_weights_const")

    def __init__(self, layer: Any, name: str) -> None:
        self.name = name
        self.identities: dict[str, Hashable | None] = {}
        self._layer = _lookup_of(layer)
        self._vocabulary = join_name(name, "vocabulary")
        self._weights = join_name(name, "idf_weights")
        self._old: dict[str, Any] | None = None

    def compare(self, comparison: Comparison) -> None:
        layer, stored = self._layer, comparison.stored(self.name)
        is_text = layer.vocabulary_dtype == "string"
        leaf = stored.get(self._vocabulary)
        count = leaf.shape[0] if leaf is not None and len(leaf.shape) == 1 else 0
        dtype = "bytes" if is_text else layer.vocabulary_dtype
        self.identities = {self._vocabulary: identity(layer, "vocabulary")}
        if not comparison.tensor(self._vocabulary, dtype, (count,)):
            return
        if layer.output_mode == "tf_idf" and count:
            weights = stored.get(self._weights)
            shape = weights.shape if weights is not None else (layer._token_start_index() + count,)
            comparison.tensor(self._weights, keras.config.floatx(), shape)
        self._check_size(comparison, count)

    def _check_size(self, comparison: Comparison, count: int) -> None:
        layer = self._layer
        size, own = layer._token_start_index() + count, int(layer.vocabulary_size())
        frozen = layer._frozen_vocab_size
        if not count:
            if own > layer._token_start_index():
                self._mismatch(comparison, f"a vocabulary of {own}", "none: not adapted when saved")
        elif layer.max_tokens is not None and size > layer.max_tokens:
            self._mismatch(comparison, f"at most {layer.max_tokens} tokens", f"{size} tokens")
        elif (
            layer.output_mode != "int"
            and not layer.pad_to_max_tokens
            and frozen not in (None, size)
        ):
            self._mismatch(
                comparison, f"{frozen} tokens, by which its outputs are as wide", f"{size} tokens"
            )

    def _mismatch(self, comparison: Comparison, expected: str, found: str) -> None:
        comparison.mismatch(self.name, expected, found)

    def bind(self, staged: Staged) -> None:
        if self._vocabulary not in staged or not len(staged[self._vocabulary]):
            return
        layer, tokens = self._layer, staged[self._vocabulary]
        self._old = {key: getattr(layer, key) for key in self._KEPT if hasattr(layer, key)}
        # With the special tokens before them, by which Keras knows that the weights have theirs.
        # Words stay bytes, whatever their encoding: none is taken for a special token.
        special = [layer.mask_token] * layer._oov_start_index()
        special += [layer.oov_token] * layer.num_oov_indices
        full = np.empty(len(special) + len(tokens), object)
        full[: len(special)] = special
        full[len(special) :] = tokens
        weights = {}
        if self._weights in staged:
            weights["idf_weights"] = np.array(staged[self._weights])[: len(full)]
        if layer.vocabulary_dtype != "string":
            full = full.astype(layer.vocabulary_dtype)
        try:
            layer.set_vocabulary(full, **weights)
        except (ValueError, RuntimeError) as error:
            raise MismatchError(
                "a layer did not take the stored vocabulary",
                reason="vocabulary",
                where=self.name,
                found=str(error).splitlines()[0][:300],
                do="build it as it was when it was saved",
            ) from error

    def undo(self) -> None:
        if self._old is not None:
            for key, value in self._old.items():
                setattr(self._layer, key, value)
            self._old = None


class _Boundaries:
    def holds(self, obj: object) -> bool:
        return isinstance(obj, keras.layers.Discretization)

    def capture(self, obj: Any, name: str) -> Captured:
        tree: dict[str, object] = {}
        if obj.bin_boundaries is not None:
            tree["bin_boundaries"] = np.array(obj.bin_boundaries)
        if obj.summary is not None and obj.summary.size:
            tree["summary"] = np.array(obj.summary)
        return Captured(tree)

    def target(self, obj: Any, name: str) -> BoundariesTarget:
        return BoundariesTarget(obj, name)


BOUNDARIES = _Boundaries()


_NUMBERS = ("float32", "float64", "int64")
"""Of boundaries that were learned, and of those that were given as a list."""


class BoundariesTarget:
    """A Discretization layer, which keeps its boundaries as arrays."""

    order = ORDER_USER_CODE

    def __init__(self, layer: Any, name: str) -> None:
        self.name = name
        self.identities: dict[str, Hashable] = {}
        self._layer = layer
        self._asked: list[str] = []
        self._old: dict[str, Any] | None = None

    def compare(self, comparison: Comparison) -> None:
        self._asked = []
        stored, own = comparison.stored(self.name), self._layer.bin_boundaries
        if self.name in stored and stored[self.name].value == {}:
            if own is None:
                comparison.value(self.name)
            else:
                comparison.mismatch(
                    self.name, f"{len(own)} boundaries", "none: not adapted when saved"
                )
            return
        for key in ("bin_boundaries", "summary"):
            at = join_name(self.name, key)
            leaf = stored.get(at)
            if leaf is None and key == "summary":
                continue  # of boundaries that were given
            if leaf is None:
                comparison.missing(at)
                continue
            shape = (2, *leaf.shape[1:2]) if key == "summary" else leaf.shape[:1]
            if key == "bin_boundaries" and own is not None and self._layer.output_mode != "int":
                shape = (len(own),)  # its outputs are as wide
            dtype = leaf.dtype if leaf.dtype in _NUMBERS else "float32"
            if comparison.tensor(at, dtype, shape):
                self._asked.append(key)

    def bind(self, staged: Staged) -> None:
        layer = self._layer
        self._old = {key: getattr(layer, key) for key in self._asked}
        for key in self._asked:
            at = join_name(self.name, key)
            if at in staged:
                setattr(layer, key, staged.own(at))

    def undo(self) -> None:
        for key, value in (self._old or {}).items():
            setattr(self._layer, key, value)
        self._old = None
