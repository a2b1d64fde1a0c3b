"""The opcodes of a pickle: one small function each, in one table.

They move data on a `PickleMachine`'s stack. Opcodes that lead out of the pickle (extension codes,
buffers beside it) are not here.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from ckptfmt.foreign.pickle_machine import PickleMachine

MARK = object()
_RUN_MAX = 1000
STOP = 0x2E
_Step: TypeAlias = "Callable[[PickleMachine], None]"
TABLE: list[_Step | None] = [None] * 256


def _op(code: bytes) -> Callable[[_Step], _Step]:
    def add(step: _Step) -> _Step:
        TABLE[code[0]] = step
        return step

    return add


def _run(code: int, width: int) -> Callable[[PickleMachine], int]:
    """How many more times the opcode that was just read follows on itself, with as many bytes."""
    many = re.compile(
        b"(?:%s.{%d}){1,%d}+" % (re.escape(bytes([code])), width, _RUN_MAX), re.DOTALL
    )

    def count(m: PickleMachine) -> int:
        after = m.position + width
        if after >= m._end or m.data[after] != code:
            return 0
        found = many.match(m.data, after, m._end)
        return (found.end() - after) // (width + 1) if found is not None else 0

    return count


def _constant(code: bytes, value: object) -> None:
    more = _run(code[0], 0)

    def step(m: PickleMachine) -> None:
        count = more(m)
        m.position += count
        m.stack += [value] * (count + 1)

    TABLE[code[0]] = step


def _fixed(code: bytes, form: str) -> None:
    """A number of a fixed width. Lists of them are taken a thousand at a time."""
    packed = struct.Struct(form)
    size, more = packed.size, _run(code[0], packed.size)
    numbers = np.dtype([("number", np.dtype(form)), ("code", "u1")])

    def step(m: PickleMachine) -> None:
        at = m.position
        if size > m._end - at:
            m.ended()
        count = more(m)
        m.position = at + size + count * (size + 1)
        if not count:
            m.stack.append(packed.unpack_from(m.data, at)[0])
            return
        m.stack += np.frombuffer(m.data, numbers, count, at)["number"].tolist()
        m.stack.append(packed.unpack_from(m.data, m.position - size)[0])

    TABLE[code[0]] = step


def _sized(code: bytes, width: int, make: Callable[[PickleMachine, bytes], Any]) -> None:
    """So many bytes, after their number."""

    def step(m: PickleMachine) -> None:
        start = m.position + width
        if start > m._end:
            m.ended()
        stop = start + int.from_bytes(m.data[m.position : start], "little")
        if stop > m._end:
            m.ended()
        m.position = stop
        m.stack.append(make(m, m.data[start:stop]))

    TABLE[code[0]] = step


_constant(b"N", None)
_constant(b"\x88", True)
_constant(b"\x89", False)
_fixed(b"J", "<i")
_fixed(b"K", "<B")
_fixed(b"M", "<H")
_fixed(b"G", ">d")
for _code, _width in ((b"\x8c", 1), (b"X", 4), (b"\x8d", 8)):
    _sized(_code, _width, lambda m, raw: raw.decode("utf-8", "surrogatepass"))
for _code, _width in ((b"C", 1), (b"B", 4), (b"\x8e", 8)):
    _sized(_code, _width, lambda m, raw: raw)
for _code, _width in ((b"U", 1), (b"T", 4)):
    _sized(_code, _width, lambda m, raw: m.old_text(raw))
for _code, _width in ((b"\x8a", 1), (b"\x8b", 4)):
    _sized(_code, _width, lambda m, raw: int.from_bytes(raw, "little", signed=True))
_sized(b"\x96", 8, lambda m, raw: bytearray(raw))


def _number(line: str) -> Any:
    return line == "01" if line in ("00", "01") else int(line)


def _quoted(m: PickleMachine) -> Any:
    import codecs

    line = m.line().strip()
    if len(line) < 2 or line[0] != line[-1] or line[0] not in "\"'":
        m.fail("a text without quotes")
    # Two values: the bytes, and how many characters were read.
    return m.old_text(codecs.escape_decode(line[1:-1].encode("latin-1"))[0])


TABLE[ord("I")] = lambda m: m.push(_number(m.line()))
TABLE[ord("L")] = lambda m: m.push(int(m.line().rstrip("L")))
TABLE[ord("F")] = lambda m: m.push(float(m.line()))
TABLE[ord("S")] = lambda m: m.push(_quoted(m))
TABLE[ord("V")] = lambda m: m.push(
    m.line().encode("latin-1", "strict").decode("raw-unicode-escape")
)
TABLE[ord("(")] = lambda m: m.push(MARK)
TABLE[ord("2")] = lambda m: m.push(m.top())
_constant(b")", ())
TABLE[ord("]")] = lambda m: m.new([])
TABLE[ord("}")] = lambda m: m.new({})
TABLE[0x8F] = lambda m: m.new(set())
TABLE[ord("t")] = lambda m: m.new(tuple(m.pop_mark()))
TABLE[ord("l")] = lambda m: m.new(m.pop_mark())
TABLE[ord("q")] = lambda m: m.memoize(m.uint(1))
TABLE[ord("r")] = lambda m: m.memoize(m.uint(4))
TABLE[ord("p")] = lambda m: m.memoize(int(m.line()))
TABLE[ord("h")] = lambda m: m.push(m.memo[m.uint(1)])
TABLE[ord("j")] = lambda m: m.push(m.memo[m.uint(4)])
TABLE[ord("g")] = lambda m: m.push(m.memo[int(m.line())])
TABLE[ord("c")] = lambda m: m.push_global(m.line(), m.line())


@_op(b"\x91")
def _frozenset(m: PickleMachine) -> None:
    items = m.pop_mark()
    m.count(len(items) // 2)
    m.new(frozenset(m.key(item) for item in items))


@_op(b"\x94")
def _memoize(m: PickleMachine) -> None:
    if m.stack[-1] is MARK:
        m.top()  # which says so
    m.memo[len(m.memo)] = m.stack[-1]


@_op(b"0")
def _drop(m: PickleMachine) -> None:
    m.stack.pop()


@_op(b"1")
def _drop_to_mark(m: PickleMachine) -> None:
    m.pop_mark()


@_op(b"d")
def _dict(m: PickleMachine) -> None:
    items = m.pop_mark()
    made: dict[Any, Any] = {}
    m.set_items(made, items)
    m.new(made)


def _tuple_of(count: int) -> _Step:
    def step(m: PickleMachine) -> None:
        stack = m.stack
        items = tuple(stack[-count:])
        if len(items) != count or MARK in items:
            m.fail("a tuple of less than it holds")
        del stack[-count:]
        m.new(items)

    return step


for _code, _width in ((b"\x85", 1), (b"\x86", 2), (b"\x87", 3)):
    TABLE[_code[0]] = _tuple_of(_width)


@_op(b"\x80")
def _protocol(m: PickleMachine) -> None:
    version = m.uint(1)
    if version > 5:
        m.fail("an unknown pickle protocol", found=version)


@_op(b"\x95")
def _frame(m: PickleMachine) -> None:
    if m.uint(8) > m._end - m.position:
        m.ended()


@_op(b"\x93")
def _stack_global(m: PickleMachine) -> None:
    name, module = m.pop(), m.pop()
    if type(name) is not str or type(module) is not str:
        m.fail("a name that is no text", "name")
    m.push_global(module, name)


@_op(b"s")
def _set_item(m: PickleMachine) -> None:
    value, key = m.pop(), m.pop()
    m.set_items(m.top(), [key, value])


@_op(b"u")
def _set_all(m: PickleMachine) -> None:
    items = m.pop_mark()
    m.set_items(m.top(), items)


@_op(b"a")
def _append(m: PickleMachine) -> None:
    item = m.pop()
    m.extend(m.top(), [item])


@_op(b"e")
def _append_all(m: PickleMachine) -> None:
    items = m.pop_mark()
    m.extend(m.top(), items)


@_op(b"\x90")
def _add_all(m: PickleMachine) -> None:
    items = m.pop_mark()
    target = m.top()
    if type(target) is not set:
        m.fail("items for what is no set", found=type(target).__name__)
    m.count(len(items) // 2)
    target.update(m.key(item) for item in items)


@_op(b"R")
@_op(b"\x81")
def _reduce(m: PickleMachine) -> None:
    args, function = m.pop(), m.pop()
    m.push(m.call(function, args))


@_op(b"\x92")
def _new_with_names(m: PickleMachine) -> None:
    names, args, function = m.pop(), m.pop(), m.pop()
    # Arguments by name are kept as data: no builder takes them.
    m.push(m.call(function, (*args, names) if names else args, kept=bool(names)))


@_op(b"i")
def _instance(m: PickleMachine) -> None:
    module, name = m.line(), m.line()
    args = tuple(m.pop_mark())
    m.push_global(module, name)
    m.push(m.call(m.pop(), args))


@_op(b"o")
def _object(m: PickleMachine) -> None:
    items = m.pop_mark()
    m.push(m.call(items[0], tuple(items[1:])))


@_op(b"b")
def _set_state(m: PickleMachine) -> None:
    state = m.pop()
    m.build(m.top(), state)


def _persistent(m: PickleMachine, key: Any) -> None:
    if m.persistent is None:
        m.fail("a pickle refers to what is not in it")
    m.push(m.persistent(key))


TABLE[ord("P")] = lambda m: _persistent(m, m.line())
TABLE[ord("Q")] = lambda m: _persistent(m, m.pop())
