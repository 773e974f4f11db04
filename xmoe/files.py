"""Files that are either whole or not there."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Yields a scratch path beside ``target`` that takes its place when the block ends well.

    The scratch file keeps the target's suffix, since some writers choose their format by it. Who may read the result
    is what the umask and the folder say, as of any file that is simply opened.
    """
    scratch = target.with_name(f".{target.stem}.{secrets.token_hex(8)}{target.suffix}")
    # Made here, and by these flags: tempfile's are for their author only, and to read the umask is to set it.
    os.close(os.open(scratch, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    try:
        yield scratch
        with scratch.open("rb") as stream:
            os.fsync(stream.fileno())
        scratch.replace(target)
    finally:
        scratch.unlink(missing_ok=True)
