"""Pickles are data: nothing is imported or called, and nothing grows beyond what the bytes allow."""

from __future__ import annotations

import collections
import datetime
import pathlib
import pickle
import pickletools
import tracemalloc
from typing import Any

import pytest

from ckptfmt import CorruptError, UnsupportedError
from ckptfmt.foreign.pickle_builders import PLAIN_BUILDERS
from ckptfmt.foreign.pickle_machine import Global, PickleMachine, Record
from ckptfmt.foreign.pickle_tree import TreeMaker


def machine(data: bytes) -> PickleMachine:
    return PickleMachine(data, 0, len(data), where="x", reason="test", builders=PLAIN_BUILDERS)


def tree(data: bytes) -> Any:
    made = machine(data)
    obj = made.load()
    return TreeMaker(made.states, where="x", reason="test", nbytes=len(data)).make(obj)


PLAIN: list[Any] = [
    [0, 255, 256, 65536, -1, 1 << 31, 2**63, 2**2048, -(2**70)],
    [1.5, float("inf"), True, False, None, complex(1, -0.0)],
    ["", "a\nb\\é☃\U0001f600", "x" * 70000, b"", b"\0\xff", b"y" * 300, bytearray(b"z")],
    [{((1, ("a",)), ()): 1, (b"x",) * 64: 2}],
    [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), [], {}, set(), frozenset()],
    [{1, 2}, frozenset("ab"), {(1, "a"): {b"k": None}, None: 1, 2.5: [], True: 0}],
    [collections.OrderedDict(b=1, a=2), collections.defaultdict(list, {1: [2]})],
    [collections.defaultdict(kind) for kind in (int, str, float, dict, set, None)],
    [collections.Counter("aab"), collections.deque([1, 2], 5), range(1, 9, 2), slice(None, 3)],
    [datetime.datetime(2020, 2, 3, 4, 5, 6, 7), datetime.date(2021, 1, 1)],
    [datetime.datetime(2020, 2, 3, tzinfo=datetime.UTC), datetime.timedelta(1, 2, 3)],
    [pathlib.PurePosixPath("/a/b"), pathlib.PureWindowsPath("c:/x"), list(range(3000))],
]


@pytest.mark.parametrize("protocol", range(6))
def test_plain_data_is_what_python_reads(protocol: int) -> None:
    for obj in PLAIN:
        data = pickle.dumps(obj, protocol)
        made = machine(data)
        assert repr(made.load()) == repr(obj)
        assert made.position == len(data)


class Odd:
    def __init__(self) -> None:
        self.a = [1]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return print, ("called",), {"s": 1}, iter([1, 2]), iter([("k", "v")])


def test_a_call_becomes_a_record(capsys: pytest.CaptureFixture[str]) -> None:
    for protocol in range(2, 6):
        made = machine(pickle.dumps(Odd(), protocol)).load()
        assert isinstance(made, Record)
        assert made.name.endswith(".print")
        assert (made.args, made.state, made.items) == (("called",), {"s": 1}, [1, 2, ("k", "v")])
    assert capsys.readouterr().out == ""
    assert tree(pickle.dumps([Odd()], 4)) == [
        {
            "class": "builtins.print",
            "args": ["called"],
            "state": {"s": 1},
            "items": [1, 2, ("k", "v")],
        }
    ]


CALLS = {
    "reduce": b"cos\nsystem\n(X\x04\0\0\0exit\x85R.".replace(b"(X", b"X"),
    "newobj": b"\x80\x02cos\nsystem\nX\x04\0\0\0exit\x85\x81.",
    "inst": b"(X\x04\0\0\0exitios\nsystem\n.",
    "obj": b"(cos\nsystem\nX\x04\0\0\0exito.",
    "newobj_ex": b"\x80\x04cos\nsystem\nX\x04\0\0\0exit\x85}X\x01\0\0\0kK\1s\x92.",
    "build": b"cos\nsystem\n)R}X\x01\0\0\0kK\1sb.",
    "call of a result": b"cbuiltins\ngetattr\ncos\nsystem\n\x85RX\x04\0\0\0exit\x85R.",
}


@pytest.mark.parametrize("how", CALLS)
def test_no_way_to_call_calls(how: str) -> None:
    made = machine(CALLS[how]).load()
    assert isinstance(made, Record)
    assert "system" in made.name or "getattr" in made.name


def test_a_global_is_text() -> None:
    made = machine(b"cos\nsystem\n.").load()
    assert made == Global("os.system")
    assert tree(b"cos\nsystem\n.") == {"class": "os.system"}


def test_several_pickles_follow_each_other() -> None:
    made = machine(pickle.dumps(1) + pickle.dumps([2], 0))
    assert [made.load(), made.load()] == [1, [2]]


BROKEN = {
    "empty": b"",
    "no stop": b"K\1",
    "stack underflow": b"R.",
    "no object": b".",
    "two objects": b"K\1K\2.",
    "a mark as an object": b"(.",
    "a mark as an item": b"](a.",
    "a mark in a tuple": b"(\x85.",
    "no mark": b"K\1t.",
    "unknown opcode": b"\xff.",
    "extension": b"\x82\1.",
    "buffer": b"\x97.",
    "unknown memo": b"h\7.",
    "string beyond the end": b"X\xff\xff\xff\xffab.",
    "huge string": b"\x8d\xff\xff\xff\xff\xff\xff\xff\x7fab.",
    "huge int": b"\x8b\xff\xff\xff\x7f\1.",
    "negative length": b"\x8b\xff\xff\xff\xff\1.",
    "frame beyond the end": b"\x80\x04\x95\xff\xff\xff\xff\0\0\0\0N.",
    "invalid text": b"X\x02\0\0\0\xff\xff.",
    "protocol": b"\x80\x63N.",
    "odd items": b"}(K\1u.",
    "items for a number": b"K\1K\2K\3s.",
    "append to a tuple": b")K\1a.",
    "add to a list": b"](K\1\x90.",
    "state of a list": b"]}b.",
    "call of a number": b"K\1)R.",
    "arguments no tuple": b"cos\nsystem\n]R.",
    "name of numbers": b"K\1K\2\x93.",
    "unterminated name": b"cos",
    "control in a name": b"co\x07s\nx\n.",
    "persistent": b"K\1Q.",
    "bad number": b"Ix\n.",
    "long number": b"I" + b"9" * 5000 + b"\n.",
    "set of unhashables": b"c__builtin__\nset\n](]e\x85R.",
    "pairs that are none": b"ccollections\nOrderedDict\n](K\1e\x85R.",
    "datetime of another length": b"cdatetime\ndatetime\nC\x03abc\x85R.",
    "factory that is a number": b"ccollections\ndefaultdict\nK\1\x85R.",
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_pickle_is_corrupt(what: str) -> None:
    with pytest.raises(CorruptError, match=r"x, byte \d+"):
        machine(BROKEN[what]).load()


@pytest.mark.parametrize("protocol", range(6))
def test_a_dict_whose_default_is_made_by_code_is_opaque(protocol: int) -> None:
    data = pickle.dumps(collections.defaultdict(Odd, {"a": [1]}), protocol)
    assert tree(data) == {
        "class": "collections.defaultdict",
        "args": [{"class": f"{Odd.__module__}.Odd"}],
        "items": [("a", [1])],
    }


KEYS = {
    "a list": b"}]K\1s.",
    "a name": b"}cos\nsystem\nK\1s.",
    "a call": b"}cos\nsystem\n)RK\1s.",
    "a large int": b"}" + pickle.dumps(1 << 80, 2)[2:-1] + b"K\1s.",
    "a tuple of 65": b"}(" + b"N" * 65 + b"tK\1s.",
    "a short pickle of an endless tuple": b"})q\0" + b"0h\0h\0\x86q\0" * 40 + b"K\1s.",
    "a list in a tuple": b"})]\x86K\1s.",
    "a complex": b"}c__builtin__\ncomplex\nG?\xf0\0\0\0\0\0\0G?\xf0\0\0\0\0\0\0\x86RK\1s.",
}


@pytest.mark.parametrize("what", KEYS)
def test_a_key_whose_hash_could_hurt_is_refused(what: str) -> None:
    with pytest.raises(UnsupportedError, match="a key that is no text, number or short tuple"):
        machine(KEYS[what]).load()


def test_a_tuple_nested_deeper_than_the_c_stack_is_no_key() -> None:
    deep = b"}" + b")" + b"\x85" * 100_000 + b"K\1s."
    with pytest.raises(UnsupportedError):
        machine(deep).load()


def test_many_tuples_of_one_hash_are_no_keys() -> None:
    """hash(-1) == hash(-2): tuples of the two collide, and a dict of n takes n * n steps."""
    keys = [tuple(-1 - (n >> bit & 1) for bit in range(13)) for n in range(5000)]
    with pytest.raises(UnsupportedError):
        machine(pickle.dumps(dict.fromkeys(keys), 2)).load()
    with pytest.raises(CorruptError, match="too many tuples"):
        machine(pickle.dumps(set(keys), 2)).load()


def test_little_bytes_make_little_memory() -> None:
    for flood in (b"]" * 2_000_000, b"]" + b"]a" * 1_500_000):
        tracemalloc.start()
        with pytest.raises(CorruptError):
            machine(flood).load()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 200 << 20


SPARSE = {
    "names that a pickle never resolves": b"](" + b"c%d\nb\n" * 70_000 % (*range(70_000),) + b"e.",
    "a set": b"\x8f(" + b"J%b" * 800_000 % tuple(n.to_bytes(4, "little") for n in range(800_000)),
    "lists": b"](" + b"]" * 1_000_000 + b"e.",
}


@pytest.mark.parametrize("what", SPARSE)
def test_what_carries_nothing_is_counted_by_the_bytes_of_the_file(what: str) -> None:
    with pytest.raises(CorruptError, match=r"too many (objects|names)"):
        machine(SPARSE[what] + (b"\x90." if what == "a set" else b"")).load()


def test_numbers_of_one_width_are_the_same_numbers_taken_at_once() -> None:
    floats = [0.5 * n for n in range(600)] + [float("inf"), -0.0]
    numbers = [*range(1300), *range(-70_000, -69_400), *range(70_000, 70_600), *floats]
    for protocol in range(6):
        for values in (numbers, numbers[::-1], [*floats, True, False, None, None, ()] * 2):
            data = pickle.dumps([values, tuple(values)], protocol)
            assert repr(machine(data).load()) == repr([values, tuple(values)])
            for cut in (len(data) - 1, len(data) - 9, len(data) // 3):
                with pytest.raises(CorruptError):
                    machine(data[:cut]).load()


def test_a_long_training_log_and_a_vocabulary_are_no_attack() -> None:
    log = [{"step": n, "loss": n * 0.1, "pair": (n, n + 1)} for n in range(30_000)]
    state = {
        "log": log,
        "order": list(range(300_000)),
        "vocab": {f"t{n}": n for n in range(50_000)},
    }
    assert tree(pickle.dumps(state, 2)) == state


def test_a_long_key_above_many_short_ones_is_refused() -> None:
    """Of 500 kB in each of a hundred thousand names a file of 1 MB would make 50 GB."""
    below: dict[str, Any] = {f"{n:05d}": {} for n in range(60_000)}
    with pytest.raises(UnsupportedError, match="far larger than its pickle"):
        tree(pickle.dumps({"k" * 500_000: below}, 2))


def test_calls_are_counted() -> None:
    flood = b"]q\0cos\nsystem\nq\1)q\2" + b"000" + b"h\0" + b"h\1h\2Ra" * 300_000 + b"."
    with pytest.raises(CorruptError, match="too many objects"):
        machine(flood).load()


def test_a_tree_that_shares_itself_endlessly_is_refused() -> None:
    laughs: Any = ["ha"]
    for _ in range(60):
        laughs = [laughs, laughs]
    with pytest.raises(UnsupportedError, match="far larger than its pickle"):
        tree(pickle.dumps(laughs, 2))
    large = "x" * (1 << 20)
    with pytest.raises(UnsupportedError, match="far larger than its pickle"):
        tree(pickle.dumps([large] * 100_000, 2))


def test_a_tree_in_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(UnsupportedError, match="in itself"):
        tree(pickle.dumps(loop, 2))
    with pytest.raises(UnsupportedError, match="nested deeper"):
        tree(b"]" * 500 + b"a" * 499 + b".")


def test_the_opcodes_are_pythons() -> None:
    """Every opcode of Python's but those that lead out of the pickle."""
    from ckptfmt.foreign.pickle_opcodes import STOP, TABLE

    mine = {chr(code) for code, step in enumerate(TABLE) if step is not None} | {chr(STOP)}
    theirs = {opcode.code: opcode.name for opcode in pickletools.opcodes}
    assert mine <= set(theirs)
    left_out = {theirs[code] for code in set(theirs) - mine}
    assert left_out == {"EXT1", "EXT2", "EXT4", "NEXT_BUFFER", "READONLY_BUFFER"}
