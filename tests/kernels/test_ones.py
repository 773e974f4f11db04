"""Kernels compile where integer arguments are 1, which Triton turns into constants; the interpreter does not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from launcher_cases import CASES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
ARCHES = ["gfx90a", "sm_90"]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], dict[str, Any]]:
    """What happened to each case on each architecture."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    found = {}
    script = Path(__file__).with_name("compile_ones.py")
    run = subprocess.run(
        [sys.executable, str(script), *ARCHES], env=environment, capture_output=True, text=True, check=False
    )
    for line in run.stdout.splitlines():
        result = json.loads(line)
        found[result["arch"], result["case"]] = result
    assert run.returncode == 0, run.stderr
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_launch_whose_sizes_are_1_compiles(case: Any, compiled: dict[tuple[str, str], dict[str, Any]]):
    (result,) = [compiled[arch, case.name] for arch in ARCHES if (arch, case.name) in compiled]
    assert result["error"] is None, result["error"]
    assert tuple(dict.fromkeys(result["kernels"])) == case.kernels


@pytest.mark.parametrize("arch", ARCHES)
def test_a_kernel_that_takes_a_1_for_a_tensor_is_found(arch: str, compiled: dict[tuple[str, str], dict[str, Any]]):
    result = compiled[arch, "planted"]
    assert result["kernels"] == ["_planted_kernel"]
    assert "size.to(tl.int64)" in result["error"]
