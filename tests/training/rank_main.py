"""Runs ``xmoe`` as one rank of a test: writes its process id first and its exit code last into a folder."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from xmoe.launch.cli import main

if __name__ == "__main__":
    # DeepSpeed compiles its Muon optimizer while it is imported, which no job here uses: four seconds per rank.
    torch.compile = lambda function=None, **_: function or (lambda inner: inner)  # type: ignore[assignment]
    folder = Path(os.environ["XMOE_TEST_FOLDER"])
    rank = os.environ["RANK"]
    (folder / f"pid_{rank}").write_text(str(os.getpid()))
    try:
        main()
        code: object = 0
    except SystemExit as stop:
        code = stop.code or 0
    (folder / f"exit_{rank}").write_text(str(code))
    sys.exit(code)  # type: ignore[arg-type]
