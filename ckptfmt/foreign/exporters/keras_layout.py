"""Where Keras has a model's variables in a `.weights.h5`: groups by class and position, numbered.

A checkpoint knows layers by their names, the file by their classes: `first/kernel` is
`layers/dense/vars/0`. Which is which is read from a file of the same model (`like=`), whose groups
say the layers' names; or, where every layer has the name that Keras gave it, from the names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ckptfmt.errors import CorruptError, UnsupportedError
from ckptfmt.foreign.exporters.tree import ExportTensor, ExportTree
from ckptfmt.foreign.keras_layers import counted, is_automatic, without_number

VARS, LAYERS, OPTIMIZER = "vars", "layers", "optimizer"
_HOLDERS = frozenset({"sequential", "functional", "model"})
_PARTS = frozenset({"forward_layer", "backward_layer", "cell"})
_NUMBER = re.compile(r"_([0-9]+)\Z")
_DEPTH_MAX = 64


@dataclass(frozen=True, slots=True)
class Variables:
    """The variables of one object of the model.

    Attributes:
        path: Its group in the file.
        title: What the group calls the object.
        names: Leaf names, in the order of the file.
    """

    path: str
    title: str
    names: tuple[str, ...]


def model_root(tree: ExportTree) -> str:
    """Where the model is: at the root that was chosen, or the tree's one child that is no optimizer
    and whose variables are further down than those of a layer."""
    names = [name for name, leaf in tree.leaves.items() if isinstance(leaf, ExportTensor)]
    tops = {name.partition("/")[0] for name in names}
    models = [top for top in tops if f"{top}/iterations" not in tree.leaves]
    below = [name for name in names if models and name.startswith(f"{models[0]}/")]
    if tree.root or len(models) != 1 or any(name.count("/") < 2 for name in below):
        return ""
    return f"{models[0]}/"


def layout_of(tree: ExportTree, prefix: str) -> list[Variables]:
    """The layout of a model whose layers all have the names that Keras gave them.

    Raises:
        UnsupportedError: A name was chosen by somebody, or has parts of which Keras's own names are
            not known: which class it is only a file of the same model tells.
    """
    made: dict[str, list[str]] = {}
    for name, leaf in tree.leaves.items():
        if not name.startswith(prefix) or not isinstance(leaf, ExportTensor):
            continue
        keys = name[len(prefix) :].split("/")
        if "seed_generator" in keys or "states" in keys[-3:-1]:
            continue  # seeds, and the states of stateful RNNs, which Keras's own files lack
        if f"{name.partition('/')[0]}/iterations" in tree.leaves:
            continue
        made.setdefault(_path_of(keys[:-1], name), []).append(name)
    return [Variables(path, path.rpartition("/")[2], tuple(names)) for path, names in made.items()]


def _path_of(keys: Sequence[str], name: str) -> str:
    path: list[str] = []
    is_holder = True
    for key in keys:
        if is_holder and is_automatic(key):
            path += [LAYERS, key]
        elif not is_holder and key in _PARTS:
            path.append(key)
        else:
            raise UnsupportedError(
                "a name does not say of what class a layer is",
                reason="export-layer",
                where=name,
                found=repr(key),
                do="give a .weights.h5 of the same model: like= (--like)",
            )
        is_holder = without_number(key) in _HOLDERS
    return "/".join(path)


def layout_like(template: Any, tree: ExportTree, prefix: str) -> list[Variables]:
    """The layout of a file of the same model.

    Args:
        template: An opened HDF5 file.
    Raises:
        UnsupportedError: A group has variables that the checkpoint has not, or in other shapes.
    """
    return list(_of_group(template, "", prefix, tree, 0))


def _of_group(
    group: Any, path: str, prefix: str, tree: ExportTree, depth: int
) -> Iterator[Variables]:
    """Of an object and all below it. `prefix`: of its leaves' names."""
    if depth > _DEPTH_MAX:
        raise CorruptError("groups are nested too deep", reason="export-like", where=path)
    if VARS in group and len(group[VARS]):
        yield _matched(group[VARS], path, prefix, tree)
    elif VARS in group:
        yield Variables(path, _title(group), ())
    for segment, child in _children(group):
        inner = f"{path}/{segment}" if path else segment
        if inner == OPTIMIZER or segment == VARS:
            continue
        if VARS not in child and segment == LAYERS:
            layers = sorted(_children(child), key=lambda row: _position(row[0]))
            # As a checkpoint has them: chosen names, and classes numbered within the list.
            named = counted(_title(layer) or name for name, layer in layers)
            for (name, layer), title in zip(layers, named):
                below = _below(prefix, (title, _title(layer), name), tree)
                yield from _of_group(layer, f"{inner}/{name}", below, tree, depth + 1)
        else:
            below = _below(prefix, (segment, _title(child)), tree)
            yield from _of_group(child, inner, below, tree, depth + 1)


def _children(group: Any) -> list[tuple[str, Any]]:
    return [(name, group[name]) for name in group if hasattr(group[name], "keys")]


def _title(group: Any) -> str:
    found = group[VARS].attrs.get("name", "") if VARS in group else ""
    return found if isinstance(found, str) else ""


def _below(prefix: str, names: Sequence[str], tree: ExportTree) -> str:
    """The leaves of a child: by the first of its names that has any."""
    for name in names:
        if name and any(leaf.startswith(f"{prefix}{name}/") for leaf in tree.leaves):
            return f"{prefix}{name}/"
    return f"{prefix}{names[0]}/"


def _position(group: str) -> tuple[str, int]:
    number = _NUMBER.search(group)
    return (group[: number.start()], int(number[1])) if number else (group, 0)


def _matched(group: Any, path: str, prefix: str, tree: ExportTree) -> Variables:
    shapes = [tuple(group[str(n)].shape) for n in range(len(group))]
    own = [name for name in tree.leaves if _is_own(name, prefix)]
    found = [(name, leaf) for name in own if isinstance(leaf := tree.leaves[name], ExportTensor)]
    if [leaf.shape for _, leaf in found] != shapes:
        raise UnsupportedError(
            "the checkpoint has other variables than the file that it is to be like",
            reason="export-like",
            where=f"{path}: {prefix}",
            expected=shapes,
            found={name: leaf.shape for name, leaf in found} or "none",
            do="give a .weights.h5 of the same model; root= chooses the model in the checkpoint",
        )
    title = group.attrs.get("name", "")
    return Variables(path, title if isinstance(title, str) else "", tuple(n for n, _ in found))


def _is_own(name: str, prefix: str) -> bool:
    return name.startswith(prefix) and "/" not in name[len(prefix) :]


def optimizer_layout(tree: ExportTree, template: Any) -> Variables | None:
    """The optimizer's variables, in the order that Keras has; None where it is not in the tree, or
    other than the template's."""
    tops = [n.rpartition("/")[0] for n in tree.leaves if n.endswith("/iterations")]
    if len(tops) != 1:
        return None
    names = tuple(
        n
        for n, leaf in tree.leaves.items()
        if n.startswith(f"{tops[0]}/") and isinstance(leaf, ExportTensor)
    )
    if template is not None:
        group = template.get(f"{OPTIMIZER}/{VARS}")
        shapes = [] if group is None else [tuple(group[str(n)].shape) for n in range(len(group))]
        found = [leaf.shape for n in names if isinstance(leaf := tree.leaves[n], ExportTensor)]
        if shapes != found:
            return None
        return Variables(OPTIMIZER, str(group.attrs.get("name", "")), names)
    return Variables(OPTIMIZER, tops[0].rpartition("/")[2], names)
