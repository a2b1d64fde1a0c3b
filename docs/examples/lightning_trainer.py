"""A Lightning run that saves in the background, can be killed at any moment, and goes on exactly.

    python lightning_trainer.py --folder runs/lightning --epochs 6

Two lines of it are about checkpoints: the plugin and the callback. Started again on the same folder
it resumes from the newest whole checkpoint. `--devices 2` trains in two processes.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
from typing import Any

import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ckptfmt.torch.lightning import CkptfmtIO, RandomState, latest, load_module

logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)


class Regression(pl.LightningModule):
    def __init__(self, width: int = 32, lr: float = 0.05) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.body = nn.Sequential(
            nn.Linear(8, width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, 1)
        )

    def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
        loss = nn.functional.mse_loss(self.body(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: list[torch.Tensor], number: int) -> None:
        loss = nn.functional.mse_loss(self.body(batch[0]), batch[1])
        self.log("val_loss", loss, sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"])
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--devices", type=int, default=1)
    options = parser.parse_args()

    pl.seed_everything(5, verbose=False)
    numbers = torch.Generator().manual_seed(6)
    inputs = torch.randn(256, 8, generator=numbers)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())
    best = pl.callbacks.ModelCheckpoint(
        options.folder, monitor="val_loss", save_top_k=2, save_last=True
    )
    trainer = pl.Trainer(
        max_epochs=options.epochs,
        plugins=[CkptfmtIO(async_save=True)],
        callbacks=[best, RandomState()],
        accelerator="cpu",
        devices=options.devices,
        strategy="ddp" if options.devices > 1 else "auto",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    resumed = latest(options.folder)
    model = Regression()
    trainer.fit(
        model,
        DataLoader(data, batch_size=32, shuffle=True),
        DataLoader(data, batch_size=64),
        ckpt_path=resumed,
    )
    if trainer.is_global_zero:
        weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
        print(f"resumed from {resumed}")
        print(f"weights after {trainer.global_step} steps: {hashlib.sha256(weights).hexdigest()}")
        served = load_module(Regression, best.best_model_path)
        print(f"best: {best.best_model_path}, width {served.hparams['width']}")


if __name__ == "__main__":
    main()
