"""ckptfmt in a run that a `Manager` has resumed: the first background save finds its memory ready."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peers import this_package

PACKAGE = this_package.PACKAGE

convert = this_package.convert
save = this_package.save
begin = this_package.begin

READY_S = 2.0
"""A training loop goes on meanwhile, between the restore and the first save."""


def resume(own: Mapping[str, Any], folder: Path) -> None:
    import ckptfmt

    ckptfmt.save(own, folder, step=1)
    with ckptfmt.Manager(folder) as manager:
        assert manager.restore(own).step == 1
    time.sleep(READY_S)
