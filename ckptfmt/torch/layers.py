"""What a conversion between frameworks asks about live modules: class and constants of each."""

from __future__ import annotations

from typing import Any

from ckptfmt.torch.wrappers import clean_modules

_FACTS = ("eps", "momentum", "num_heads", "groups", "in_channels", "out_channels")


def layers_of(module: Any) -> list[tuple[str, str, dict[str, float]]]:
    """(path joined by dots, torch's own class, its constants) of every module of torch's below."""
    made = []
    for prefix, child in clean_modules(module):
        name = next((c.__name__ for c in type(child).__mro__ if _is_torchs(c)), "")
        if name and name != "Module":
            made.append((prefix.removesuffix("."), name, _facts(child)))
    return made


def _is_torchs(cls: type) -> bool:
    return cls.__module__.startswith("torch.nn.modules.")


def _facts(module: Any) -> dict[str, float]:
    found = {name: getattr(module, name, None) for name in _FACTS}
    return {name: float(item) for name, item in found.items() if isinstance(item, (int, float))}
