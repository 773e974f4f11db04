"""The direction of imports, checked over the syntax tree of every file in xmoe/, kernels/ and launch/.

TABLE gives each module or package what it may import beside itself and the standard library; the longest
matching name counts, and a module without a row is an error. An import inside a function is *lazy*: it may
use ``lazy`` as well. An import under ``if TYPE_CHECKING`` never runs, so third-party packages are free there;
xmoe's own are not, because a type from a higher layer is a dependency all the same.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {"xmoe": "xmoe", "xmoe.kernels": "kernels", "xmoe.launch": "launch"}
MAX_FILE_LINES = 450
MAX_FUNCTION_LINES = 80


@dataclass(frozen=True)
class Row:
    """What a module may import: ``third`` party, xmoe's ``own``, and inside functions ``lazy`` as well."""

    third: frozenset[str]
    own: frozenset[str]
    lazy: frozenset[str]


def row(third: str = "", own: str = "", lazy: str = "") -> Row:
    """A row from space-separated names; xmoe's stand there without the prefix."""
    own_names = frozenset(f"xmoe.{name}" for name in own.split())
    return Row(third=frozenset(third.split()), own=own_names, lazy=frozenset(lazy.split()))


LAYER_BASE = (
    "config topology layout placement links cost kernels types groups replay ops balance router_settings router "
    "permute experts dispatch sequence_shard"
)

TABLE: dict[str, Row] = {
    # no torch
    "xmoe.files": row(),
    "xmoe.config": row("pydantic"),
    "xmoe.topology": row("pydantic", "config"),
    "xmoe.layout": row("pydantic", "config"),
    "xmoe.placement": row("numpy", "topology"),
    "xmoe.links": row("", "config files"),
    "xmoe.cost": row("numpy", "topology links"),
    "xmoe.planner": row("numpy scipy", "config topology layout placement cost"),
    "xmoe.launch": row(
        "typer rich jinja2",
        "config topology links planner",
        "torch matplotlib mpi4py psutil numpy xmoe.groups xmoe.kernels xmoe.integrations xmoe.layer xmoe.link_bench "
        "xmoe.placement xmoe.training",
    ),
    # torch
    "xmoe.kernels": row("torch triton", "files"),
    "xmoe.types": row("torch"),
    "xmoe.replay": row("torch"),
    "xmoe.groups": row("torch", "config layout"),
    "xmoe.ops": row("torch", "kernels types"),
    "xmoe.link_bench": row("torch", "ops links"),
    "xmoe.balance": row("torch", "kernels ops"),
    "xmoe.router_settings": row("torch", "kernels config balance"),
    "xmoe.router": row("torch", "types kernels ops replay balance router_settings sequence_shard"),
    "xmoe.permute": row("torch", "types kernels ops config"),
    "xmoe.experts": row("torch", "types kernels ops config"),
    "xmoe.dispatch": row("torch", "types kernels ops groups placement topology links cost config replay"),
    "xmoe.layer": row("torch", LAYER_BASE),
    "xmoe.sequence_shard": row("torch", "ops"),
    "xmoe.shuffle": row("torch numpy", "types ops groups placement topology"),
    "xmoe.disagg": row("torch", LAYER_BASE + " layer"),
    "xmoe.metrics": row("torch", "types ops layer"),
    "xmoe.integrations": row(
        "torch deepspeed packaging transformers megatron",
        LAYER_BASE + " layer shuffle disagg metrics",
    ),
    # The reference model is written like a user's: it takes the layer through the public adapter.
    "xmoe.models": row("torch", "config layer integrations"),
    "xmoe.training": row(
        "torch numpy rich matplotlib",
        "config files groups metrics models integrations",
        "tensorboard tokenizers psutil safetensors",
    ),
    "xmoe.testing": row("torch numpy", "types testing_cluster"),
    "xmoe.testing_cluster": row(),
    # Public names: imports for type checkers here, by name at run time.
    "xmoe": row("", "config layer integrations"),
}

NO_TORCH = [
    f"xmoe.{name}"
    for name in ("files", "config", "topology", "layout", "placement", "links", "cost", "planner", "launch")
]
LEAVES = ["xmoe.testing", "xmoe.testing_cluster", "xmoe.planner", "xmoe.launch"]


@dataclass(frozen=True)
class Import:
    """One import; ``kind`` is "load" (runs on import of the module), "lazy" (in a function) or "typing"."""

    module: str
    target: str
    line: int
    kind: str

    def __str__(self) -> str:
        return f"{self.module}, line {self.line}, imports {self.target} ({self.kind})"


def within(name: str, package: str) -> bool:
    """Whether ``name`` is ``package`` or lies in it."""
    return name == package or name.startswith(package + ".")


def read_sources() -> dict[str, tuple[Path, str]]:
    """Every module of the package by its installed name: its path and its text."""
    sources = {}
    for package, folder in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            parts = parts[:-1] if parts[-1] == "__init__" else parts
            sources[".".join([package, *parts])] = (path, path.read_text(encoding="utf-8"))
    return sources


def find_imports(module: str, text: str, *, is_package: bool, known: set[str]) -> list[Import]:
    """Imports of one module: relative ones resolved, ``from package import module`` as ``package.module``."""
    found = []
    for node, kind in _walk(ast.parse(text), "load"):
        for target in _targets(node, module, is_package, known):
            found.append(Import(module, target, node.lineno, kind))
    return found


def _walk(node: ast.AST, kind: str) -> Iterator[tuple[ast.stmt | ast.expr, str]]:
    for child in ast.iter_child_nodes(node):
        inner = kind
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            inner = "lazy" if kind == "load" else kind
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for statement in child.body:
                yield from _walk(ast.Module([statement], []), "typing")
            for statement in child.orelse:
                yield from _walk(ast.Module([statement], []), kind)
            continue
        if isinstance(child, ast.Import | ast.ImportFrom | ast.Call):
            yield child, inner
        yield from _walk(child, inner)


def _targets(node: ast.AST, module: str, is_package: bool, known: set[str]) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.Call):
        is_import = ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__")
        first = node.args[0] if node.args else None
        literal = isinstance(first, ast.Constant) and isinstance(first.value, str)
        return [first.value] if is_import and literal else []
    assert isinstance(node, ast.ImportFrom)
    base = node.module or ""
    if node.level:
        parts = module.split(".")
        cut = len(parts) - node.level + (1 if is_package else 0)
        base = ".".join([*parts[:cut], *([node.module] if node.module else [])])
    names = [alias.name for alias in node.names if (base, alias.name) != ("xmoe", "__version__")]
    return list(dict.fromkeys(f"{base}.{name}" if f"{base}.{name}" in known else base for name in names))


def all_imports(sources: dict[str, tuple[Path, str]]) -> list[Import]:
    return [
        found
        for module, (path, text) in sources.items()
        for found in find_imports(module, text, is_package=path.name == "__init__.py", known=set(sources))
    ]


def row_name(module: str) -> str | None:
    """The longest name in TABLE that is ``module`` or holds it; the root package's row holds only itself."""
    names = [name for name in TABLE if within(module, name) and (name != "xmoe" or module == "xmoe")]
    return max(names, key=len, default=None)


def table_violations(imports: list[Import], modules: list[str]) -> list[str]:
    """Every module without a row and every import its row does not allow, as sentences."""
    wrong = [f"{module} has no row in TABLE" for module in modules if row_name(module) is None]
    for found in imports:
        name = row_name(found.module)
        if name is None or _allowed(found, name):
            continue
        allowed = TABLE[name]
        listing = ", ".join(sorted(allowed.third | allowed.own)) or "nothing"
        lazy = f"; inside functions also {', '.join(sorted(allowed.lazy))}" if allowed.lazy else ""
        wrong.append(f"{found}; {name} may import {listing}{lazy}")
    return wrong


def _allowed(found: Import, name: str) -> bool:
    top = found.target.split(".")[0]
    if top in sys.stdlib_module_names:
        return True
    if top != "xmoe" and found.kind == "typing":
        return True
    names = TABLE[name].third | TABLE[name].own | {name}
    if found.kind == "lazy":
        names |= TABLE[name].lazy
    if name == "xmoe":
        names -= {"xmoe"}
    return any(within(found.target, allowed) for allowed in names)


def load_chain(start: str, imports: list[Import], goal: str) -> list[str]:
    """The modules through which importing ``start`` loads ``goal``, parent packages included; else empty."""
    edges: dict[str, list[str]] = {}
    for found in imports:
        if found.kind == "load":
            edges.setdefault(found.module, []).append(found.target)
    queue, seen = [[start]], {start}
    while queue:
        chain = queue.pop(0)
        if within(chain[-1], goal):
            return chain
        parts = chain[-1].split(".")
        parents = [".".join(parts[:end]) for end in range(1, len(parts))]
        for target in [*edges.get(chain[-1], []), *parents]:
            if target not in seen:
                seen.add(target)
                queue.append([*chain, target])
    return []


SOURCES = read_sources()
IMPORTS = all_imports(SOURCES)


def assert_none(wrong: list[str]) -> None:
    assert not wrong, "\n" + "\n".join(wrong)


def importers_outside(target: str, home: str) -> list[str]:
    return [str(found) for found in IMPORTS if within(found.target, target) and not within(found.module, home)]


def test_every_import_is_in_the_table():
    assert_none(table_violations(IMPORTS, list(SOURCES)))


def test_only_kernels_imports_triton():
    assert_none(importers_outside("triton", "xmoe.kernels"))


def test_only_integrations_imports_deepspeed():
    assert_none(importers_outside("deepspeed", "xmoe.integrations"))


def test_torch_free_modules_load_no_torch_however_indirectly():
    free = [module for module in SOURCES if any(within(module, name) for name in NO_TORCH)]
    chains = [load_chain(module, IMPORTS, "torch") for module in ["xmoe", *free]]
    assert_none([" -> ".join(chain) for chain in chains if chain])


def test_nothing_imports_testing_planner_or_launch():
    wrong = []
    for found in IMPORTS:
        for leaf in LEAVES:
            cli = leaf == "xmoe.planner" and within(found.module, "xmoe.launch")
            tool = leaf == "xmoe.testing_cluster" and within(found.module, "xmoe.testing")
            if within(found.target, leaf) and not within(found.module, leaf) and not (cli or tool):
                wrong.append(str(found))
    assert_none(wrong)


@pytest.mark.parametrize(
    ("module", "text", "target"),
    [
        pytest.param("xmoe.config", "import torch", "torch", id="third-party"),
        pytest.param("xmoe.config", "def f():\n    import torch", "torch", id="in-a-function"),
        pytest.param("xmoe.config", "class A:\n    from torch import nn", "torch", id="in-a-class"),
        pytest.param("xmoe.ops.gather", "from ..layer import RoutedMLP", "xmoe.layer", id="parent"),
        pytest.param("xmoe.ops.gather", "from .. import layer", "xmoe.layer", id="module-from-parent"),
        pytest.param("xmoe.types", "from . import layer", "xmoe.layer", id="module-from-sibling"),
        pytest.param("xmoe.types", "from xmoe import MoE", "xmoe", id="public-name"),
        pytest.param("xmoe.training.loop", "import deepspeed.comm as d", "deepspeed.comm", id="deepspeed"),
        pytest.param("xmoe.launch.cli", "from xmoe.training import loop", "xmoe.training", id="not-lazy"),
        pytest.param("xmoe.launch.cli", "f = lambda: __import__('deepspeed')", "deepspeed", id="by-call"),
        pytest.param("xmoe.kernels.gather", "from xmoe.types import Routing", "xmoe.types", id="kernels"),
        pytest.param(
            "xmoe.ops.gather",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..layer import RoutedMLP",
            "xmoe.layer",
            id="for-typing",
        ),
        pytest.param("xmoe.launch.cli", "from launch import env", "launch", id="bare-name"),
        pytest.param("xmoe.brand_new", "", None, id="no-row"),
    ],
)
def test_a_planted_upward_import_is_found(module: str, text: str, target: str | None):
    known = {"xmoe", "xmoe.layer", "xmoe.types", "xmoe.training"}
    wrong = table_violations(find_imports(module, text, is_package=False, known=known), [module])
    assert len(wrong) == 1
    assert module in wrong[0]
    assert target is None or f"imports {target} (" in wrong[0]


@pytest.mark.parametrize(
    ("module", "text"),
    [
        (
            "xmoe.ops.gather",
            "import math\nimport torch\nfrom ..kernels import reference\nfrom ._backend import use",
        ),
        (
            "xmoe.launch.cli",
            "from xmoe import __version__\ndef f():\n    from xmoe.training import loop\n    import torch",
        ),
        ("xmoe.config", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch"),
        (
            "xmoe.integrations.deepspeed",
            "from __future__ import annotations\nimport deepspeed\nfrom .. import config",
        ),
    ],
)
def test_an_allowed_import_passes(module: str, text: str):
    known = {"xmoe", "xmoe.config", "xmoe.kernels", "xmoe.kernels.reference", "xmoe.training"}
    assert_none(table_violations(find_imports(module, text, is_package=False, known=known), [module]))


def test_an_indirect_load_of_torch_is_found():
    texts = {"xmoe": "", "xmoe.config": "from .types import Routing", "xmoe.types": "import torch.nn"}
    imports = [
        found
        for module, text in texts.items()
        for found in find_imports(module, text, is_package=module == "xmoe", known=set(texts))
    ]
    assert load_chain("xmoe.config", imports, "torch") == ["xmoe.config", "xmoe.types", "torch.nn"]


def test_files_and_functions_stay_short():
    wrong = []
    for path, text in SOURCES.values():
        name = str(path.relative_to(ROOT))
        if (lines := text.count("\n")) > MAX_FILE_LINES:
            wrong.append(f"{name} has {lines} lines, more than {MAX_FILE_LINES}: split it")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = _code_lines(node)
                if lines > MAX_FUNCTION_LINES:
                    wrong.append(f"{name}:{node.lineno}: {node.name} has {lines} lines, more than {MAX_FUNCTION_LINES}")
    assert_none(wrong)


def _code_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without its docstring."""
    assert node.end_lineno is not None
    lines = node.end_lineno - node.lineno + 1
    if ast.get_docstring(node) is not None:
        docstring = node.body[0]
        assert docstring.end_lineno is not None
        lines -= docstring.end_lineno - docstring.lineno + 1
    return lines
