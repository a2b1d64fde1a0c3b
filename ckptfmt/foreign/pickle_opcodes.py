"""The opcodes of a pickle: one small function each, in one table.

They move data on a `PickleMachine`'s stack. Opcodes that lead out of the pickle (extension codes,
buffers beside it) are not here.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from ckptfmt.foreign.pickle_machine import PickleMachine

MARK = object()
STOP = 0x2E
_Step: TypeAlias = "Callable[[PickleMachine], None]"
TABLE: list[_Step | None] = [None] * 256


def _op(code: bytes) -> Callable[[_Step], _Step]:
    def add(step: _Step) -> _Step:
        TABLE[code[0]] = step
        return step

    return add


def _constant(code: bytes, value: object) -> None:
    TABLE[code[0]] = lambda m: m.push(value)


def _fixed(code: bytes, form: str) -> None:
    unpack, size = struct.Struct(form).unpack, struct.calcsize(form)
    TABLE[code[0]] = lambda m: m.push(unpack(m.take(size))[0])


def _sized(code: bytes, width: int, make: Callable[[PickleMachine, int], Any]) -> None:
    TABLE[code[0]] = lambda m: m.push(make(m, m.uint(width)))


_constant(b"N", None)
_constant(b"\x88", True)
_constant(b"\x89", False)
_fixed(b"J", "<i")
_fixed(b"K", "<B")
_fixed(b"M", "<H")
_fixed(b"G", ">d")
for _code, _width in ((b"\x8c", 1), (b"X", 4), (b"\x8d", 8)):
    _sized(_code, _width, lambda m, n: m.text(n))
for _code, _width in ((b"C", 1), (b"B", 4), (b"\x8e", 8)):
    _sized(_code, _width, lambda m, n: m.take(n))
for _code, _width in ((b"U", 1), (b"T", 4)):
    _sized(_code, _width, lambda m, n: m.old_text(m.take(n)))
for _code, _width in ((b"\x8a", 1), (b"\x8b", 4)):
    _sized(_code, _width, lambda m, n: int.from_bytes(m.take(n), "little", signed=True))
_sized(b"\x96", 8, lambda m, n: bytearray(m.take(n)))


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
TABLE[ord(")")] = lambda m: m.push(())
TABLE[ord("]")] = lambda m: m.new([])
TABLE[ord("}")] = lambda m: m.new({})
TABLE[0x8F] = lambda m: m.new(set())
TABLE[ord("t")] = lambda m: m.new(tuple(m.pop_mark()))
TABLE[ord("l")] = lambda m: m.new(m.pop_mark())
TABLE[0x91] = lambda m: m.new(frozenset(m.key(k) for k in m.pop_mark()))
TABLE[ord("q")] = lambda m: m.memoize(m.uint(1))
TABLE[ord("r")] = lambda m: m.memoize(m.uint(4))
TABLE[ord("p")] = lambda m: m.memoize(int(m.line()))
TABLE[0x94] = lambda m: m.memoize(len(m.memo))
TABLE[ord("h")] = lambda m: m.push(m.memo[m.uint(1)])
TABLE[ord("j")] = lambda m: m.push(m.memo[m.uint(4)])
TABLE[ord("g")] = lambda m: m.push(m.memo[int(m.line())])
TABLE[ord("c")] = lambda m: m.push_global(m.line(), m.line())


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
