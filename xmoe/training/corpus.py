"""From text files to two memory-mapped token streams: training and held-out.

Tokens are bytes, or those of ``data.tokenizer``. An end-of-file token ends each file (byte 0); a file that contains
the byte 0 is binary and is left out, and with a tokenizer one that is not UTF-8.
The split is by whole files: a file's content is on one side only, and exact duplicates count as one file. Split and
order depend on the contents and the seed, never on names, so a copied or renamed folder gives the same stream.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import logging
import os
import shutil
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmoe.config import ConfigError, DataConfig

from .tokenizer import BYTES, Encoder, Vocabulary, read_vocabulary

logger = logging.getLogger(__name__)

_BINARY = 0
FORMAT_VERSION = 1
_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__", "node_modules"})
_CHUNK_BYTES = 1 << 20
_SIDES = ("train", "held_out")


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
    vocabulary: Vocabulary = BYTES

    def fingerprint(self) -> str:
        """Names the two streams: equal fingerprints mean equal tokens."""
        tokenizer = [f"tokenizer {self.vocabulary.digest}"] if self.vocabulary.digest else []
        parts = [f"xmoe-corpus-{FORMAT_VERSION}", *tokenizer, *(f.digest for f in self.train), "held-out"]
        return hashlib.sha256("\n".join([*parts, *(f.digest for f in self.held_out)]).encode()).hexdigest()[:32]


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """The two token streams of one run, memory-mapped (unsigned, read-only).

    ``fingerprint``     equal for equal streams
    ``train``           ``[tokens]``; the training files one after the other, each followed by the end of file
    ``held_out``        ``[tokens]``; the held-out files likewise
    ``held_out_bytes``  ``[bytes]``; the held-out files as bytes, each followed by a zero byte
    ``train_bytes_per_token``, ``held_out_bytes_per_token``
                        mean bytes of text that a token of the stream stands for, the end of a file counted as a byte;
                        1 for bytes
    """

    fingerprint: str
    train: NDArray[Any]
    held_out: NDArray[Any]
    held_out_bytes: NDArray[np.uint8]
    train_bytes_per_token: float
    held_out_bytes_per_token: float


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


def read_distinct(paths: Iterable[Path], *, only_utf8: bool = False) -> tuple[list[TextFile], int]:
    """The distinct, non-empty text contents among the files, and how many exact duplicates were left out.

    Raises ConfigError for a file that cannot be read.
    """
    files: dict[str, TextFile] = {}
    num_duplicates = 0
    for path in paths:
        digest, num_bytes, binary = hashlib.sha256(), 0, False
        decoder = codecs.getincrementaldecoder("utf-8")()
        try:
            for chunk in _chunks(path):
                digest.update(chunk)
                num_bytes += len(chunk)
                binary = binary or _BINARY in chunk
                if only_utf8:
                    decoder.decode(chunk)
            decoder.decode(b"", final=True)
        except UnicodeDecodeError:
            logger.info("%s is not UTF-8 and is left out", path)
            continue
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


def plan_corpus(config: DataConfig, *, only_utf8: bool = False) -> Split:
    """Finds, reads and splits the text of ``data``; writes nothing.

    Raises ConfigError when a path is missing, the tokenizer is unusable, or either side is shorter than one sequence
    of bytes.
    """
    vocabulary = read_vocabulary(config.tokenizer)
    files, num_duplicates = read_distinct(find_files(config), only_utf8=only_utf8 or vocabulary != BYTES)
    split = split_files(files, num_duplicates, held_out_fraction=config.held_out_fraction, seed=config.seed)
    for side, members in (("training", split.train), ("held-out", split.held_out)):
        check_length(config, side, sum(file.num_bytes + 1 for file in members), "bytes")
    return replace(split, vocabulary=vocabulary)


def check_length(config: DataConfig, side: str, length: int, unit: str) -> None:
    """Raises ConfigError when a stream of ``length`` holds no sequence and the token after it."""
    if length < config.sequence_length + 1:
        raise ConfigError(
            "data.sequence_length",
            config.sequence_length,
            f"the {side} text has only {length} {unit}, and one sequence needs sequence_length + 1; add text to "
            f"data.paths, shorten the sequences or change data.held_out_fraction ({config.held_out_fraction})",
        )


def write_corpus(split: Split, cache_dir: str | Path) -> Path:
    """Packs the split into ``cache_dir/<fingerprint>`` and returns that folder; a whole one is used as it is.

    The folder is written under another name beside its target and renamed when complete. Raises ConfigError when
    the cache cannot be written, RuntimeError when a file changes while it is packed.
    """
    target = Path(cache_dir).expanduser() / split.fingerprint()
    if _read_meta(target) is not None:
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        raise ConfigError(
            "data.cache_dir", str(cache_dir), f"cannot be written ({error.strerror}); name a writable folder"
        ) from None
    try:
        encoder = Encoder(split.vocabulary)
        end_of_file = np.array([split.vocabulary.end_of_file], dtype=split.vocabulary.dtype).tobytes()
        sizes = {
            "train": _pack(split.train, scratch / "train.bin", encoder, end_of_file),
            "held_out": _pack(split.held_out, scratch / "held_out.bin", encoder, end_of_file),
        }
        if split.vocabulary != BYTES:
            sizes["held_out_bytes"] = _pack(split.held_out, scratch / "held_out_bytes.bin", Encoder(BYTES), b"\0")
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
        "text_bytes": {side: sum(file.num_bytes + 1 for file in files) for side, files in sides.items()},
        "dtype": np.dtype(split.vocabulary.dtype).name,
        "num_duplicates": split.num_duplicates,
        "files": {side: [asdict(f) | {"path": str(f.path)} for f in files] for side, files in sides.items()},
    }


def _pack(files: Sequence[TextFile], target: Path, encoder: Encoder, end_of_file: bytes) -> int:
    """Writes one stream and returns its size in bytes."""
    num_bytes = 0
    with target.open("wb") as out:
        for file in files:
            for piece in (*encoder.encode(read_unchanged(file)), end_of_file):
                num_bytes += out.write(piece)
        out.flush()
        os.fsync(out.fileno())
    return num_bytes


def read_unchanged(file: TextFile) -> Iterator[bytes]:
    """The bytes of a file in chunks. Raises RuntimeError at the end when they are not those that were planned."""
    digest = hashlib.sha256()
    for chunk in _chunks(file.path):
        digest.update(chunk)
        yield chunk
    if digest.hexdigest() != file.digest:
        raise RuntimeError(f"{file.path} changed while it was packed; start again")


def _read_meta(folder: Path) -> dict[str, Any] | None:
    """What a complete cache says of itself, None for one that is not there, cut short, or older than its format."""
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        sizes = meta["num_bytes"]
        whole = {"train", "held_out"} <= sizes.keys() and {"text_bytes", "dtype"} <= meta.keys()
        whole = whole and all((folder / f"{name}.bin").stat().st_size == size for name, size in sizes.items())
        return meta if whole else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def open_corpus(folder: str | Path) -> Corpus:
    """Maps a folder that :func:`write_corpus` made. Raises ConfigError when this rank cannot see it whole."""
    folder = Path(folder)
    meta = _read_meta(folder)
    if meta is None:
        raise ConfigError(
            "data.cache_dir",
            str(folder),
            "is missing or damaged on this rank; name a folder that all ranks share",
        )
    train, held_out = (np.memmap(folder / f"{side}.bin", dtype=meta["dtype"], mode="r") for side in _SIDES)
    if "held_out_bytes" in meta["num_bytes"]:
        held_out_bytes = np.memmap(folder / "held_out_bytes.bin", dtype=np.uint8, mode="r")
    else:
        held_out_bytes = held_out
    return Corpus(
        fingerprint=folder.name,
        train=train,
        held_out=held_out,
        held_out_bytes=held_out_bytes,
        train_bytes_per_token=meta["text_bytes"]["train"] / len(train),
        held_out_bytes_per_token=meta["text_bytes"]["held_out"] / len(held_out),
    )
