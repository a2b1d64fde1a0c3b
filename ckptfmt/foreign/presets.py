"""Presets: rules for conversions that many need, by name."""

from __future__ import annotations

from collections.abc import Callable

from ckptfmt.errors import UsageError
from ckptfmt.foreign import lazy
from ckptfmt.foreign.layer_rules import KerasToTorch, Layers, TorchToKeras
from ckptfmt.foreign.optimizer_ways import KerasOptimizers, TorchOptimizers
from ckptfmt.foreign.rules import Drop, Pattern, Rename, Rule, Several, Transform

__all__ = ["PRESETS", "Layers"]


def bert_tf1_to_hf(layers: Layers, root: str | None) -> Rule:
    """Google's BERT, as TF1 savers wrote it, under the names of Hugging Face's PyTorch classes:
    `bert.encoder.layer.0.attention.self.query.weight`, kernels transposed.
    """
    if layers or root is not None:
        raise UsageError(
            "bert-tf1-to-hf knows its layers", reason="rule-form", found="layers= or root="
        )

    def rename(pattern: str, to: str) -> Rule:
        return Rename(Pattern(pattern, to))

    # A variable's slots are keys beside it: `kernel~1adam_m` (a tensor is no container).
    rules: list[Rule] = [
        Drop(Pattern(r"(^|/|~1)(adam_m|adam_v|Adam|Adam_1|LAMB|LAMB_1)$")),
        Drop(Pattern(r"^(global_step|good_steps|current_loss_scale|beta[12]_power)$")),
        Transform(Pattern(r"/kernel$", "/weight"), "transpose", lazy.permuted),
        rename(r"/LayerNorm/gamma$", "/LayerNorm/weight"),
        rename(r"/LayerNorm/beta$", "/LayerNorm/bias"),
        rename(r"^(bert/embeddings/\w+_embeddings)$", r"\1/weight"),
        rename(r"^bert/encoder/layer_(\d+)/", r"bert/encoder/layer/\1/"),
        rename(r"^cls/squad/output_weights$", "qa_outputs/weight"),
        rename(r"^cls/squad/output_bias$", "qa_outputs/bias"),
        rename(r"^cls/(predictions|seq_relationship)/output_weights$", r"cls/\1/weight"),
        rename(r"^cls/(predictions|seq_relationship)/output_bias$", r"cls/\1/bias"),
        rename(r"^output_weights$", "classifier/weight"),
        rename(r"^output_bias$", "classifier/bias"),
        rename(r"/", "."),
    ]
    return Several("preset bert-tf1-to-hf", rules)


def keras_to_torch(layers: Layers, root: str | None) -> Rule:
    """A model's layers, and the optimizers' state of their weights."""
    rule = KerasToTorch(layers, root)
    return Several(rule.text, [KerasOptimizers([rule]), rule])


def torch_to_keras(layers: Layers, root: str | None) -> Rule:
    """The way back."""
    rule = TorchToKeras(layers, root)
    return Several(rule.text, [TorchOptimizers([rule]), rule])


PRESETS: dict[str, Callable[[Layers, str | None], Rule]] = {
    "keras-to-torch": keras_to_torch,
    "torch-to-keras": torch_to_keras,
    "bert-tf1-to-hf": bert_tf1_to_hf,
}
