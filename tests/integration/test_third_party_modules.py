"""Modules of other people: their own load code, tried on a shadow, restores them bit for bit.

Each needs a package that the default suite does not install; without it the case is skipped.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptfmt.torch as ckt
from ckptfmt.errors import MismatchError

pytestmark = [
    pytest.mark.slow,
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore"),  # theirs
]

Module = Callable[[Any], Any]


def lora(package: Any) -> Any:
    merged = package.MergedLinear(8, 12, r=2, enable_lora=[True, False, True])
    return nn.Sequential(package.Linear(8, 8, r=2), merged, package.Embedding(5, 8, r=2))


def gaussian_process(package: Any) -> Any:
    class Exact(package.models.ExactGP):
        def __init__(self) -> None:
            noise = package.constraints.GreaterThan(1e-3)
            likelihood = package.likelihoods.GaussianLikelihood(noise_constraint=noise)
            super().__init__(torch.randn(4, 2), torch.randn(4), likelihood)
            self.mean = package.means.ConstantMean()
            prior = package.priors.GammaPrior(3.0, 6.0)
            kernel = package.kernels.RBFKernel(ard_num_dims=2, lengthscale_prior=prior)
            self.covariance = package.kernels.ScaleKernel(kernel)

    return Exact()


def metrics(package: Any) -> Any:
    made = package.MetricCollection(
        {
            "accuracy": package.classification.MulticlassAccuracy(3),
            "f1": package.classification.MulticlassF1Score(3),
        }
    )
    made.persistent(True)
    made.update(torch.randn(4, 3), torch.randint(0, 3, (4,)))
    return made


def seen(package: Any) -> Any:
    made = package.CatMetric()
    made.persistent(True)
    made.update(torch.randn(4))
    made.update(torch.randn(3))
    return made


def flow(package: Any) -> Any:
    flows = [package.flows.Planar((2,)), package.flows.ActNorm(2), package.flows.LULinearPermute(2)]
    return package.NormalizingFlow(package.distributions.DiagGaussian(2), flows)


def spiking(package: Any) -> Any:
    leaky = package.Leaky(beta=0.9, learn_beta=True, init_hidden=True)
    return nn.Sequential(nn.Linear(3, 3), leaky, package.Synaptic(0.9, 0.8, init_hidden=True))


MODULES: dict[str, tuple[str, Module]] = {
    "efficientnet": (
        "efficientnet_pytorch",
        lambda m: m.EfficientNet.from_name("efficientnet-b0", num_classes=3),
    ),
    "lora": ("loralib", lora),
    "rotary embedding": ("rotary_embedding_torch", lambda m: m.RotaryEmbedding(dim=8)),
    "ema": ("ema_pytorch", lambda m: m.EMA(nn.Linear(3, 3), beta=0.99)),
    "facenet": (
        "facenet_pytorch.models.inception_resnet_v1",
        lambda m: m.InceptionResnetV1(pretrained=None, classify=True, num_classes=3),
    ),
    "gaussian process": ("gpytorch", gaussian_process),
    "metrics": ("torchmetrics", metrics),
    "a metric that is a list": ("torchmetrics", seen),
    "monai": (
        "monai.networks.nets",
        lambda m: m.SwinUNETR(in_channels=1, out_channels=2, feature_size=12, spatial_dims=2),
    ),
    "spiking": ("snntorch", spiking),
    "weight norm": (
        "pytorch_tcn",
        lambda m: m.TCN(num_inputs=3, num_channels=[4, 4], use_norm="weight_norm"),
    ),
    "vector quantizer": (
        "encodec.quantization",
        lambda m: m.ResidualVectorQuantizer(dimension=4, n_q=2, bins=8),
    ),
    "normalizing flow": ("normflows", flow),
}


def bytes_of(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        flat = state.detach().contiguous().reshape(-1)
        return str(state.dtype), tuple(state.shape), flat.view(torch.uint8).numpy().tobytes()
    if isinstance(state, dict):
        return {key: bytes_of(value) for key, value in state.items()}
    return [bytes_of(value) for value in state] if isinstance(state, list) else state


@pytest.mark.parametrize("name", MODULES)
def test_a_module_of_a_package_is_restored_bit_for_bit_or_left_alone(
    name: str, tmp_path: Path
) -> None:
    package, make = MODULES[name]
    pytest.importorskip(package.partition(".")[0], exc_type=ImportError)
    try:
        module = importlib.import_module(package)
    except ImportError as error:
        pytest.skip(f"{package} needs more: {error}")
    torch.manual_seed(0)
    stored, target = make(module), make(module)
    ckt.save({"m": stored}, tmp_path)
    identities = {key: id(p) for key, p in target.named_parameters()}
    assert ckt.restore({"m": target}, tmp_path).clean
    assert bytes_of(dict(target.state_dict())) == bytes_of(dict(stored.state_dict()))
    assert {key: id(p) for key, p in target.named_parameters()} == identities

    other = make(module)
    before = bytes_of(dict(other.state_dict()))
    tree = ckt.load(tmp_path)
    first = next(iter(tree["m"]))
    tree["m"]["of another name"] = tree["m"].pop(first)
    with pytest.raises(MismatchError, match="of another name"):
        ckt.restore({"m": other}, tree)
    assert bytes_of(dict(other.state_dict())) == before
