"""runs/NAME/metrics.jsonl: one JSON object a line, flushed as it is written.

``kind`` says what a line is:

    train        one optimizer step: ``step``, ``loss_bits_per_byte``, ``loss_bits_per_token``, speeds, ``load_cv``, ...
    validation   ``step``, ``val_bits_per_byte``, ``val_bits_per_token``
    expert_load  ``step``, ``first_step``, ``layer``, ``selected``: slots per logical expert in steps first_step to step
    dispatch     ``step``, ``first_step``, ``layer``, and of steps first_step to step over all ranks:
                 ``to_self_rows``, ``inside_node_rows``, ``between_nodes_rows``: rows of dispatch in forward by link
                 ``to_self_bytes``, ``inside_node_bytes``, ``between_nodes_bytes``: both ways, forward and backward
                 ``redundancy``: share of the rows between nodes that one for each expert would be and was not sent
                 ``busiest_receiver``: rows that each step's busiest rank received, over the ranks' mean
                 with "stage_times" on, ``stage_s``: seconds a step by stage, mean over the ranks, and
                 ``slowest_stage_s``: the same of each step's slowest rank; ``xmoe.metrics.LayerLoad`` has the stages
    baseline     ``unigram_bits_per_byte``, ``bigram_bits_per_byte``
    final        ``metric``, ``value``, ``unit``: results after the last step

``step`` counts finished optimizer steps, from 1.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from xmoe.files import replacing


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a metrics file; a last line cut short by a crash is left out. Nothing if there is no file.

    Raises ValueError naming the line for anything else that is not a JSON object.
    """
    if not path.exists():
        return
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    for number, line in enumerate(lines, start=1):
        try:
            content = json.loads(line)
        except ValueError:
            if number == len(lines) and not line.endswith("\n"):
                return
            raise ValueError(f"{path}, line {number} is not JSON; move the file away to start another") from None
        if not isinstance(content, dict):
            raise ValueError(f"{path}, line {number} is not a JSON object; move the file away to start another")
        yield content


def trim_after(path: Path, step: int, *, finished: bool = False) -> int:
    """Removes what a run resumed from ``step`` will write again, and returns how many lines that were.

    Kept are lines of steps up to ``step``. Final results go, because the resumed run ends with its own; if ``step``
    was the last one (``finished``), so does its validation. The file is replaced as a whole.
    """
    if not path.exists():
        return 0
    lines = list(read_lines(path))
    again = {"final", "validation"} if finished else {"final"}
    kept = [
        line
        for line in lines
        if line.get("step", 0) < step or (line.get("step") == step and line.get("kind") not in again)
    ]
    with replacing(path) as scratch:
        scratch.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
    return len(lines) - len(kept)


class MetricsFile:
    """Appends lines to a metrics file."""

    def __init__(self, path: Path) -> None:
        self._stream: TextIO = path.open("a", encoding="utf-8")

    def write(self, kind: str, **fields: Any) -> None:
        """Writes and flushes one line. Floats that are not finite become null, so that every line is JSON."""
        clean = {key: _finite(value) for key, value in fields.items()}
        self._stream.write(json.dumps({"kind": kind} | clean, allow_nan=False) + "\n")
        self._stream.flush()

    def close(self) -> None:
        self._stream.close()


def _finite(value: Any) -> Any:
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    return value
