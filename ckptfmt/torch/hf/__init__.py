"""Hugging Face: Accelerate's state and Transformers' Trainer in ckptfmt stores, without pickle.

`save_state` and `load_state` stand for those of an `Accelerator`; `accelerator_state` is the tree
behind them, for `save_async` or a part; `use_hooks` is for who keeps `accelerator.save_state`.
`TrainerMixin` makes a `Trainer` save and resume here; `CkptfmtCallback` is for who keeps `Trainer`
as it is. Names are loaded on first use: neither library needs the other.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ckptfmt.errors import MissingExtraError

_HOMES = {
    "CkptfmtCallback": "callback",
    "TrainerMixin": "trainer",
    "accelerator_state": "accelerator",
    "latest": "trainer",
    "load_model": "trainer",
    "load_state": "accelerator",
    "save_state": "accelerator",
    "use_hooks": "accelerator",
}

__all__ = [
    "CkptfmtCallback",
    "TrainerMixin",
    "accelerator_state",
    "latest",
    "load_model",
    "load_state",
    "save_state",
    "use_hooks",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'ckptfmt.torch.hf' has no attribute {name!r}")
    try:
        home = importlib.import_module(f"ckptfmt.torch.hf.{_HOMES[name]}")
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"{error.name} is not installed",
            reason="missing",
            where=f"ckptfmt.torch.hf.{name}",
            do='pip install "ckptfmt[hf]"',
        ) from error
    value = getattr(home, name)
    globals()[name] = value
    return value


if TYPE_CHECKING:
    from ckptfmt.torch.hf.accelerator import accelerator_state as accelerator_state
    from ckptfmt.torch.hf.accelerator import load_state as load_state
    from ckptfmt.torch.hf.accelerator import save_state as save_state
    from ckptfmt.torch.hf.accelerator import use_hooks as use_hooks
    from ckptfmt.torch.hf.callback import CkptfmtCallback as CkptfmtCallback
    from ckptfmt.torch.hf.trainer import TrainerMixin as TrainerMixin
    from ckptfmt.torch.hf.trainer import latest as latest
    from ckptfmt.torch.hf.trainer import load_model as load_model
