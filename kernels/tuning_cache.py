"""Winners of the search, on disk: one small file for each kernel, chip, Triton version, dtype and bucket of sizes.

A file is written beside its place and moved there, so that a reader sees a whole file or none; each winner has a file
of its own, so that ranks which tune different kernels at once lose nothing, and of two that tune the same one the
last to finish is kept. A file that cannot be read, or that speaks of something else, counts as absent.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ..files import replacing

logger = logging.getLogger(__name__)

_FORMAT = 1
_SMALLEST_BUCKET = 16


@dataclass(frozen=True, kw_only=True)
class Key:
    """What one winner is for.

    ``rows``   bucket (:func:`bucket`) of the number that changes from batch to batch, 0 where a kernel has none
    ``sizes``  numbers that stay: widths, experts
    """

    op: str
    arch: str
    dtype: str
    rows: int
    sizes: tuple[int, ...]
    triton: str

    def path(self) -> Path:
        """Where the winner lies below :func:`cache_folder`."""
        sizes = "x".join(str(size) for size in self.sizes) or "any"
        name = f"{self.op}-{self.dtype}-rows{self.rows}-{sizes}.json"
        return cache_folder() / self.arch / _plain(f"triton-{self.triton}") / _plain(name)


def bucket(rows: int) -> int:
    """The power of two that ``rows`` is rounded up to, at least 16; 0 stays 0.

    Ragged batches differ in every step and share their bucket, so that none of them looks for a file of its own.

    Example: 1 gives 16, 1000 gives 1024, 1024 gives 1024, 1025 gives 2048.
    """
    return max(_SMALLEST_BUCKET, 1 << (rows - 1).bit_length()) if rows else 0


def cache_folder() -> Path:
    """``XMOE_CACHE_DIR``, else ``~/.cache/xmoe``; the winners lie in its folder ``tuning``."""
    named = os.environ.get("XMOE_CACHE_DIR")
    return (Path(named) if named else Path.home() / ".cache" / "xmoe") / "tuning"


def write(key: Key, config: Mapping[str, Any], *, seconds: float) -> Path:
    """Keeps ``config``, a :class:`~xmoe.kernels.tuning.Config` as a mapping, as the winner for ``key``."""
    path = key.path()
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"format": _FORMAT, "key": _as_json(key), "config": dict(config), "seconds": seconds}
    with replacing(path) as scratch:
        scratch.write_text(json.dumps(content, indent=1), encoding="utf-8")
    return path


def find(key: Key) -> Mapping[str, Any] | None:
    """The winner for ``key``, or None."""
    try:
        path = key.path()
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: there is no home folder
        logger.warning("ignoring the tuning result for %s: %s", _as_json(key), error)
        return None
    if not isinstance(content, dict) or content.get("format") != _FORMAT or content.get("key") != _as_json(key):
        logger.warning("ignoring the tuning result %s: it is not for %s", path, _as_json(key))
        return None
    config = content.get("config")
    return config if isinstance(config, dict) else {}


def find_near(key: Key) -> Mapping[str, Any] | None:
    """The winner for ``key``, else that of half or of twice its rows: batches around an edge need no second search."""
    near = [key.rows, key.rows // 2, key.rows * 2] if key.rows else [0]
    found = (find(replace(key, rows=rows)) for rows in near if not rows or rows >= _SMALLEST_BUCKET)
    return next((config for config in found if config is not None), None)


def _as_json(key: Key) -> dict[str, Any]:
    return {**asdict(key), "sizes": list(key.sizes)}


def _plain(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "_", name)
