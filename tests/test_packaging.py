"""What is installed: the folder mapping, the data files, and everything that must work without torch.

Every check runs in a fresh interpreter, isolated from this clone: that of this environment, or the one which
XMOE_TEST_PYTHON names. So CI can point the same checks at an environment that holds only the wheel.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PYTHON = os.environ.get("XMOE_TEST_PYTHON", sys.executable)

BLOCK_TORCH = """
import sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "deepspeed", "triton"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NoTorch())
"""


def run_python(code: str, cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs ``code`` with neither ``cwd`` nor PYTHONPATH on sys.path."""
    command = [PYTHON, "-I", "-c", code, *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=100, check=False)


def output_of(code: str, cwd: Path, *arguments: str) -> str:
    result = run_python(code, cwd, *arguments)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_three_folders_are_one_package(tmp_path: Path):
    code = """
import importlib.util, json
names = ["xmoe", "xmoe.config", "xmoe.kernels", "xmoe.kernels.reference", "xmoe.launch", "xmoe.launch.cli",
         "kernels", "launch"]
print(json.dumps({name: importlib.util.find_spec(name) is not None for name in names}))
"""
    found = json.loads(output_of(code, tmp_path))
    leaked = [name for name in ("kernels", "launch") if found.pop(name)]
    assert all(found.values()), found
    assert not leaked


def test_data_files_are_installed(tmp_path: Path):
    code = """
import json
from importlib.resources import files
configs = {f.name: json.loads(f.read_text()) for f in files("xmoe.launch").joinpath("configs").iterdir()
           if f.name.endswith(".json")}
print(json.dumps({"configs": configs, "typed": files("xmoe").joinpath("py.typed").is_file()}))
"""
    found = json.loads(output_of(code, tmp_path))
    assert "moe_cpu_small.json" in found["configs"]
    assert all("xmoe" in config for config in found["configs"].values())
    assert found["typed"]


@pytest.mark.parametrize("module", ["xmoe", "xmoe.config", "xmoe.launch", "xmoe.launch.cli", "xmoe.kernels"])
def test_import_loads_neither_torch_nor_deepspeed(module: str, tmp_path: Path):
    code = f"import sys, {module}\nprint([m for m in ('torch', 'deepspeed', 'triton') if m in sys.modules])"
    assert output_of(code, tmp_path).strip() == "[]"


def test_version_of_the_package_is_that_of_the_distribution(tmp_path: Path):
    code = "import importlib.metadata, xmoe\nprint(importlib.metadata.version('xmoe'), xmoe.__version__)"
    distribution, package = output_of(code, tmp_path).split()
    assert distribution == package


def test_torch_is_no_requirement(tmp_path: Path):
    code = "import importlib.metadata, json\nprint(json.dumps(importlib.metadata.requires('xmoe')))"
    requirements = json.loads(output_of(code, tmp_path))
    assert not [line for line in requirements if line.startswith("torch")]
    hard = [line.split(">=")[0].lower() for line in requirements if "extra ==" not in line]
    assert sorted(hard) == ["jinja2", "numpy", "pydantic", "rich", "typer"]


def test_schema_is_printed_without_torch(tmp_path: Path):
    code = BLOCK_TORCH + "sys.argv[0] = 'xmoe'\nfrom xmoe.launch.cli import main\nmain()"
    schema = json.loads(output_of(code, tmp_path, "config", "--schema"))
    assert set(schema["properties"]) >= {"xmoe", "model", "data", "run"}


def test_console_script_prints_the_schema(tmp_path: Path):
    command = [str(Path(PYTHON).parent / "xmoe"), "config", "--schema"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert result.returncode == 0, result.stderr
    assert set(json.loads(result.stdout)["properties"]) >= {"xmoe", "model", "data", "run"}


@pytest.mark.parametrize("name", ["MoE", "initialize", "RoutedMLP"])
def test_without_torch_a_public_name_says_what_to_install(name: str, tmp_path: Path):
    result = run_python(BLOCK_TORCH + f"from xmoe import {name}", tmp_path)
    assert result.returncode != 0
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: ")
    assert "pip install torch" in last


def test_an_unknown_public_name_is_an_attribute_error(tmp_path: Path):
    result = run_python("import xmoe\nxmoe.no_such_name", tmp_path)
    assert "AttributeError" in result.stderr
    assert "no_such_name" in result.stderr
