"""Names without wrappers: `module.`, `_orig_mod.` and the like go by the wrapper's type.

A real child that is called `module` or `_orig_mod` keeps its name: only a wrapper's own child is
dropped. Types are known by module and class name, so that nothing is imported to ask.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from ckptfmt.errors import UsageError

# (module, class) -> (attribute that holds the wrapped module, does it stand in state_dict's keys)
_WRAPPERS: dict[tuple[str, str], tuple[str, bool]] = {
    ("torch._dynamo.eval_frame", "OptimizedModule"): ("_orig_mod", True),
    ("torch.nn.parallel.distributed", "DistributedDataParallel"): ("module", True),
    ("torch.nn.parallel.data_parallel", "DataParallel"): ("module", True),
    ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel"): (
        "_fsdp_wrapped_module",
        False,
    ),
    ("torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "ActivationWrapper"): (
        "_checkpoint_wrapped_module",
        False,
    ),
}


def wrapper_of(module: Any) -> tuple[str, bool] | None:
    """The row of a module that wraps another one, else None."""
    for cls in type(module).__mro__:
        row = _WRAPPERS.get((cls.__module__, cls.__qualname__))
        if row is not None:
            return row
    return None


def holds_parts(module: Any) -> bool:
    """Whether a wrapper in it (FSDP, version 1) leaves each rank a part of the parameters, under
    their names: no DTensor says which."""
    for child in module.modules():
        if wrapper_of(child) == ("_fsdp_wrapped_module", False):
            handle = getattr(child, "_handle", None)
            if handle is not None and handle.uses_sharded_strategy:
                return True
    return False


def unwrap(module: Any) -> Any:
    """The innermost module below wrappers at the root."""
    row = wrapper_of(module)
    while row is not None:
        module = module._modules[row[0]]
        row = wrapper_of(module)
    return module


def say_prefixes(module: Any, name: str, matched_by: dict[str, str]) -> None:
    """Note in a report which wrappers' prefixes a module's own names have lost."""
    rows = {wrapper_of(child) for child in module.modules()} - {None}
    prefixes = sorted(f"{row[0]}." for row in rows if row is not None and row[1])
    if prefixes:
        matched_by[name] = f"names without {', '.join(map(repr, prefixes))} of wrappers"


def clean_keys(module: Any, keys: Iterable[str], where: str) -> dict[str, str]:
    """Key of `state_dict()` -> the key without wrappers, in order.

    Raises:
        UsageError: Two keys become one.
    """
    if not any(wrapper_of(child) for child in module.modules()):
        return {key: key for key in keys}
    cleaned = {key: clean_key(module, key) for key in keys}
    first: dict[str, str] = {}
    for raw, key in cleaned.items():
        if key in first:
            raise UsageError(
                "two entries have one name once wrappers are removed",
                reason="torch-wrapper-name",
                where=f"{where}/{key}",
                found=f"{first[key]!r} and {raw!r}",
                do="put the wrapped module itself into the tree",
            )
        first[key] = raw
    return cleaned


def clean_key(module: Any, key: str) -> str:
    """One key, its segments followed down the module tree."""
    parts, node = key.split("."), module
    kept: list[str] = []
    position = 0
    while position < len(parts):
        row = wrapper_of(node) if node is not None else None
        if row is not None:
            attribute, in_keys = row
            named = parts[position] == attribute
            if named:
                position += 1
            elif in_keys:
                # An entry of the wrapper itself.
                return ".".join([*kept, *parts[position:]])
            node = node._modules.get(attribute)
            continue
        part = parts[position]
        kept.append(part)
        position += 1
        node = node._modules.get(part) if node is not None else None
    return ".".join(kept)


def clean_modules(module: Any) -> Iterator[tuple[str, Any]]:
    """(prefix without wrappers, module) for each module below, every path of a shared one.

    Wrappers themselves come with the prefix of what they wrap. A module that contains itself is
    walked once on each path.
    """
    yield from _walk(module, "", ())


def _walk(module: Any, prefix: str, above: tuple[int, ...]) -> Iterator[tuple[str, Any]]:
    if id(module) in above:
        return
    yield prefix, module
    row = wrapper_of(module)
    for name, child in module._modules.items():
        if child is None:
            continue
        below = prefix if row is not None and name == row[0] else f"{prefix}{name}."
        yield from _walk(child, below, (*above, id(module)))


def clean_parameters(module: Any) -> Iterator[tuple[str, Any]]:
    """(name without wrappers, parameter), every name of a shared parameter."""
    for prefix, child in clean_modules(module):
        for name, parameter in child._parameters.items():
            if parameter is not None:
                yield prefix + name, parameter
