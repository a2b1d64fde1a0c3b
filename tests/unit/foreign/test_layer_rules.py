"""Which layer is of which kind, by names and shapes alone; and what is asked rather than guessed."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptfmt
from ckptfmt import UnsupportedError, UsageError
from ckptfmt.foreign.layers import LAYERS

Shapes = Mapping[str, tuple[int, ...]]


def opened(path: Path, shapes: Shapes, **preset: Any) -> Any:
    """A checkpoint of such tensors, through a preset; values count up over all of them."""
    tree: dict[str, Any] = {}
    start = 0
    for name, shape in shapes.items():
        *above, last = name.split("/")
        node = tree
        for key in above:
            node = node.setdefault(key, {})
        count = int(np.prod(shape))
        node[last] = np.arange(start, start + count, dtype=np.float32).reshape(shape)
        start += count
    ckptfmt.save(tree, path, if_exists="replace", durable=False)
    return ckptfmt.open_foreign(path, rules=[preset])


def shapes_of(found: Any) -> Shapes:
    return {name: found[name].shape for name in found}


KERAS: list[tuple[str, Shapes, Shapes]] = [
    ("dense", {"kernel": (3, 4), "bias": (4,)}, {"weight": (4, 3), "bias": (4,)}),
    ("conv", {"kernel": (3, 5, 2, 4), "bias": (4,)}, {"weight": (4, 2, 3, 5), "bias": (4,)}),
    ("conv_transpose", {"kernel": (3, 3, 4, 2), "bias": (4,)}, {"weight": (2, 4, 3, 3), "bias": (4,)}),
    ("depthwise_conv2d_1", {"kernel": (3, 3, 4, 2)}, {"weight": (8, 1, 3, 3)}),
    ("told_by_its_bias", {"kernel": (3, 3, 4, 2), "bias": (8,)}, {"weight": (8, 1, 3, 3), "bias": (8,)}),
    ("embedding", {"embeddings": (7, 3)}, {"weight": (7, 3)}),
    ("norm", {"gamma": (3,), "beta": (3,)}, {"weight": (3,), "bias": (3,)}),
    ("rms", {"scale": (3,)}, {"weight": (3,)}),
    ("bn", {"beta": (3,), "moving_mean": (3,), "moving_variance": (3,)},
     {"weight": (3,), "bias": (3,), "running_mean": (3,), "running_var": (3,), "num_batches_tracked": ()}),
    ("plain_bn", {"moving_mean": (3,), "moving_variance": (3,)},
     {"running_mean": (3,), "running_var": (3,), "num_batches_tracked": ()}),
    ("gru_without_bias", {"cell/kernel": (2, 9), "cell/recurrent_kernel": (3, 9)},
     {"weight_ih_l0": (9, 2), "weight_hh_l0": (9, 3)}),
    ("attention",
     {f"{p}/kernel": (6, 2, 3) for p in ("query", "key", "value")} | {"attention_output/kernel": (2, 3, 6)},
     {"in_proj_weight": (18, 6), "out_proj.weight": (6, 6)}),
    ("other_widths",
     {"query/kernel": (6, 2, 3), "key/kernel": (5, 2, 3), "value/kernel": (4, 2, 3),
      "attention_output/kernel": (2, 3, 6)},
     {"q_proj_weight": (6, 6), "k_proj_weight": (6, 5), "v_proj_weight": (6, 4), "out_proj.weight": (6, 6)}),
]  # fmt: skip


@pytest.mark.parametrize(("layer", "weights", "wanted"), KERAS, ids=[row[0] for row in KERAS])
def test_a_keras_layer_is_known_by_its_weights(
    tmp_path: Path, layer: str, weights: Shapes, wanted: Shapes
) -> None:
    given = {f"model/block/{layer}/{name}": shape for name, shape in weights.items()}
    found = opened(tmp_path / "s", given, preset="keras-to-torch")
    assert shapes_of(found) == {f"model/block.{layer}.{name}": s for name, s in wanted.items()}


def test_what_is_no_layer_of_the_table_stays_as_it_is(tmp_path: Path) -> None:
    others: Shapes = {
        "model/einsum/kernel": (2, 3, 4), "model/einsum/bias": (3, 4),
        "model/prelu/alpha": (4,), "model/drop/seed_generator/state": (2,),
        "optimizer/state/dense/kernel/momentum": (3, 4), "model/step": (),
    }  # fmt: skip
    found = opened(
        tmp_path / "s", {"model/dense/kernel": (3, 4), **others}, preset="keras-to-torch"
    )
    assert shapes_of(found) == {"model/dense.weight": (4, 3), **others}


def test_a_layer_can_be_kept(tmp_path: Path) -> None:
    given: Shapes = {"a/kernel": (3, 4), "b/kernel": (3, 4)}
    found = opened(tmp_path / "s", given, preset="keras-to-torch", layers={"^b$": "keep"})
    assert shapes_of(found) == {"a.weight": (4, 3), "b/kernel": (3, 4)}


def test_the_root_is_the_key_that_all_share_or_what_is_said(tmp_path: Path) -> None:
    given: Shapes = {"enc/a/kernel": (3, 4), "enc/b/kernel": (3, 4)}
    shared = opened(tmp_path / "s", given, preset="keras-to-torch")
    assert list(shared) == ["enc/a.weight", "enc/b.weight"]
    said = opened(tmp_path / "s", given, preset="keras-to-torch", root="")
    assert list(said) == ["enc.a.weight", "enc.b.weight"]
    two = opened(
        tmp_path / "s", {"g/a/kernel": (1, 2), "d/a/kernel": (1, 2)}, preset="keras-to-torch"
    )
    assert list(two) == ["g.a.weight", "d.a.weight"]
    each = [{"preset": "keras-to-torch", "root": root} for root in "gd"]
    assert list(ckptfmt.open_foreign(tmp_path / "s", rules=each)) == ["g/a.weight", "d/a.weight"]


@pytest.mark.parametrize(
    ("preset", "weights", "kinds", "answer"),
    [
        ("torch-to-keras", {"x.weight": (3, 4)}, "Linear or Embedding", "x/embeddings"),
        ("torch-to-keras", {"x.weight": (3,)}, "LayerNorm or RMSNorm", "x/scale"),
        ("keras-to-torch", {"x/kernel": (3, 3, 4, 1), "x/bias": (4,)},
         "DepthwiseConv2D or Conv2DTranspose", "x.weight"),
    ],
)  # fmt: skip
def test_what_names_and_shapes_leave_open_is_asked(
    tmp_path: Path, preset: str, weights: Shapes, kinds: str, answer: str
) -> None:
    with pytest.raises(UsageError, match="may be of two kinds") as caught:
        opened(tmp_path / "s", weights, preset=preset)
    assert kinds in str(caught.value.found)
    assert "--layer" in str(caught.value.do)
    second = kinds.split(" or ")[1]
    found = opened(tmp_path / "s", weights, preset=preset, layers={"x": second})
    assert answer in found


TORCH: list[tuple[Shapes, dict[str, str], Shapes]] = [
    ({"0.weight": (4, 3), "0.bias": (4,)}, {}, {"0/kernel": (3, 4), "0/bias": (4,)}),
    ({"tok_emb.weight": (4, 3)}, {}, {"tok_emb/embeddings": (4, 3)}),
    ({"c.weight": (4, 2, 3, 5)}, {}, {"c/kernel": (3, 5, 2, 4)}),
    ({"c.weight": (8, 1, 3, 3)}, {"c": "DepthwiseConv2D(depth_multiplier=2)"}, {"c/kernel": (3, 3, 4, 2)}),
    ({"a.in_proj_weight": (18, 6), "a.in_proj_bias": (18,), "a.out_proj.weight": (6, 6), "a.out_proj.bias": (6,)},
     {"a": "MultiheadAttention(num_heads=2)"},
     {"a/query/kernel": (6, 2, 3), "a/query/bias": (2, 3), "a/key/kernel": (6, 2, 3), "a/key/bias": (2, 3),
      "a/value/kernel": (6, 2, 3), "a/value/bias": (2, 3), "a/attention_output/kernel": (2, 3, 6),
      "a/attention_output/bias": (6,)}),
    ({"r.weight_ih_l0": (12, 2), "r.weight_hh_l0": (12, 3), "r.bias_ih_l0": (12,), "r.bias_hh_l0": (12,)}, {},
     {"r/cell/kernel": (2, 12), "r/cell/recurrent_kernel": (3, 12), "r/cell/bias": (12,)}),
]  # fmt: skip


@pytest.mark.parametrize(("weights", "layers", "wanted"), TORCH)
def test_a_module_is_known_by_its_weights(
    tmp_path: Path, weights: Shapes, layers: dict[str, str], wanted: Shapes
) -> None:
    found = opened(tmp_path / "s", weights, preset="torch-to-keras", layers=layers)
    assert shapes_of(found) == wanted


@pytest.mark.parametrize(
    ("weights", "layers", "error", "match"),
    [
        ({"a.in_proj_weight": (18, 6), "a.out_proj.weight": (6, 6)}, {}, UsageError, "how many heads"),
        ({"a.in_proj_weight": (18, 6), "a.out_proj.weight": (6, 6)},
         {"a": "MultiheadAttention(num_heads=4)"}, UnsupportedError, "no equal"),
        ({"r.weight_ih_l0": (4, 2), "r.weight_hh_l0": (4, 1), "r.weight_ih_l1": (4, 1), "r.weight_hh_l1": (4, 1)},
         {}, UnsupportedError, "stacks recurrent layers"),
        ({"c.weight": (8, 1, 3, 3)}, {"c": "DepthwiseConv2D(depth_multiplier=3)"}, UnsupportedError, "no equal"),
        ({"c.weight": (8, 3)}, {"c": "LSTM"}, UsageError, "lacks a weight"),
        ({"c.weight": (8, 3)}, {"c": "Linear(x"}, UsageError, "not a kind of layer"),
        ({"c.weight": (8, 3)}, {"c": "Linear(x=y)"}, UsageError, "not a kind of layer"),
        ({"c.count": (8, 3)}, {}, UsageError, "touches nothing"),
    ],
)  # fmt: skip
def test_what_has_no_equal_is_refused(
    tmp_path: Path, weights: Shapes, layers: dict[str, str], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        opened(tmp_path / "s", weights, preset="torch-to-keras", layers=layers)


def test_stacked_layers_can_be_taken_apart_by_a_rule(tmp_path: Path) -> None:
    shapes: Shapes = {
        "r.weight_ih_l0": (4, 2), "r.weight_hh_l0": (4, 1),
        "r.weight_ih_l1": (4, 1), "r.weight_hh_l1": (4, 1),
    }  # fmt: skip
    with pytest.raises(UnsupportedError) as caught:
        opened(tmp_path / "s", shapes, preset="torch-to-keras")
    assert caught.value.do is not None
    apart = {"rename": r"(.*)\.(\w+)_l1$", "to": r"\1_1.\2_l0"}
    assert apart["to"] in caught.value.do
    found = ckptfmt.open_foreign(tmp_path / "s", rules=[apart, {"preset": "torch-to-keras"}])
    assert list(found)[2:] == ["r_1/cell/kernel", "r_1/cell/recurrent_kernel"]


def test_the_table_has_the_layers_that_were_promised() -> None:
    for kind in ("Dense", "Linear", "Embedding", "BatchNormalization", "LayerNormalization", "LSTM",
                 "GRU", "MultiHeadAttention", "MultiheadAttention", "SyncBatchNorm"):  # fmt: skip
        assert kind in LAYERS
    for rank in "123":
        for kind in (
            f"Conv{rank}D",
            f"Conv{rank}DTranspose",
            f"Conv{rank}d",
            f"ConvTranspose{rank}d",
        ):
            assert kind in LAYERS


def test_a_bert_of_tf1_gets_the_names_of_hugging_face(tmp_path: Path) -> None:
    def row(name: str) -> Shapes:
        return {f"{name}/kernel": (2, 3), f"{name}/kernel~1adam_m": (2, 3), f"{name}/bias": (3,)}

    given = {
        "bert/embeddings/word_embeddings": (9, 2),
        "bert/embeddings/LayerNorm/gamma": (2,),
        **row("bert/encoder/layer_11/attention/self/query"),
        **row("bert/encoder/layer_11/attention/output/dense"),
        **row("bert/pooler/dense"),
        "cls/predictions/output_bias": (9,),
        "cls/seq_relationship/output_weights": (2, 2),
        "global_step": (),
    }
    ckptfmt.save(
        {name.replace("~1", "/"): np.zeros(shape, np.float32) for name, shape in given.items()},
        tmp_path / "flat", durable=False,
    )  # fmt: skip
    # One key each: as the importer of TensorFlow's files, names are cut at /.
    rules = [
        {"rename": "~1", "to": "/"},
        {"rename": r"/(adam_m)$", "to": r"~1\1"},
        {"preset": "bert-tf1-to-hf"},
    ]
    found = ckptfmt.open_foreign(tmp_path / "flat", rules=rules)
    assert shapes_of(found) == {
        "bert.embeddings.word_embeddings.weight": (9, 2),
        "bert.embeddings.LayerNorm.weight": (2,),
        "bert.encoder.layer.11.attention.self.query.weight": (3, 2),
        "bert.encoder.layer.11.attention.self.query.bias": (3,),
        "bert.encoder.layer.11.attention.output.dense.weight": (3, 2),
        "bert.encoder.layer.11.attention.output.dense.bias": (3,),
        "bert.pooler.dense.weight": (3, 2),
        "bert.pooler.dense.bias": (3,),
        "cls.predictions.bias": (9,),
        "cls.seq_relationship.weight": (2, 2),
    }


def test_what_a_preset_leaves_behind_is_listed(tmp_path: Path) -> None:
    shapes: Shapes = {
        "bn.weight": (3,), "bn.bias": (3,), "bn.running_mean": (3,), "bn.running_var": (3,),
        "bn.num_batches_tracked": (),
    }  # fmt: skip
    opened(tmp_path / "s", shapes, preset="torch-to-keras")
    rules = [{"preset": "torch-to-keras"}]
    report = ckptfmt.convert(tmp_path / "s", tmp_path / "t", rules=rules, dry_run=True)
    assert report.dropped == {"bn.num_batches_tracked": "preset torch-to-keras"}
    assert len(report.loaded) == 4


@pytest.mark.parametrize(
    "groups",
    [
        [{"params": [["a"], {"b": 1}, None], "betas": 3, "amsgrad": "x", "weight_decay": []}],
        [
            {
                "params": ["fc.weight"],
                "betas": (0.9,),
                "amsgrad": [],
                "weight_decay": None,
                "lr": "1",
            }
        ],
        [{"params": ["fc.weight"], "dampening": {}, "lr": []}, {"params": [], "lr": {}}],
        [{"params": []}],
        [{"params": 3}],
        [3],
        [],
    ],
)
@pytest.mark.parametrize("step", [np.zeros(2), "x", None, np.array(7.0)])
def test_what_looks_like_an_optimizer_and_is_none_is_told_or_left(
    groups: Any, step: Any, tmp_path: Path
) -> None:
    state = {"fc.weight": {"step": step, "exp_avg": np.ones((2, 3), np.float32), "odd": 1}}
    model = {"fc.weight": np.ones((2, 3), np.float32), "fc.bias": np.ones(2, np.float32)}
    tree = {"model": model, "optimizer": {"state": state, "param_groups": groups}}
    ckptfmt.save(tree, tmp_path / "s", durable=False)
    with contextlib.suppress(ckptfmt.CheckpointError):  # any other error fails
        rules = [{"preset": "torch-to-keras"}]
        ckptfmt.convert(tmp_path / "s", tmp_path / "k", rules=rules, durable=False)
        assert "fc/kernel" in str(list(ckptfmt.open(tmp_path / "k")))
