"""The house keeps its own rules: floors, torch-free rooms, public names, lengths."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import pagemill

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "pagemill"
FLOORS = {
    "core": 0,
    "cache": 1,
    "tiers": 2,
    "sched": 2,
    "kernels": 2,
    "models": 3,
    "runtime": 4,
    "engine": 5,
    "sim": 6,
    "bench": 7,
    "server": 7,
    "cli": 8,
}
NO_TORCH = (
    "core",
    "cache",
    "tiers",
    "sched",
    "engine/loop.py",
    "sim",
    "bench",
    "cli",
    "models/tokenizer.py",
    "models/template.py",
    "models/config.py",
    "models/gguf.py",
    "models/gguf_tokenizer.py",
    "models/home.py",
    "bench/explain",
    "server/kv_",
)
PURE_ROOMS = ("core", "cache", "tiers", "sched")
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_COLUMNS = 100
BANNED_NAMES = {"cached_len", "page_table", "tree_cache", "swap_out", "swap_in", "n_blocks"}


def python_files() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def name_of(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


def imports(path: Path) -> Iterator[str]:
    yield from imports_of(path.read_text(encoding="utf-8"), path)


def imports_of(source: str, path: Path) -> Iterator[str]:
    """Those inside functions too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module and node.level == 0, f"{path}: imports name their room in full"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", python_files(), ids=name_of)
def test_a_room_imports_only_lower_floors(path: Path) -> None:
    room = path.relative_to(SOURCE).parts[0]
    if room not in FLOORS:
        assert path.parent == SOURCE, f"{room} is no room of the house"
        return
    for name in imports(path):
        parts = name.split(".")
        if parts[0] == "pagemill" and len(parts) > 1 and parts[1] in FLOORS and parts[1] != room:
            assert FLOORS[parts[1]] < FLOORS[room], f"{name_of(path)} looks up to {name}"


@pytest.mark.parametrize("path", python_files(), ids=name_of)
def test_rooms_without_torch_never_import_it(path: Path) -> None:
    if name_of(path).startswith(NO_TORCH):
        assert not names_torch(path.read_text(encoding="utf-8"), path)


def names_torch(source: str, path: Path) -> bool:
    return any(name.split(".")[0] == "torch" for name in imports_of(source, path))


@pytest.mark.parametrize("line", ["import torch", "from torch import nn", "import torch.cpu as c"])
def test_an_import_of_torch_inside_a_function_is_noticed(line: str) -> None:
    """Negative control."""
    assert names_torch(f"def f():\n    {line}\n", Path("x.py"))
    assert not names_torch("def f():\n    import torchless\n", Path("x.py"))


def test_the_library_loads_without_torch() -> None:
    """Not even indirectly: importing every torch-free room leaves torch out of the process."""
    modules = [
        "pagemill." + name_of(path).removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for path in python_files()
        if name_of(path).startswith(NO_TORCH)
    ]
    code = f"import sys, importlib\nfor m in {modules!r}: importlib.import_module(m)\n"
    code += "assert 'torch' not in sys.modules, 'torch was imported'"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("path", python_files(), ids=name_of)
def test_pure_rooms_ask_nothing_of_the_world(path: Path) -> None:
    """No time, no chance, no interpreter hash, no order of a set, in core, cache, tiers, sched."""
    room = path.relative_to(SOURCE).parts[0]
    if room not in PURE_ROOMS or name_of(path) in ("core/clock.py", "core/random.py"):
        return
    assert not {"time", "random", "secrets", "datetime"} & set(imports(path))
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id != "hash", f"line {node.lineno}: the interpreter's hash"
        if isinstance(node, ast.For | ast.comprehension):
            assert not _is_set(node.iter), f"line {node.iter.lineno}: order of a set"


def _is_set(node: ast.expr) -> bool:
    called = node.func if isinstance(node, ast.Call) else None
    is_call = isinstance(called, ast.Name) and called.id in ("set", "frozenset")
    return is_call or isinstance(node, ast.Set | ast.SetComp)


def test_public_names_are_listed_sorted_and_there() -> None:
    assert list(pagemill.__all__) == sorted(pagemill.__all__)
    for name in pagemill.__all__:
        assert hasattr(pagemill, name)


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def all_sources() -> list[Path]:
    compiled = [p for p in (ROOT / "csrc").rglob("*") if p.suffix in (".cpp", ".hpp")]
    return python_files() + sorted(compiled)


def short(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", all_sources(), ids=short)
def test_files_are_short_and_narrow(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= MAX_FILE_LINES
    wide = [i for i, line in enumerate(lines, 1) if len(line) > MAX_COLUMNS]
    assert not wide, f"lines over {MAX_COLUMNS} columns: {wide}"


@pytest.mark.parametrize("path", python_files(), ids=name_of)
def test_functions_are_short(path: Path) -> None:
    for node in functions(path):
        length = (node.end_lineno or node.lineno) - node.lineno + 1
        assert length <= MAX_FUNCTION_LINES, f"{node.name} has {length} lines"


@pytest.mark.parametrize("path", python_files(), ids=name_of)
def test_names_are_words_of_the_house(path: Path) -> None:
    """Functions, arguments, variables and attributes."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = {getattr(node, field, None) for field in ("name", "arg", "id", "attr")}
        assert not BANNED_NAMES & names, f"{names & BANNED_NAMES} is not a word of the house"


@pytest.mark.parametrize("path", python_files(), ids=name_of)
def test_every_module_and_class_says_what_it_is(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert ast.get_docstring(tree), "the module has no docstring"
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            bare = len(node.body) <= 1 or all(isinstance(n, ast.AnnAssign) for n in node.body)
            assert ast.get_docstring(node) or bare, f"{node.name} has no docstring"


MUTATORS = {"append", "add", "update", "setdefault", "pop", "insert", "extend", "remove", "clear"}


def state_changes(source: str) -> Iterator[str]:
    """Where names of a module's top level are rebound or changed below it."""
    tree = ast.parse(source)
    targets = [t for n in tree.body if isinstance(n, ast.Assign) for t in n.targets]
    targets += [n.target for n in tree.body if isinstance(n, ast.AnnAssign)]
    names = {target.id for target in targets if isinstance(target, ast.Name)}

    def is_global(node: ast.expr) -> bool:
        return isinstance(node, ast.Name) and node.id in names

    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            yield f"line {node.lineno}: global"
        elif isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            if is_global(node.value):
                yield f"line {node.lineno}: an item is set or deleted"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in MUTATORS and is_global(node.func.value):
                yield f"line {node.lineno}: {node.func.attr}"


@pytest.mark.parametrize("path", python_files(), ids=name_of)
def test_no_module_keeps_mutable_state(path: Path) -> None:
    """Two engines live in one process: no list, dict or set is filled at module level later."""
    assert not list(state_changes(path.read_text(encoding="utf-8")))


@pytest.mark.parametrize(
    "change", ["K[1] = 2", "del K[1]", "K.update(a=1)", "K.setdefault(1, 2)", "global K; K = 3"]
)
def test_mutable_state_is_noticed(change: str) -> None:
    """Negative control."""
    assert list(state_changes(f"K = {{}}\ndef f():\n    {change}\n"))
    assert not list(state_changes("K = {}\ndef f(K2):\n    K2[1] = K.get(1)\n"))
