"""Compiles cases of the report, and prints one JSON line for each row. tests/kernels/test_report.py starts it.

Standard input holds a JSON list of objects with ``case``, ``arch`` and ``dtype``. With ``op`` as well the default of
that kernel is forced with ``changes`` to it, which must be one of the search's candidates if ``candidate`` is true.

TRITON_INTERPRET must not be set.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Mapping
from typing import Any

import torch

from xmoe.kernels.report import Row, Task, over_processes, run_task, violations
from xmoe.kernels.tuning import Config, forcing
from xmoe.kernels.tuning_search import candidates


def compile_one(wanted: Mapping[str, Any]) -> list[dict[str, Any]]:
    task = Task(case=wanted["case"], arch=wanted["arch"], dtype=wanted["dtype"])
    forced = forcing({wanted["op"]: changed(**wanted)}) if "op" in wanted else contextlib.nullcontext()
    with forced:
        return [as_dict(row) for row in run_task(task)]


def changed(*, op: str, arch: str, dtype: str, changes: Mapping[str, Any], candidate: bool, **_others: Any) -> Config:
    default, *others = candidates(op, arch=arch, dtype=getattr(torch, dtype))
    wanted = dataclasses.replace(
        default,
        blocks={**default.blocks, **changes.get("blocks", {})},
        **{name: value for name, value in changes.items() if name != "blocks"},
    )
    assert not candidate or wanted in others
    return wanted


def as_dict(row: Row) -> dict[str, Any]:
    return {**dataclasses.asdict(row), "mfma_share": row.mfma_share, "violations": violations(row)}


if __name__ == "__main__":
    for _wanted, rows, died in over_processes(compile_one, json.load(sys.stdin), jobs=2):
        assert not died
        for row in rows:
            print(json.dumps(row), flush=True)
