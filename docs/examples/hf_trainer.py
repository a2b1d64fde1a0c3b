"""Transformers' Trainer with checkpoints that hold no pickle, survive a kill, and resume exactly.

    python hf_trainer.py --folder runs/hf --steps 24

One line of it is about checkpoints: the mixin before `Trainer`. Started again on the same folder it
resumes from the newest whole checkpoint. The model is made from a config: nothing is downloaded.
"""

from __future__ import annotations

import argparse
import hashlib

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from ckptfmt.torch.hf import TrainerMixin, latest, load_model


class SafeTrainer(TrainerMixin, Trainer):
    background_saves = True


def counting(rows: int, length: int = 12) -> list[dict[str, torch.Tensor]]:
    """Numbers that go up by one, from everywhere: something a tiny model can learn."""
    starts = torch.randint(0, 50 - length, (rows,), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": (t := s + torch.arange(length)), "labels": t} for s in starts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--steps", type=int, default=24)
    options = parser.parse_args()

    torch.manual_seed(3)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=50,
            n_positions=16,
            n_embd=32,
            n_layer=2,
            n_head=2,
            bos_token_id=0,
            eos_token_id=0,
        )
    )
    trainer = SafeTrainer(
        model,
        TrainingArguments(
            options.folder,
            max_steps=options.steps,
            per_device_train_batch_size=8,
            learning_rate=1e-2,
            save_steps=5,
            save_total_limit=2,
            logging_steps=4,
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            seed=3,
        ),
        train_dataset=counting(64),
    )
    resumed = latest(options.folder)
    trainer.train(resume_from_checkpoint=resumed)

    weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    print(f"resumed from {resumed}")
    print(f"weights after {trainer.state.global_step} steps: {hashlib.sha256(weights).hexdigest()}")
    newest = latest(options.folder)
    assert newest is not None
    served = load_model(GPT2LMHeadModel, newest)
    guess = served(torch.arange(5, 13)[None]).logits[0, -1].argmax()
    print(f"after 5 to 12 comes {int(guess)}")


if __name__ == "__main__":
    main()
