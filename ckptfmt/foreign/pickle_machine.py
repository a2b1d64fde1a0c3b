"""Pickles as data: a small machine of our own for the opcodes, in which nothing can be called.

Python's unpickler imports what a pickle names and calls it. Here a name stays a `Global`, which is
text; "call this" makes a `Record` of the name and its arguments, unless the reader of a format gave
a *builder* for that very name, which makes plain data of plain data. There is no import, no getattr
on anything of the file, and no object of a class that the file chose.

Everything is bounded: the pickle's length, the stack, the number of containers and of calls in
proportion to the length, and the keys of dicts (a hash that an attacker can steer makes a dict
quadratic; a deeply nested tuple overflows the C stack when it is hashed).
"""

from __future__ import annotations

from abc import abstractmethod
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

from ckptfmt.errors import CheckpointError, CorruptError, UnsupportedError
from ckptfmt.foreign.pickle_opcodes import MARK, STOP, TABLE

if TYPE_CHECKING:
    import mmap

Builder: TypeAlias = Callable[[tuple[Any, ...]], Any]

PICKLE_NBYTES_MAX = 256 << 20
LINE_NBYTES_MAX = 16 << 20
NAME_NBYTES_MAX, NAMES_MAX = 1024, 1 << 16
STACK_MAX = 1 << 20
CONTAINERS_FREE, CALLS_FREE = 1 << 17, 1 << 16
"""So many whatever the length; beyond, one for every 16 and 32 bytes of the pickle. What libraries
write takes more: a tuple of two numbers 10 to 15 bytes, a tensor 60 to 100 and its name."""
TUPLE_KEYS_MAX = 4096
KEY_TUPLE_MAX = 64


@dataclass(frozen=True, slots=True)
class Global:
    """A name that the pickle refers to: `torch.FloatStorage`. It is never resolved."""

    name: str


@dataclass(slots=True, eq=False, repr=False)
class Record:
    """What would have been an object of a class that is code.

    Attributes:
        name: Of the class or function.
        args: What it would have been called with.
        state: What its `__setstate__` would have been given; None if nothing.
        items: What would have been appended, or set as items.
    """

    name: str
    args: tuple[Any, ...] = ()
    state: Any = None
    items: list[Any] = field(default_factory=list)


class Settable:
    """A builder's product that takes a state (BUILD)."""

    __slots__ = ()

    @abstractmethod
    def set_state(self, state: Any) -> None:
        """Take what the class's own `__setstate__` would be given; checked as arguments are."""


def illegal(what: str) -> CorruptError:
    """What a builder raises for arguments that are not legal. Whoever called it knows where."""
    return CorruptError(what, reason="foreign-argument")


class PickleMachine:
    """Reads pickles one after another from a buffer.

    Args:
        data: The bytes; only [position, stop) is looked at.
        where: What they are, for messages.
        builders: Name -> what makes plain data of the arguments of a call to it. It raises
            `illegal(...)` for arguments that are not.
        persistent: What a persistent id stands for.
        reason: Prefix of the errors' reasons.
    Attributes:
        states: id of a dict -> the state that was set on it; the dicts are kept alive.
    """

    def __init__(
        self,
        data: bytes | mmap.mmap,
        position: int,
        stop: int,
        *,
        where: str,
        reason: str,
        builders: Mapping[str, Builder] = MappingProxyType({}),
        persistent: Callable[[Any], Any] | None = None,
    ) -> None:
        self.data, self.position, self.stop = data, position, stop
        self.where, self.reason = where, reason
        self.builders, self.persistent = builders, persistent
        self._begin = position
        self.states: dict[int, Any] = {}
        self.containers = self.calls = 0
        self._kept: list[Any] = []
        self._tuple_keys = 0
        self._end, self._is_cut = stop, False
        self._globals: dict[str, Global] = {}

    def fail(self, what: str, reason: str = "pickle", found: object = None) -> NoReturn:
        """Raise CorruptError at the present position."""
        raise CorruptError(
            what,
            reason=f"{self.reason}-{reason}",
            where=f"{self.where}, byte {self.position}",
            found=found,
            do="get the file again",
        )

    def load(self) -> Any:
        """The next pickle's object, whose position is then behind it.

        Raises:
            CorruptError: It is cut off, malformed or beyond a limit.
        """
        limit = min(self.stop, self.position + PICKLE_NBYTES_MAX)
        self._end, self._is_cut = limit, limit < self.stop
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        table, data = TABLE, self.data
        try:
            while True:
                if self.position >= self._end:
                    self.ended()
                code = data[self.position]
                self.position += 1
                if code == STOP:
                    break
                if len(self.stack) > STACK_MAX:
                    self.fail("the pickle's stack is too deep", "limit", f"more than {STACK_MAX}")
                step = table[code]
                if step is None:
                    self.fail("an opcode that no such file has", found=f"0x{code:02x}")
                step(self)
            if len(self.stack) != 1:
                self.fail("a pickle that leaves more or less than one object")
            self._end = self.stop
            return self.checked(self.stack.pop())
        except CheckpointError as error:
            if error.where:
                raise
            # A builder's own refusal.
            self.fail("a malformed pickle", found=error.what)
        except (
            IndexError,
            KeyError,
            TypeError,
            ValueError,
            OverflowError,
            AttributeError,
        ) as error:
            # Of this machine and the builders alone: no code of the file has run.
            found = f"{type(error).__name__}: {error}"[:200]
            self.fail("a malformed pickle", found=found)

    # -- reading

    def ended(self) -> NoReturn:
        if self._is_cut:
            self.fail("the pickle is too long", "limit", f"more than {PICKLE_NBYTES_MAX} bytes")
        self.fail("the pickle is cut off", "truncated")

    def take(self, nbytes: int) -> bytes:
        start = self.position
        if nbytes < 0 or nbytes > self._end - start:
            self.ended()
        self.position = start + nbytes
        return self.data[start : self.position]

    def skip(self, nbytes: int) -> None:
        """Step over bytes that are no pickle: `take` without a copy."""
        if nbytes < 0 or nbytes > self.stop - self.position:
            self.ended()
        self.position += nbytes

    def uint(self, nbytes: int) -> int:
        return int.from_bytes(self.take(nbytes), "little")

    def line(self) -> str:
        end = self.data.find(b"\n", self.position, min(self._end, self.position + LINE_NBYTES_MAX))
        if end < 0:
            self.ended()
        raw = self.data[self.position : end]
        self.position = end + 1
        return raw.decode("latin-1")

    # -- stack

    def push(self, obj: Any) -> None:
        # Its depth is looked at once for each opcode, none of which pushes much.
        self.stack.append(obj)

    def new(self, obj: Any) -> None:
        """Push a container, or anything that takes more memory than the bytes that ask for it."""
        self.count(1)
        self.stack.append(obj)

    def count(self, made: int) -> None:
        """So many more containers."""
        self.containers += made
        if self.containers > CONTAINERS_FREE + (self.position - self._begin) // 16:
            self.fail("the pickle makes too many objects", "limit", self.containers)

    def checked(self, obj: Any) -> Any:
        if obj is MARK:
            self.fail("a pickle takes a mark for an object")
        return obj

    def pop(self) -> Any:
        return self.checked(self.stack.pop())

    def top(self) -> Any:
        return self.checked(self.stack[-1])

    def pop_mark(self) -> list[Any]:
        stack = self.stack
        at = len(stack) - 1
        while stack[at] is not MARK:
            at -= 1
            if at < 0:
                self.fail("a pickle without a mark")
        items = stack[at + 1 :]
        del stack[at:]
        return items

    # -- names and calls

    def push_global(self, module: str, name: str) -> None:
        text = f"{module}.{name}"
        if len(text) > NAME_NBYTES_MAX or not text.isprintable():
            self.fail("a name is too long, or no text", "name", ascii(text[:80]))
        known = self._globals.get(text)
        if known is None:
            if len(self._globals) >= NAMES_MAX:
                self.fail("the pickle refers to too many names", "limit", f"more than {NAMES_MAX}")
            known = self._globals[text] = Global(text)
        self.stack.append(known)

    def call(self, function: Any, args: Any, *, kept: bool = False) -> Any:
        self.calls += 1
        if self.calls > CALLS_FREE + (self.position - self._begin) // 32:
            self.fail("the pickle makes too many objects", "limit", self.calls)
        if type(args) is not tuple:
            self.fail("the arguments of a call are no tuple", found=type(args).__name__)
        if isinstance(function, Global):
            builder = None if kept else self.builders.get(function.name)
            return Record(function.name, args) if builder is None else builder(args)
        if isinstance(function, Record):
            # The result of a call that did not happen would have been called.
            return Record(f"{function.name[:NAME_NBYTES_MAX]}()", args, state=function)
        return self.fail("a pickle calls what is no name", found=type(function).__name__)

    def build(self, obj: Any, state: Any) -> None:
        if isinstance(obj, Settable):
            obj.set_state(state)
        elif isinstance(obj, Record):
            obj.state = state
        elif type(obj) in (dict, OrderedDict):
            self._kept.append(obj)
            self.states[id(obj)] = state
        else:
            self.fail("a pickle gives a state to plain data", found=type(obj).__name__)

    # -- containers

    def key(self, key: Any) -> Any:
        """A key of a dict or an element of a set, safe to hash."""
        kind = type(key)
        if kind is str or kind is bytes or kind is bool or key is None or kind is float:
            return key
        if kind is int and -(1 << 63) <= key < 1 << 64:
            return key
        if kind is tuple:
            self._tuple_keys += 1
            if self._tuple_keys <= TUPLE_KEYS_MAX and self._is_short(key):
                return key
        raise UnsupportedError(
            "a key that is no text, number or short tuple of them",
            reason=f"{self.reason}-key",
            where=f"{self.where}, byte {self.position}",
            found=key.name if isinstance(key, Global | Record) else kind.__name__,
            do="load it with the framework that wrote it, and save plain data",
        )

    def _is_short(self, key: tuple[Any, ...]) -> bool:
        """Whether all that a tuple holds are so few keys; what stands in it twice counts twice, as
        its hash does."""
        pending, count = [key], 0
        while pending:
            for item in pending.pop():
                count += 1
                if count > KEY_TUPLE_MAX:
                    return False
                if type(item) is tuple:
                    pending.append(item)
                else:
                    self.key(item)
        return True

    def set_items(self, target: Any, items: list[Any]) -> None:
        if len(items) % 2:
            self.fail("an odd number of keys and values")
        pairs = zip(items[::2], items[1::2], strict=True)
        if isinstance(target, Record):
            target.items += [(self.checked(k), self.checked(v)) for k, v in pairs]
        elif isinstance(target, dict):
            for key, value in pairs:
                target[self.key(key)] = self.checked(value)
        else:
            self.fail("items for what is no dict", found=type(target).__name__)

    def extend(self, target: Any, items: list[Any]) -> None:
        if isinstance(target, Record):
            target.items += items
        elif type(target) in (list, deque):
            target.extend(items)
        else:
            self.fail("items for what is no list", found=type(target).__name__)

    def memoize(self, at: int) -> None:
        self.memo[at] = self.top()

    def old_text(self, raw: bytes) -> str | bytes:
        """A `str` of Python 2: text where it is UTF-8, else bytes."""
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return raw
