"""What a bundle's tensors are called in a checkpoint: names, from TensorFlow's.

Object-based: the object's path, without `/.ATTRIBUTES/VARIABLE_VALUE`, its escapes undone.
Name-based: the variable's name. A name is cut at `/`, but never where what is before the cut is a
tensor itself: beside `dense/kernel`, `dense/kernel/Adam` is the key `kernel/Adam` of `dense`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ckptfmt.errors import UnsupportedError
from ckptfmt.foreign.bundle.graph import Keys, Node
from ckptfmt.foreign.sstable import REASON

ATTRIBUTES = "/.ATTRIBUTES/"
VALUE = "VARIABLE_VALUE"
FULL_NAME, ALIASES, SPARE = "tf.full_name", "tf.aliases", "ckptfmt.spare"
_SAVE_COUNTER = "save_counter"


@dataclass(slots=True)
class Names:
    """Names of all tensors, by their keys in the file.

    Attributes:
        names: In a checkpoint.
        full_names: What TensorFlow called the variable, where that is known.
        aliases: Other paths, from the root, of those that have any.
        object_is_root: A model itself was saved, not a `tf.train.Checkpoint` of several objects.
    """

    names: dict[str, str]
    full_names: Mapping[str, str] = field(default_factory=dict)
    aliases: dict[str, list[Keys]] = field(default_factory=dict)
    object_is_root: bool = False

    def attributes(self, key: str) -> dict[str, object]:
        """What is kept with the leaf. Aliases stand there from the object in the user's tree."""
        made: dict[str, object] = {}
        if full := self.full_names.get(key):
            made[FULL_NAME] = full
        if not self.object_is_root and self.names[key] == _SAVE_COUNTER:
            made[SPARE] = True
        aliases: Iterable[Keys] = self.aliases.get(key, ())
        if not self.object_is_root:
            first = self.names[key].partition("/")[0]
            aliases = (a[1:] for a in aliases if len(a) > 1 and name_of(a[:1]) == first)
        if texts := [name_of(alias) for alias in aliases]:
            made[ALIASES] = texts
        return made


def name_of(keys: Sequence[str]) -> str:
    """The name of a path."""
    from ckptfmt.format import escape_key

    return "/".join([escape_key(key) for key in keys])


def split_object_key(name: str) -> Keys:
    """The path of an object-based key. What is no variable's value keeps its attribute's name."""
    path, attribute, last = name.rpartition(ATTRIBUTES)
    if not attribute:
        return tuple(name.split("/"))
    keys = tuple(map(_unescaped, path.split("/")))
    return keys if last == VALUE else (*keys, f".ATTRIBUTES.{last}")


def _unescaped(part: str) -> str:
    """`.S` stands for a slash and `..` for a dot, read from the left: `..S` is a dot and an S."""
    if "." not in part:
        return part
    return ".".join(piece.replace(".S", "/") for piece in part.split(".."))


def name_plainly(keys: Iterable[str]) -> Names:
    """Names of a bundle without an object graph."""
    names = {}
    for key in keys:
        plain = "~" not in key and "//" not in key and key[0] != "/" and key[-1] != "/"
        names[key] = key if plain else name_of(key.split("/"))
    return Names(names, {key: key for key in names})


def settle(made: Names, where: str) -> None:
    """Make names differ: where tensors would share one, they go by their keys in the file. Then cut
    no name inside of another tensor's.

    Raises:
        UnsupportedError: Two tensors would still have one name.
    """
    names = made.names
    shared = _shared(names)
    for key in shared:
        names[key] = name_of(key.split("/"))
    leaves = set(names.values())
    # Those above are far fewer than tensors.
    above = {name.rpartition("/")[0] for name in leaves}
    nested = not leaves.isdisjoint(above)
    while above and not nested:
        above = {name.rpartition("/")[0] for name in above if name}
        nested = not leaves.isdisjoint(above)
    if nested:
        for key, name in names.items():
            names[key] = _joined(name, leaves)
    if (shared or nested) and (wrong := _shared(names)):
        raise UnsupportedError(
            "two tensors would have one name",
            reason=f"{REASON}-name",
            where=f"{where}: {', '.join(ascii(key)[:200] for key in wrong[:4])}",
        )


def _shared(names: Mapping[str, str]) -> list[str]:
    """Keys in the file of tensors whose name another has, too."""
    if len(set(names.values())) == len(names):
        return []
    seen: dict[str, str] = {}
    twice: dict[str, None] = {}
    for key, name in names.items():
        other = seen.setdefault(name, key)
        if other != key:
            twice |= {other: None, key: None}
    return list(twice)


def _joined(name: str, leaves: set[str]) -> str:
    """The name, with what follows another tensor's name in one key with that one's last."""
    from ckptfmt.format import parse_key, split_name

    parts = split_name(name)
    keys = [str(parse_key(parts[0]))]
    prefix = parts[0]
    for part in parts[1:]:
        key = str(parse_key(part))
        if prefix in leaves:
            keys[-1] = f"{keys[-1]}/{key}"
        else:
            keys.append(key)
        prefix = f"{prefix}/{part}"
    return name_of(keys)


def object_is_root(nodes: list[Node]) -> bool:
    """Whether a model itself was saved, not a `tf.train.Checkpoint` of several objects."""
    return any(
        name in ("signatures", "_functional", "_operations", "_layers")
        or name.startswith("layer_with_weights-")
        for name, _ in nodes[0].children
    )
