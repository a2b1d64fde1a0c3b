"""TorchScript: the parameters and buffers of a program, whose code is not carried.

`data.pkl` holds the module as records of classes `__torch__....`; which attributes are parameters
and buffers is said in the text of `code/`, one class after another. The text is searched, not run.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from ckptfmt.foreign.base import ForeignTree
from ckptfmt.foreign.pickle_builders import typed
from ckptfmt.foreign.pickle_machine import Record
from ckptfmt.foreign.pytorch.composites import Composite
from ckptfmt.foreign.pytorch.reading import corrupt, finish, machine_for
from ckptfmt.foreign.pytorch.tensors import Strided
from ckptfmt.foreign.pytorch.zipped import PICKLE, TorchArchive

_CLASS = re.compile(
    r"^class (\w{1,255})\(Module\):\n((?:  __\w+__ = \[[^\]\n]*\]\n)*)", re.MULTILINE
)
_LIST = re.compile(r"  (__parameters__|__buffers__) = \[([^\]\n]*)\]")
_CODE_NBYTES_MAX = 64 << 20
_DEPTH_MAX = 64
_MODULES_MAX = 1 << 20


def read_script(archive: TorchArchive) -> ForeignTree:
    """The tree of one file of `torch.jit.save`: names as `state_dict()` has them."""
    data = archive.pickle(PICKLE)
    assert data is not None
    machine = machine_for(
        data,
        (0, len(data)),
        f"{archive.where}, {PICKLE}",
        file_nbytes=archive.zip.nbytes,
        storages=archive.storages("data"),
        more=dict.fromkeys(
            (f"torch.jit._pickle.build_{kind}list" for kind in ("int", "double", "bool", "tensor")),
            lambda args: typed(args[0], list),
        )
        | {"torch.jit._pickle.restore_type_tag": lambda args: args[0]},
    )
    root = machine.load()
    if type(root) is not Record:
        raise corrupt("the program is no module", "script", archive.where)
    collected = _Collector(_declared(archive), archive.where)
    collected.module(root, "", 0)
    tree = finish(
        machine,
        collected.tensors,
        archive.where,
        nbytes=len(data),
        metadata={"torchscript.class": root.name},
    )
    code = {"code/": "file of the program, which is not carried"}
    return replace(
        tree,
        skipped={**collected.skipped, **tree.skipped},
        ignored={**code, **tree.ignored},
    )


def _declared(archive: TorchArchive) -> dict[str, set[str]]:
    """Class -> the names of its parameters and buffers."""
    found: dict[str, set[str]] = {}
    room = _CODE_NBYTES_MAX
    for name, entry in archive.zip.entries.items():
        inner = name.removeprefix(archive.folder)
        if not inner.startswith("code/") or not inner.endswith(".py"):
            continue
        room -= entry.nbytes
        if room < 0:
            raise corrupt("the program's text is too long", "limit", archive.where)
        text = archive.zip.read(entry, _CODE_NBYTES_MAX).decode("utf-8", "replace")
        module = inner[len("code/") : -len(".py")].replace("/", ".")
        for match in _CLASS.finditer(text):
            names = found.setdefault(f"{module}.{match[1]}", set())
            for listed in _LIST.finditer(match[2]):
                names.update(re.findall(r'"([^"\\]*)"', listed[2]))
    return found


class _Collector:
    """Walks the modules of a program."""

    def __init__(self, declared: dict[str, set[str]], where: str) -> None:
        self.declared, self.where = declared, where
        self.tensors: dict[str, Any] = {}
        self.skipped: dict[str, str] = {}
        self._modules = 0

    def module(self, record: Record, prefix: str, depth: int) -> None:
        self._modules += 1
        if depth > _DEPTH_MAX or self._modules > _MODULES_MAX:
            raise corrupt("modules nested too deep, or too many", "limit", self.where)
        state = record.state
        if state is None:
            return
        if not isinstance(state, dict):
            raise corrupt("the attributes of a module are no dict", "script", self.where)
        own = self.declared.get(record.name, set())
        modules = []
        for key, value in state.items():
            name = f"{prefix}{key}"
            if isinstance(value, Strided | Composite):
                if key in own:
                    self.tensors[name] = value
                else:
                    self.skipped[name] = "a tensor that is neither parameter nor buffer"
            elif type(value) is Record and value.name in self.declared:
                modules.append((value, f"{name}."))
        for value, below in modules:
            self.module(value, below, depth + 1)
