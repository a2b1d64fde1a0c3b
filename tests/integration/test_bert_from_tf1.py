"""A BERT that TF1 ran and saved gives the same outputs in Hugging Face's PyTorch class."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import pytest

import ckptfmt

pytestmark = pytest.mark.slow

WIDTH, HEADS, DEPTH, INNER, WORDS, PLACES = 24, 3, 2, 48, 31, 16


class TensorFlow1:
    """Google's BERT in the words of TF1: variables by name, a graph, a session, a saver."""

    def __init__(self) -> None:
        import tensorflow as tf

        self.v1 = tf.compat.v1
        self.random = np.random.default_rng(0)

    def variable(self, name: str, *shape: int) -> Any:
        value = self.random.standard_normal(shape).astype(np.float32) * 0.3
        return self.v1.get_variable(name, initializer=value)

    def dense(self, x: Any, name: str, units: int) -> Any:
        with self.v1.variable_scope(name):
            kernel = self.variable("kernel", int(x.shape[-1]), units)
            return self.v1.tensordot(x, kernel, [[-1], [0]]) + self.variable("bias", units)

    def norm(self, x: Any) -> Any:
        with self.v1.variable_scope("LayerNorm"):
            beta, gamma = self.variable("beta", WIDTH), self.variable("gamma", WIDTH)
        mean, variance = self.v1.nn.moments(x, [-1], keepdims=True)
        return self.v1.nn.batch_normalization(x, mean, variance, beta, gamma, 1e-12)

    def attention(self, x: Any, mask: Any) -> Any:
        def heads(name: str) -> Any:
            made = self.dense(x, name, WIDTH)
            shape = [-1, int(x.shape[1]), HEADS, WIDTH // HEADS]
            return self.v1.transpose(self.v1.reshape(made, shape), [0, 2, 1, 3])

        with self.v1.variable_scope("self"):
            query, key, value = heads("query"), heads("key"), heads("value")
        scores = self.v1.matmul(query, key, transpose_b=True) / np.sqrt(WIDTH // HEADS)
        scores += (1.0 - mask[:, None, None, :]) * -1e9
        mixed = self.v1.transpose(self.v1.matmul(self.v1.nn.softmax(scores), value), [0, 2, 1, 3])
        return self.v1.reshape(mixed, [-1, int(x.shape[1]), WIDTH])

    def gelu(self, x: Any) -> Any:
        return x * 0.5 * (1.0 + self.v1.erf(x / np.sqrt(2.0).astype(np.float32)))

    def encoder(self, ids: Any, mask: Any, kinds: Any) -> Any:
        v1 = self.v1
        with v1.variable_scope("bert"):
            with v1.variable_scope("embeddings"):
                x = v1.gather(self.variable("word_embeddings", WORDS, WIDTH), ids)
                x += v1.gather(self.variable("token_type_embeddings", 2, WIDTH), kinds)
                x += self.variable("position_embeddings", PLACES, WIDTH)[None, : int(ids.shape[1])]
                x = self.norm(x)
            for layer in range(DEPTH):
                with v1.variable_scope(f"encoder/layer_{layer}"):
                    with v1.variable_scope("attention"):
                        mixed = self.attention(x, mask)
                        with v1.variable_scope("output"):
                            x = self.norm(self.dense(mixed, "dense", WIDTH) + x)
                    inner = self.gelu(self.dense(x, "intermediate/dense", INNER))
                    with v1.variable_scope("output"):
                        x = self.norm(self.dense(inner, "dense", WIDTH) + x)
            pooled = v1.tanh(self.dense(x[:, 0], "pooler/dense", WIDTH))
        with v1.variable_scope("cls"):
            self.variable("predictions/output_bias", WORDS)
            self.dense(x, "predictions/transform/dense", WIDTH)
            self.variable("seq_relationship/output_weights", 2, WIDTH)
            self.variable("seq_relationship/output_bias", 2)
        return x, pooled

    def run(self, ids: Any, mask: Any, kinds: Any, prefix: str) -> list[Any]:
        """Outputs of the encoder and the pooler; the checkpoint is at `prefix`."""
        v1 = self.v1
        with v1.Graph().as_default(), v1.Session() as session:
            constant = [v1.constant(ids), v1.constant(mask, v1.float32), v1.constant(kinds)]
            outputs = self.encoder(*constant)
            for variable in list(v1.global_variables()):
                for slot in ("adam_m", "adam_v"):  # as its optimizer names them
                    name = variable.name.partition(":")[0]
                    v1.get_variable(f"{name}/{slot}", initializer=np.zeros(variable.shape, "f4"))
            v1.get_variable("global_step", initializer=np.int64(7))
            session.run(v1.global_variables_initializer())
            v1.train.Saver().save(session, prefix, global_step=7)
            made: list[Any] = session.run(list(outputs))
            return made


def test_a_tf1_bert_gives_the_same_outputs_in_pytorch(tmp_path: Path) -> None:
    import torch
    from transformers import BertConfig, BertModel

    random = np.random.default_rng(1)
    ids, kinds = random.integers(0, WORDS, (4, 11)), random.integers(0, 2, (4, 11))
    mask = (np.arange(11) < np.array([[11], [7], [4], [1]])).astype(np.int64)
    want = TensorFlow1().run(ids, mask, kinds, str(tmp_path / "bert_model.ckpt"))

    rules = [{"preset": "bert-tf1-to-hf"}, {"drop": r"^cls\."}, {"rename": r"^bert\.", "to": ""}]
    source = str(tmp_path / "bert_model.ckpt-7")
    report = ckptfmt.convert(source, tmp_path / "s", rules=rules, durable=False)
    assert report.renamed["bert/embeddings/word_embeddings"] == "embeddings.word_embeddings.weight"
    assert all(
        t.endswith(("_m", "_v", "global_step")) or t.startswith("cls/") for t in report.dropped
    )

    config = BertConfig(
        vocab_size=WORDS, hidden_size=WIDTH, num_hidden_layers=DEPTH, num_attention_heads=HEADS,
        intermediate_size=INNER, max_position_embeddings=PLACES, attn_implementation="eager",
    )  # fmt: skip
    model = BertModel(config).eval()
    model.load_state_dict({k: torch.from_numpy(v) for k, v in ckptfmt.load(tmp_path / "s").items()})
    with torch.no_grad():
        got = model(
            input_ids=torch.from_numpy(ids),
            attention_mask=torch.from_numpy(mask),
            token_type_ids=torch.from_numpy(kinds),
        )
    seen = mask.astype(bool)
    assert np.abs(got.last_hidden_state.numpy()[seen] - want[0][seen]).max() < 1e-5
    assert np.abs(got.pooler_output.numpy() - want[1]).max() < 1e-5


def test_heads_keep_the_names_of_hugging_face(tmp_path: Path) -> None:
    from transformers import BertConfig, BertForPreTraining

    ids = np.zeros((1, 3), np.int64)
    TensorFlow1().run(ids, ids + 1, ids, str(tmp_path / "m"))
    opened = ckptfmt.open_foreign(tmp_path / "m-7", rules=[{"preset": "bert-tf1-to-hf"}])
    config = BertConfig(
        vocab_size=WORDS, hidden_size=WIDTH, num_hidden_layers=DEPTH, num_attention_heads=HEADS,
        intermediate_size=INNER, max_position_embeddings=PLACES,
    )  # fmt: skip
    state = BertForPreTraining(config).state_dict()
    assert set(opened) <= set(state)
    for name, tensor in opened.items():
        assert tuple(state[name].shape) == tensor.shape, name
    missing = set(state) - set(opened)
    # The saver's graph above has no LayerNorm in the transform; the decoder is tied in PyTorch.
    assert all("predictions.decoder" in n or "transform.LayerNorm" in n for n in missing)
