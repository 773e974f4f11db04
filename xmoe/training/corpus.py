"""From text files to two memory-mapped byte streams: training and held-out.

Tokens are bytes (vocabulary 256). Byte 0 ends each file; a file that contains it is binary and is left out.
The split is by whole files: a file's content is on one side only, and exact duplicates count as one file. Split and
order depend on the contents and the seed, never on names, so a copied or renamed folder gives the same stream.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmoe.config import ConfigError, DataConfig

logger = logging.getLogger(__name__)

VOCAB_SIZE = 256
END_OF_FILE = 0
FORMAT_VERSION = 1
_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__", "node_modules"})
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class TextFile:
    """One distinct content: where it was first found, its bytes and their SHA-256."""

    path: Path
    num_bytes: int
    digest: str


@dataclass(frozen=True, kw_only=True)
class Split:
    """Which contents train and which validate, in the order of the streams. No content is in both."""

    train: tuple[TextFile, ...]
    held_out: tuple[TextFile, ...]
    num_duplicates: int

    def fingerprint(self) -> str:
        """Names the two streams: equal fingerprints mean equal bytes."""
        parts = [f"xmoe-corpus-{FORMAT_VERSION}", *(f.digest for f in self.train), "held-out"]
        return hashlib.sha256("\n".join([*parts, *(f.digest for f in self.held_out)]).encode()).hexdigest()[:32]


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """The two byte streams of one run, memory-mapped (uint8, read-only).

    ``fingerprint``  equal for equal streams
    ``train``        ``[bytes]``; the training files one after the other, each followed by ``END_OF_FILE``
    ``held_out``     ``[bytes]``; the held-out files likewise
    """

    fingerprint: str
    train: NDArray[np.uint8]
    held_out: NDArray[np.uint8]


def find_files(config: DataConfig) -> list[Path]:
    """The text files that ``data.paths`` names, sorted. Raises ConfigError for a path that is not there.

    Files are taken as they are, whatever their name; from folders come the files with one of ``data.suffixes``,
    without hidden and installed (site-packages) ones.
    """
    found: set[Path] = set()
    for index, given in enumerate(config.paths or [sysconfig.get_path("stdlib")]):
        path = Path(given).expanduser()
        setting = f"data.paths[{index}]"
        if path.is_file():
            found.add(path)
        elif path.is_dir():
            found.update(_walk(path, tuple(config.suffixes)))
        else:
            raise ConfigError(setting, given, "no such file or folder; give an existing text file or folder")
    if not found:
        raise ConfigError(
            "data.paths",
            config.paths,
            f"no file ends in one of data.suffixes {config.suffixes}; add files or suffixes",
        )
    return sorted(found)


def _walk(folder: Path, suffixes: tuple[str, ...]) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder):
        folders[:] = [f for f in folders if f not in _SKIPPED_FOLDERS and not f.startswith(".")]
        for name in names:
            path = Path(parent, name)
            if name.endswith(suffixes) and not name.startswith(".") and path.is_file():
                yield path


def read_distinct(paths: Iterable[Path]) -> tuple[list[TextFile], int]:
    """The distinct, non-empty text contents among the files, and how many exact duplicates were left out.

    Raises ConfigError for a file that cannot be read.
    """
    files: dict[str, TextFile] = {}
    num_duplicates = 0
    for path in paths:
        digest, num_bytes, binary = hashlib.sha256(), 0, False
        try:
            for chunk in _chunks(path):
                digest.update(chunk)
                num_bytes += len(chunk)
                binary = binary or END_OF_FILE in chunk
        except OSError as error:
            raise ConfigError(
                "data.paths",
                str(path),
                f"cannot be read ({error.strerror}); fix its permissions or leave it out",
            ) from None
        if binary:
            logger.info("%s holds a zero byte and is left out as binary", path)
        elif num_bytes and digest.hexdigest() in files:
            num_duplicates += 1
        elif num_bytes:
            files[digest.hexdigest()] = TextFile(path=path, num_bytes=num_bytes, digest=digest.hexdigest())
    return list(files.values()), num_duplicates


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            yield chunk


def split_files(files: Sequence[TextFile], num_duplicates: int = 0, *, held_out_fraction: float, seed: int) -> Split:
    """Holds out whole files until they are ``held_out_fraction`` of the bytes.

    Files are visited in an order drawn from the seed and their contents; a file that would exceed the share is
    left to training, and where every one would, the smallest is held out. At least one file stays on each side.

    Raises ConfigError with fewer than two distinct files.
    """
    if len(files) < 2:
        raise ConfigError(
            "data.paths",
            [str(file.path) for file in files],
            "holds fewer than two different non-empty text files, and validation needs a whole one that is not "
            "trained on; add text or cut the file in two",
        )
    ordered = sorted(files, key=lambda file: hashlib.sha256(f"{seed}:{file.digest}".encode()).digest())
    allowed_bytes = held_out_fraction * sum(file.num_bytes for file in files)
    held_out: list[TextFile] = []
    for file in ordered:
        if file.num_bytes <= allowed_bytes and len(held_out) < len(files) - 1:
            held_out.append(file)
            allowed_bytes -= file.num_bytes
    if not held_out:
        held_out = [min(ordered, key=lambda file: file.num_bytes)]
    chosen = {file.digest for file in held_out}
    train = tuple(file for file in ordered if file.digest not in chosen)
    return Split(train=train, held_out=tuple(held_out), num_duplicates=num_duplicates)


def plan_corpus(config: DataConfig) -> Split:
    """Finds, reads and splits the text of ``data``; writes nothing.

    Raises ConfigError when a path is missing, or either side is shorter than one sequence.
    """
    files, num_duplicates = read_distinct(find_files(config))
    split = split_files(files, num_duplicates, held_out_fraction=config.held_out_fraction, seed=config.seed)
    for side, members in (("training", split.train), ("held-out", split.held_out)):
        num_bytes = sum(file.num_bytes + 1 for file in members)
        if num_bytes < config.sequence_length + 1:
            raise ConfigError(
                "data.sequence_length",
                config.sequence_length,
                f"the {side} text has only {num_bytes} bytes, and one sequence needs sequence_length + 1; add text to "
                f"data.paths, shorten the sequences or change data.held_out_fraction ({config.held_out_fraction})",
            )
    return split


def write_corpus(split: Split, cache_dir: str | Path) -> Path:
    """Packs the split into ``cache_dir/<fingerprint>`` and returns that folder; a whole one is used as it is.

    The folder is written under another name beside its target and renamed when complete. Raises ConfigError when
    the cache cannot be written, RuntimeError when a file changes while it is packed.
    """
    target = Path(cache_dir).expanduser() / split.fingerprint()
    if _is_complete(target):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        raise ConfigError(
            "data.cache_dir", str(cache_dir), f"cannot be written ({error.strerror}); name a writable folder"
        ) from None
    try:
        sizes = {
            "train": _pack(split.train, scratch / "train.bin"),
            "held_out": _pack(split.held_out, scratch / "held_out.bin"),
        }
        (scratch / "meta.json").write_text(json.dumps(_meta(split, sizes), indent=1), encoding="utf-8")
        scratch.chmod(0o755)
        if target.exists():
            # Damaged, or completed meanwhile by another job: either way the complete folder takes its place.
            target.rename(scratch / "replaced")
        scratch.rename(target)
        shutil.rmtree(target / "replaced", ignore_errors=True)
    except OSError as error:
        raise ConfigError(
            "data.cache_dir",
            str(cache_dir),
            f"writing failed ({error.strerror}); free space or name another folder",
        ) from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _meta(split: Split, sizes: dict[str, int]) -> dict[str, Any]:
    sides = {"train": split.train, "held_out": split.held_out}
    return {
        "format_version": FORMAT_VERSION,
        "num_bytes": sizes,
        "num_duplicates": split.num_duplicates,
        "files": {side: [asdict(f) | {"path": str(f.path)} for f in files] for side, files in sides.items()},
    }


def _pack(files: Sequence[TextFile], target: Path) -> int:
    num_bytes = 0
    with target.open("wb") as out:
        for file in files:
            digest = hashlib.sha256()
            for chunk in _chunks(file.path):
                digest.update(chunk)
                out.write(chunk)
            if digest.hexdigest() != file.digest:
                raise RuntimeError(f"{file.path} changed while it was packed; start again")
            out.write(bytes([END_OF_FILE]))
            num_bytes += file.num_bytes + 1
        out.flush()
        os.fsync(out.fileno())
    return num_bytes


def _is_complete(folder: Path) -> bool:
    try:
        sizes = json.loads((folder / "meta.json").read_text(encoding="utf-8"))["num_bytes"]
        return all((folder / f"{side}.bin").stat().st_size == sizes[side] for side in ("train", "held_out"))
    except (OSError, ValueError, KeyError, TypeError):
        return False


def open_corpus(folder: str | Path) -> Corpus:
    """Maps a folder that :func:`write_corpus` made. Raises ConfigError when this rank cannot see it whole."""
    folder = Path(folder)
    if not _is_complete(folder):
        raise ConfigError(
            "data.cache_dir",
            str(folder),
            "is missing or damaged on this rank; name a folder that all ranks share",
        )
    return Corpus(
        fingerprint=folder.name,
        train=np.memmap(folder / "train.bin", dtype=np.uint8, mode="r"),
        held_out=np.memmap(folder / "held_out.bin", dtype=np.uint8, mode="r"),
    )
