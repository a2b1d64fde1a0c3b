"""Who may import whom: down only, never up, never sideways (docs/architecture.md, Layers).

Each rule is a function over one parsed module; it is applied to the whole package, and once to a
snippet that breaks it, so that a rule which went blind is noticed.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

import pytest

# A layer may import those with a smaller number. Equal numbers are siblings: not each other.
LAYERS = {
    "errors": 0,
    "types": 0,
    "events": 0,
    "reports": 1,
    "config": 1,
    "format": 2,
    "storage": 2,
    "engine": 3,
    "manager": 4,
    "torch": 5,
    "tensorflow": 5,
    "foreign": 5,
    "cli": 6,
    "testing": 6,
    "__main__": 7,
}
FRAMEWORKS = {"torch", "tensorflow", "keras", "jax", "flax"}
# Imported inside the function that needs them, wherever that is. (The modules of cli that draw with
# rich are themselves imported late; test_import_is_light holds that.)
LATE = {
    *{"fsspec", "tensorstore", "rich", "s3fs", "gcsfs", "adlfs", "boto3", "botocore"},
    *{"h5py", "safetensors", "obstore"},
    *{"prometheus_client", "opentelemetry", "tensorboard", "mlflow"},
}
DECODING = {"ml_dtypes", "msgpack", "xxhash", "zstandard"}
IMPURE = {
    *{"os", "time", "threading", "socket", "random", "secrets", "uuid", "subprocess", "tempfile"},
    *{"shutil", "asyncio", "concurrent", "multiprocessing", "urllib", "http", "ssl", "mmap"},
    *{"_thread", "queue", "signal", "logging", "platform", "getpass"},
}
CLOCKS = {"now", "utcnow", "today"}
THREAD_MAKERS = {"Thread", "Timer", "ThreadPoolExecutor", "ProcessPoolExecutor", "start_new_thread"}
THREAD_MODULES = {"multiprocessing", "_thread", "asyncio"}
# testing: whether a backend bears several threads is found out with several threads.
THREAD_HOMES = ("ckptfmt.engine.pipeline", "ckptfmt.engine.background", "ckptfmt.testing")


def layer_of(module: str) -> str:
    """`ckptfmt.engine.plan` -> `engine`; the package's own `__init__` -> ``."""
    return module.split(".")[1] if "." in module else ""


def for_types(tree: ast.AST) -> set[int]:
    """Lines under `if TYPE_CHECKING:`, which no process ever runs."""
    return {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }


def imports(tree: ast.AST) -> Iterator[tuple[str, str, int, bool]]:
    """(module, name or "", line, at module level) of each import statement."""
    inside = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for node in ast.walk(function)
    }
    for node in ast.walk(tree):
        top = id(node) not in inside
        if isinstance(node, ast.Import):
            yield from ((alias.name, "", node.lineno, top) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            source = "." * node.level + (node.module or "")
            yield from ((source, alias.name, node.lineno, top) for alias in node.names)


def exports(tree: ast.Module) -> set[str]:
    """The strings of a package's `__all__`."""
    return {
        item.value
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        for item in ast.walk(node.value)
        if isinstance(item, ast.Constant) and isinstance(item.value, str)
    }


def broken_layers(module: str, tree: ast.Module, public: Mapping[str, set[str]]) -> list[str]:
    """Imports within ckptfmt that go up or sideways, or reach past a package's `__init__`.

    `public`: every module of the package -> what its `__all__` lists.
    """
    mine = layer_of(module)
    found = []
    for source, name, line, _ in imports(tree):
        if source.startswith("."):
            found.append(f"{module}:{line}: relative import; spell it out from ckptfmt down")
            continue
        if source.split(".")[0] != "ckptfmt":
            continue
        # A public name may be a module's too: `from ckptfmt.engine import api`.
        inner = f"{source}.{name}" in public and name not in public.get(source, ())
        target = f"{source}.{name}" if inner else source
        theirs = layer_of(target)
        if theirs == mine:
            continue
        if not theirs:
            if name != "__version__" and LAYERS[mine] < LAYERS["cli"]:
                found.append(f"{module}:{line}: imports the package's public face, which is above")
        elif theirs not in LAYERS:
            found.append(f"{module}:{line}: {theirs} has no place among the layers")
        elif mine and LAYERS[theirs] >= LAYERS[mine]:
            found.append(f"{module}:{line}: {mine} imports {theirs}: up or sideways")
        elif mine and target.count(".") > 1:
            found.append(f"{module}:{line}: import from ckptfmt.{theirs}, not from {target}")
    return list(dict.fromkeys(found))


def broken_outside(module: str, tree: ast.Module) -> list[str]:
    """Imports of other people's packages in the wrong place."""
    mine = layer_of(module)
    unrun = for_types(tree)
    found = []
    for source, _, line, top in imports(tree):
        package = source.split(".")[0]
        at_home = mine == package or (mine, package) == ("tensorflow", "keras")
        if package in FRAMEWORKS and not at_home:
            if mine not in {"foreign", "testing"}:
                found.append(f"{module}:{line}: {mine or 'ckptfmt'} must not know {package}")
            elif top:
                found.append(f"{module}:{line}: import {package} inside the function that needs it")
        late = package in LATE and not (mine == "cli" and package == "rich")
        if late and top and line not in unrun:
            found.append(f"{module}:{line}: import {package} inside the function that needs it")
        if package in DECODING and mine == "storage":
            found.append(f"{module}:{line}: storage moves bytes and decodes nothing: {package}")
        if mine in {"", "errors", "types", "events"} and package == "numpy" and top:
            found.append(f"{module}:{line}: imported by everyone, so it must not load numpy")
    return found


def broken_purity(module: str, tree: ast.Module) -> list[str]:
    """What format must not do: open(), clock, thread, environment, network."""
    if layer_of(module) != "format":
        return []
    found = [
        f"{module}:{line}: format is pure and does not import {source}"
        for source, name, line, _ in imports(tree)
        if source.split(".")[0] in IMPURE or "ckptfmt.config" in (source, f"{source}.{name}")
    ]
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id in {"open", "print", "input"}:
                found.append(f"{module}:{node.lineno}: format does not {node.func.id}()")
            if isinstance(node.func, ast.Attribute) and node.func.attr in CLOCKS:
                found.append(f"{module}:{node.lineno}: format has no clock: {node.func.attr}()")
    return found


def broken_threads(module: str, tree: ast.Module) -> list[str]:
    """Threads and processes made outside the pipeline and the background."""
    if module.startswith(THREAD_HOMES):
        return []
    found = [
        f"{module}:{line}: {source} belongs in the pipeline"
        for source, _, line, _ in imports(tree)
        if source.split(".")[0] in THREAD_MODULES
    ]
    for node in ast.walk(tree):
        name = getattr(node, "attr", None) or getattr(node, "id", None)
        if isinstance(node, ast.Attribute | ast.Name) and name in THREAD_MAKERS:
            found.append(f"{module}:{node.lineno}: {name}: threads are made in the pipeline only")
    return found


@pytest.fixture(scope="session")
def public(modules: dict[str, ast.Module]) -> dict[str, set[str]]:
    return {name: exports(tree) for name, tree in modules.items()}


def test_layers_import_downwards_only(
    modules: dict[str, ast.Module], public: dict[str, set[str]]
) -> None:
    assert [p for m, tree in modules.items() for p in broken_layers(m, tree, public)] == []


def test_frameworks_and_clients_are_imported_where_they_belong(
    modules: dict[str, ast.Module],
) -> None:
    assert [p for m, tree in modules.items() for p in broken_outside(m, tree)] == []


def test_format_is_pure(modules: dict[str, ast.Module]) -> None:
    assert [p for m, tree in modules.items() for p in broken_purity(m, tree)] == []


def test_threads_are_made_in_the_pipeline_only(modules: dict[str, ast.Module]) -> None:
    assert [p for m, tree in modules.items() for p in broken_threads(m, tree)] == []


def test_every_module_has_a_layer(modules: dict[str, ast.Module]) -> None:
    assert {layer_of(m) for m in modules} - {""} <= set(LAYERS)


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("ckptfmt.format.index", "from ckptfmt.engine import Store"),
        ("ckptfmt.format.index", "from ckptfmt.storage import open_backend"),
        ("ckptfmt.storage.local", "from ckptfmt import format"),
        ("ckptfmt.engine.save", "def f():\n    from ckptfmt.torch import ADAPTER"),
        ("ckptfmt.engine.save", "from ckptfmt.format.index import parse_index"),
        ("ckptfmt.engine.save", "from ckptfmt import save"),
        ("ckptfmt.engine.save", "from .plan import plan_save"),
        ("ckptfmt.torch.adapter", "import ckptfmt.tensorflow"),
        ("ckptfmt.torch.adapter", "from ckptfmt.engine.adapter import Adapter"),
        ("ckptfmt.cli.main", "import ckptfmt.helpers2"),
        ("ckptfmt.errors", "from ckptfmt.types import Key"),
        ("ckptfmt.torch.adapter", "from ckptfmt.engine import adapter"),
    ],
)
def test_a_broken_layer_is_seen(module: str, text: str, public: dict[str, set[str]]) -> None:
    assert len(broken_layers(module, ast.parse(text), public)) == 1


def test_a_public_function_may_share_its_name_with_a_module(public: dict[str, set[str]]) -> None:
    tree = ast.parse("from ckptfmt.engine import api, flatten")
    assert "ckptfmt.engine.api" in public
    assert broken_layers("ckptfmt.torch", tree, public) == []


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("ckptfmt.engine.tree", "def f():\n    import torch"),
        ("ckptfmt.foreign.pt", "import torch"),
        ("ckptfmt.torch.adapter", "import tensorflow as tf"),
        ("ckptfmt.storage.via_fsspec", "if True:\n    import fsspec"),
        ("ckptfmt.cli.ls", "import fsspec"),
        ("ckptfmt.storage.local", "def f():\n    import msgpack"),
        ("ckptfmt.types", "import numpy as np"),
    ],
)
def test_a_misplaced_import_is_seen(module: str, text: str) -> None:
    assert len(broken_outside(module, ast.parse(text))) == 1


@pytest.mark.parametrize(
    "text",
    [
        "import os",
        "from time import monotonic",
        "def f(p):\n    return open(p)",
        "import datetime\nx = datetime.datetime.now()",
        "import threading",
        "from ckptfmt import config",
    ],
)
def test_an_impure_format_is_seen(text: str) -> None:
    assert len(broken_purity("ckptfmt.format.index", ast.parse(text))) == 1


@pytest.mark.parametrize(
    "text",
    [
        "import threading\nt = threading.Thread(target=f)",
        "def f():\n    return ThreadPoolExecutor(2)",
        "import multiprocessing",
    ],
)
def test_a_stray_thread_is_seen(text: str) -> None:
    assert len(broken_threads("ckptfmt.engine.write", ast.parse(text))) == 1
    assert broken_threads("ckptfmt.engine.pipeline", ast.parse(text)) == []
