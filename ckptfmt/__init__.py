"""ckptfmt: a framework-agnostic checkpoint format and storage engine.

The public API, and nothing else. Everything is loaded on first use: `import ckptfmt` loads neither
a framework, nor a cloud client, nor numpy.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0.dev0"

_PUBLIC = {
    "save": "ckptfmt.engine.api",
    "save_async": "ckptfmt.engine.api",
    "SaveFuture": "ckptfmt.engine",
    "FileGroup": "ckptfmt.engine",
    "Sharded": "ckptfmt.engine",
    "configure": "ckptfmt.config",
    "load": "ckptfmt.engine.api",
    "open": "ckptfmt.engine.api",
    "restore": "ckptfmt.engine.api",
    "plan": "ckptfmt.engine.api",
    "register_type": "ckptfmt.engine",
    "Store": "ckptfmt.engine",
    "Checkpoint": "ckptfmt.engine",
    "StoredTensor": "ckptfmt.engine",
    "convert": "ckptfmt.foreign",
    "export": "ckptfmt.foreign",
    "open_foreign": "ckptfmt.foreign",
    "translate": "ckptfmt.foreign",
    "Alarm": "ckptfmt.manager",
    "Manager": "ckptfmt.manager",
    "LossGuard": "ckptfmt.manager",
    "Mirror": "ckptfmt.manager",
    "Watcher": "ckptfmt.manager",
    "Preemption": "ckptfmt.manager",
    "Verdict": "ckptfmt.manager",
    "Decision": "ckptfmt.manager",
    "Loaded": "ckptfmt.manager",
    "Event": "ckptfmt.events",
    "CheckpointInfo": "ckptfmt.types",
    "RestoreReport": "ckptfmt.reports",
    "Mismatch": "ckptfmt.reports",
    "Rejected": "ckptfmt.reports",
    "VerifyReport": "ckptfmt.reports",
    "Damage": "ckptfmt.reports",
    "CopyReport": "ckptfmt.reports",
    "GcReport": "ckptfmt.reports",
    "ConvertReport": "ckptfmt.reports",
    "RuleChange": "ckptfmt.reports",
    "RuleReport": "ckptfmt.reports",
    "CheckpointError": "ckptfmt.errors",
    "NotFoundError": "ckptfmt.errors",
    "ExistsError": "ckptfmt.errors",
    "ConflictError": "ckptfmt.errors",
    "StorageError": "ckptfmt.errors",
    "PartialRestoreError": "ckptfmt.errors",
    "MismatchError": "ckptfmt.errors",
    "FormatError": "ckptfmt.errors",
    "CorruptError": "ckptfmt.errors",
    "UnsupportedError": "ckptfmt.errors",
    "UsageError": "ckptfmt.errors",
    "MissingExtraError": "ckptfmt.errors",
    "InternalError": "ckptfmt.errors",
    "CkptWarning": "ckptfmt.errors",
}
_MODULES = {
    "checks": "ckptfmt.manager.checks",
    "hooks": "ckptfmt.manager.hooks",
    "keep": "ckptfmt.manager.keep",
    "tensorflow": "ckptfmt.tensorflow",
    "torch": "ckptfmt.torch",
    "when": "ckptfmt.manager.when",
}

__all__ = [*sorted(_PUBLIC), "__version__"]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        value = getattr(importlib.import_module(_PUBLIC[name]), name)
    elif name in _MODULES:
        value = importlib.import_module(_MODULES[name])
    else:
        raise AttributeError(f"module 'ckptfmt' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC, *_MODULES})


if TYPE_CHECKING:
    # From their own modules: a type checker takes `ckptfmt.engine.save` for the module.
    from ckptfmt.config import configure as configure
    from ckptfmt.engine.api import (
        load as load,
        open as open,
        plan as plan,
        restore as restore,
        save as save,
        save_async as save_async,
    )
    from ckptfmt.engine.background import SaveFuture as SaveFuture
    from ckptfmt.engine.file_group import FileGroup as FileGroup
    from ckptfmt.engine.open import Checkpoint as Checkpoint, StoredTensor as StoredTensor
    from ckptfmt.engine.registered import register_type as register_type
    from ckptfmt.engine.sharded import Sharded as Sharded
    from ckptfmt.engine.store import Store as Store
    from ckptfmt.errors import (
        CheckpointError as CheckpointError,
        CkptWarning as CkptWarning,
        ConflictError as ConflictError,
        CorruptError as CorruptError,
        ExistsError as ExistsError,
        FormatError as FormatError,
        InternalError as InternalError,
        MismatchError as MismatchError,
        MissingExtraError as MissingExtraError,
        NotFoundError as NotFoundError,
        PartialRestoreError as PartialRestoreError,
        StorageError as StorageError,
        UnsupportedError as UnsupportedError,
        UsageError as UsageError,
    )
    from ckptfmt.events import Event as Event
    from ckptfmt.foreign import (
        convert as convert,
        export as export,
        open_foreign as open_foreign,
        translate as translate,
    )
    from ckptfmt.manager import (
        Alarm as Alarm,
        Decision as Decision,
        Loaded as Loaded,
        LossGuard as LossGuard,
        Manager as Manager,
        Mirror as Mirror,
        Preemption as Preemption,
        Verdict as Verdict,
        Watcher as Watcher,
        checks as checks,
        hooks as hooks,
        keep as keep,
        when as when,
    )
    from ckptfmt.reports import (
        ConvertReport as ConvertReport,
        Damage as Damage,
        CopyReport as CopyReport,
        GcReport as GcReport,
        Mismatch as Mismatch,
        Rejected as Rejected,
        RestoreReport as RestoreReport,
        RuleChange as RuleChange,
        RuleReport as RuleReport,
        VerifyReport as VerifyReport,
    )
    from ckptfmt.types import CheckpointInfo as CheckpointInfo
