"""PyTorch: trees of modules, optimizers, schedulers and tensors, saved and restored in place.

`save` and `restore` are those of `ckptfmt`, which know torch objects through `ADAPTER`;
`load` returns torch tensors. `rng_state()` stands for the random generators of the process.
"""

from __future__ import annotations

from ckptfmt.engine import PerRank, api, per_rank
from ckptfmt.torch.adapter import ADAPTER
from ckptfmt.torch.composites import register_tensor_class
from ckptfmt.torch.loading import load
from ckptfmt.torch.named import named
from ckptfmt.torch.rng import RngState, rng_state, set_rng_state

save = api.save
save_async = api.save_async
restore = api.restore

__all__ = [
    "ADAPTER",
    "PerRank",
    "RngState",
    "load",
    "named",
    "per_rank",
    "register_tensor_class",
    "restore",
    "rng_state",
    "save",
    "save_async",
    "set_rng_state",
]
