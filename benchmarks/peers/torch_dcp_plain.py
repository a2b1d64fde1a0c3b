"""DCP's `async_save` as it is called by most: no stager is named, so it makes new copies each time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from peers import torch_dcp

PACKAGE = torch_dcp.PACKAGE

convert = torch_dcp.convert
save = torch_dcp.save


def begin(own: dict[str, Any], folder: Path) -> Callable[[], object]:
    return torch_dcp.begin(own, folder, warm=False)
