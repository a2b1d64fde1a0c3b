"""Cases 26 and 27: generators, schedules and the loss scale go on exactly in a fresh process."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckptfmt.torch as ckt

# -- 26: the state of generators is never moved, cast or retyped ---------------------------------

DRAWS = 1000


def draw(generator: torch.Generator, numpy: np.random.Generator, python: random.Random) -> Any:
    return [
        torch.rand(DRAWS, dtype=torch.float32, device="cpu").tolist(),
        torch.rand(DRAWS, generator=generator, dtype=torch.float32, device="cpu").tolist(),
        np.random.rand(DRAWS).tolist(),
        np.random.randn(3).tolist(),
        numpy.random(DRAWS).tolist(),
        [random.random() for _ in range(DRAWS)],
        [random.gauss(0, 1) for _ in range(3)],
        [python.random() for _ in range(DRAWS)],
    ]


def generators(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    np.random.randn(1)  # leaves a second Gaussian in store
    return {
        "rng": ckt.rng_state(),
        "torch": torch.Generator().manual_seed(seed + 1),
        "numpy": np.random.default_rng(seed + 2),
        "python": random.Random(seed + 3),
        "w": torch.ones(2, dtype=torch.float32),
    }


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_draw_goes_on_under_any_default_device_and_dtype(
    device: str, dtype: Any, tmp_path: Path
) -> None:
    saved = generators(0)
    ckt.save(saved, tmp_path)
    expected = draw(saved["torch"], saved["numpy"], saved["python"])
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    torch.set_default_device(device)
    try:
        loaded = ckt.load(tmp_path, dtype=torch.bfloat16)
        state = loaded["rng"]["torch"]
        assert (state.dtype, state.device.type) == (torch.uint8, "cpu")
        assert loaded["w"].dtype == torch.bfloat16
        version, words, gauss = loaded["rng"]["python"]
        assert (type(version), type(words), gauss) == (int, tuple, None)
        with torch.device("cpu"):
            fresh = generators(9)
        ckt.restore(fresh, tmp_path)
        restored = draw(fresh["torch"], fresh["numpy"], fresh["python"])
        ckt.set_rng_state(loaded["rng"])
        again = draw(fresh["torch"], fresh["numpy"], fresh["python"])
    finally:
        torch.set_default_dtype(before)
        torch.set_default_device(None)
    assert restored == expected
    assert [again[i] for i in (0, 2, 3, 5, 6)] == [expected[i] for i in (0, 2, 3, 5, 6)]


# -- 27: schedules and the loss scale ------------------------------------------------------------

PROGRAM = """
import json, sys
from collections import Counter
import torch
from torch.optim import lr_scheduler as L
import ckptfmt, ckptfmt.torch as ckt

root, start, stop = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])

class Warm:
    def __init__(self):
        self.calls = 0
    def __call__(self, epoch):
        self.calls += 1
        return min(1.0, (epoch + 1) / 15)

MAKE = {
    "multi": lambda o: L.MultiStepLR(o, [3, 12, 12, 15], 0.5),
    "one": lambda o: L.OneCycleLR(o, 0.3, total_steps=40),
    "cosine": lambda o: L.CosineAnnealingLR(o, 30),
    "lambda": lambda o: L.LambdaLR(o, lambda epoch: 0.9 ** epoch),
    "object": lambda o: L.LambdaLR(o, Warm()),
    "sequence": lambda o: L.SequentialLR(o, [L.ConstantLR(o, 0.1, 5), L.ExponentialLR(o, 0.9)], [5]),
}
parameter = torch.nn.Parameter(torch.ones(2))
scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=3)
tree = {"scaler": scaler}
for name, make in MAKE.items():
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    tree[name] = {"opt": optimizer, "sched": make(optimizer)}
if start:
    ckt.restore(tree, root, step=start)
rates = []
for step in range(start, stop):
    for name in MAKE:
        tree[name]["opt"].step()
        tree[name]["sched"].step()
    parameter.grad = None
    scaler.scale(parameter.sum()).backward()
    scaler.step(tree["multi"]["opt"])
    scaler.update()
    rates.append([tree[name]["opt"].param_groups[0]["lr"] for name in MAKE] + [scaler.get_scale()])
ckt.save(tree, root, step=stop)
milestones = tree["multi"]["sched"].milestones
assert type(milestones) is Counter and milestones == {3: 1, 12: 2, 15: 1}
initial = [tree[name]["opt"].param_groups[0]["initial_lr"] for name in MAKE]
print(json.dumps([rates, initial, scaler.state_dict(), tree["object"]["sched"].lr_lambdas[0].calls]))
"""


def run(root: Path, start: int, stop: int) -> Any:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, str(root), str(start), str(stop)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_rates_and_the_loss_scale_go_on_in_a_fresh_process(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", 0, 20)
    first = run(tmp_path / "cut", 0, 10)
    second = run(tmp_path / "cut", 10, 20)
    assert first[0] + second[0] == whole[0]
    assert second[1:3] == whole[1:3]
    assert second[3] == whole[3]  # the object's own state came back, not a fresh count
