"""The training program of the demo: an ordinary loop, and four lines of it are about checkpoints.

    python demo_train.py --store runs/a --result result.json

fine-tunes a sentence encoder so that sentences which follow each other come out alike. Started again
on the same store it goes on where the newest good checkpoint stands. It knows nothing of being
killed; demo.py does that to it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from minilm import MiniLM, Tokenizer, model_folder, neighbours
from torch.nn import functional as F

import ckptfmt
import ckptfmt.torch as ckt
from ckptfmt import hooks

BATCH, THREADS, SEED = 8, 2, 20
PROBES = [
    "A man plays the guitar.",
    "Someone is playing an instrument.",
    "The bank raised its interest rates.",
]


class DataOrder:
    """All pairs in a shuffled order, epoch after epoch. Where it stands is part of the state."""

    def __init__(self, count: int) -> None:
        self.generator = torch.Generator().manual_seed(SEED)
        self.order = torch.randperm(count, generator=self.generator)
        self.position = 0

    def next_batch(self) -> list[int]:
        if self.position + BATCH > len(self.order):
            self.order = torch.randperm(len(self.order), generator=self.generator)
            self.position = 0
        self.position += BATCH
        batch: list[int] = self.order[self.position - BATCH : self.position].tolist()
        return batch

    def state_dict(self) -> dict[str, Any]:
        return {
            "order": self.order,
            "position": self.position,
            "generator": self.generator.get_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.order = state["order"]
        self.position = state["position"]
        self.generator.set_state(state["generator"])


class History:
    """The loss of every step so far."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        return {"losses": list(self.losses)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.losses = list(state["losses"])


def fingerprint(tensor: torch.Tensor) -> str:
    """SHA-256 of a tensor's bytes, taken from live memory without any help of ckptfmt."""
    return hashlib.sha256(tensor.detach().contiguous().numpy().tobytes()).hexdigest()


def summary(state: Mapping[str, Any]) -> dict[str, Any]:
    """Everything that must come out equal, straight from the live objects."""
    optimizer = state["optimizer"].state_dict()["state"]
    return {
        "losses": [loss.hex() for loss in state["history"].losses],
        "weights": {k: fingerprint(v) for k, v in state["model"].state_dict().items()},
        "optimizer": {
            f"{number}/{key}": fingerprint(value)
            for number, entry in optimizer.items()
            for key, value in entry.items()
        },
        "scheduler": repr(state["scheduler"].state_dict()),
        "dropout": fingerprint(torch.get_rng_state()),
        "order": fingerprint(state["data"].order) + f" at {state['data'].position}",
    }


def told(event: ckptfmt.Event) -> None:
    """A hook: what the manager does, on the terminal."""
    if event.kind == "save.start":
        print(f"step {event.step:>3}  saving ...", flush=True)
    elif event.kind == "save.commit":
        print(
            f"step {event.step:>3}  saved: {event.total_nbytes / 1e6:.0f} MB of state, "
            f"{event.nbytes / 1e6:.0f} MB written; the loop was held {event.data['stall_s']:.2f} s, "
            f"durable after {event.seconds:.2f} s",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", required=True)
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--every", type=int, default=4, help="save after this many steps")
    options = parser.parse_args()

    # Only torch's generator is used here; rng_state() keeps all three, and so all three are set.
    for set_seed in (random.seed, np.random.seed, torch.manual_seed):
        set_seed(SEED)
    torch.set_num_threads(THREADS)
    torch.use_deterministic_algorithms(True)
    tokenizer = Tokenizer(model_folder() / "vocab.txt")
    pairs = neighbours()
    model = MiniLM()
    model.embeddings.word_embeddings.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-5)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=3e-5, total_steps=options.steps + 1
    )

    state = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "data": DataOrder(len(pairs)),
        "history": History(),
        "rng": ckt.rng_state(),
    }
    events = hooks.jsonl(Path(options.store) / "events.jsonl")  # what `ckptfmt report` tells
    with ckptfmt.Manager(options.store, save_when=options.every, hooks=[events, told]) as manager:
        start = manager.restore(state).step
        if start:
            print(f"resumed from step {start}", flush=True)
        else:
            pretrained = ckptfmt.open_foreign(model_folder() / "model.safetensors")
            ckt.restore(model, pretrained, allow_unexpected=("pooler.*", "embeddings.position_ids"))
            print(f"started from {len(model.state_dict())} pretrained tensors", flush=True)

        model.train()
        for step in range(start, options.steps):
            batch = [pairs[number] for number in state["data"].next_batch()]
            left = model(tokenizer.batch([first for first, _ in batch]))
            right = model(tokenizer.batch([second for _, second in batch]))
            loss = F.cross_entropy(left @ right.T * 20, torch.arange(BATCH))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            state["history"].losses.append(loss.item())
            print(f"step {step + 1:>3}  loss {loss.item():.4f}", flush=True)
            manager.save(state, step=step + 1, metrics={"loss": loss.item()})  # if it is time

    result = {"start": start, **summary(state)}
    with torch.no_grad():
        result["vectors"] = model.eval()(tokenizer.batch(PROBES)).tolist()
    result["ids"] = tokenizer.batch(PROBES).tolist()
    options.result.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
