"""A plain PyTorch loop that can be killed at any moment and goes on exactly where it was.

    python pytorch_loop.py --store runs/loop --steps 60

One dict names all that the run consists of; `restore` fills it, `save_async` copies it and writes in
the background. Old steps are deleted once a newer one is durable.
"""

from __future__ import annotations

import argparse
import hashlib
import random
from collections import deque

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import ckptfmt
import ckptfmt.torch as ckt

SEED, KEEP, ACCUMULATE = 11, 2, 2


class Average:
    """Anything with `state_dict` and `load_state_dict` may be in the tree."""

    def __init__(self) -> None:
        self.value = 0.0

    def add(self, loss: float) -> None:
        self.value = 0.9 * self.value + 0.1 * loss

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value = state["value"]


def keep_newest(store: ckptfmt.Store) -> None:
    """Delete all but the newest steps; `ckptfmt.Manager` does that, and more, by itself."""
    for old in store.steps()[:-KEEP]:
        store.delete(old)
    store.gc(grace_s=0)  # gives the space back at once: nobody else reads this store


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", required=True)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=7, help="save after this many steps")
    options = parser.parse_args()

    for set_seed in (random.seed, np.random.seed, torch.manual_seed):
        set_seed(SEED)
    inputs = torch.randn(128, 8, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())
    loader = StatefulDataLoader(data, batch_size=16, shuffle=True)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)

    average = Average()
    state = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "loader": loader,  # with its place in the epoch
        "average": average,
        "rng": ckt.rng_state(),  # set last, after all that may draw
    }
    try:
        step = ckt.restore(state, options.store).step
    except ckptfmt.NotFoundError:
        step = 0
    print(f"starts at step {step}")

    saves: deque[ckptfmt.SaveFuture] = deque()
    store = ckptfmt.Store(options.store)
    batches = iter(loader)
    while step < options.steps:
        for _ in range(ACCUMULATE):
            batch = next(batches, None)
            if batch is None:  # the next epoch
                batches = iter(loader)
                batch = next(batches)
            loss = nn.functional.mse_loss(model(batch[0]), batch[1])
            (loss / ACCUMULATE).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        average.add(loss.item())
        step += 1
        if step % options.every == 0:
            # Returns once the state is copied. A save before it that failed raises here.
            saves.append(
                ckptfmt.save_async(state, store, step=step, metrics={"loss": average.value})
            )
        if len(saves) > 1 and saves[0].done():
            saves.popleft().result()
            keep_newest(store)
    for save in saves:
        save.result()  # durable, or the error
    keep_newest(store)

    weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    print(f"weights after {step} steps: {hashlib.sha256(weights).hexdigest()}")


if __name__ == "__main__":
    main()
