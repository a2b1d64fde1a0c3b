"""The programs that benchmarks compare: a module each, with the fastest honest way to call it.

A *peer* is such a module. All have `PACKAGE`, which must be installed, and of these functions those
that the program can do; a benchmark takes whoever has what it asks about.

    convert(flat)            name -> NumPy array to the program's own arrays, sharing memory if it can
    save(own, folder)        durable when it returns: files and folder are synced
    load(folder)             name -> array in fresh memory, of all bytes
    map(folder)              the same, mapped
    restore(own, folder)     into the arrays that are there
    begin(own, folder)       a save in the background: returns once `own` may change, with a function
                             that waits until it is durable
    resume(own, folder)      what a run does that begins at a checkpoint, before its first save
    count(folder)            open, and say how many tensors there are
    part(folder, name)       one tensor of many

ckptfmt verifies all it returns unless the benchmark says otherwise. zip files (torch, NumPy) carry a
CRC-32, TensorFlow a CRC-32C; torch and NumPy check theirs as they read, but torch not when it maps;
safetensors and DCP have none.
"""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

NAMES = {
    "ckptfmt": "this_package",
    "ckptfmt resumed": "this_package_resumed",
    "safetensors": "safetensors_file",
    "torch.save": "torch_save",
    "DCP": "torch_dcp",
    "DCP default": "torch_dcp_plain",
    "TF": "tf_checkpoint",
    "np.savez": "numpy_savez",
    "torchsnapshot": "torchsnapshot_folder",
    "Orbax": "orbax_folder",
    "tensorizer": "tensorizer_file",
    "zarr": "zarr_group",
    "limit": "machine_limit",
}
"""What a report calls a peer -> its module."""


def module(name: str) -> ModuleType:
    return importlib.import_module(f"peers.{NAMES[name]}")


def installed(*functions: str, without: tuple[str, ...] = ()) -> list[str]:
    """Peers that can be imported and have these functions; no package is imported to find out."""
    made = []
    for name in NAMES:
        found = module(name)
        able = all(hasattr(found, function) for function in functions)
        if name not in without and able and importlib.util.find_spec(found.PACKAGE):
            made.append(name)
    return made
