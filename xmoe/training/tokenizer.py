"""Text to token ids: bytes, or a Hugging Face ``tokenizer.json``. No torch here."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from xmoe.config import ConfigError
from xmoe.files import replacing

SETTING = "data.tokenizer"
# Names that tokenizers of the field give to the end of a text; the first one a vocabulary has is taken.
_END_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
# Bytes of a byte-level alphabet and the end of a file.
MIN_VOCAB_SIZE = 257
# Enough pieces at a time to keep every core busy with a large file.
_PIECE_BYTES, _BATCH = 1 << 16, 256


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """Which tokens a run's text is made of.

    ``path``         the ``tokenizer.json``; None stands for bytes
    ``digest``       SHA-256 of that file; empty for bytes
    ``size``         token ids are below this
    ``end_of_file``  the id that ends each file; a tokenizer without such a token gets one more id for it
    """

    path: Path | None
    digest: str
    size: int
    end_of_file: int

    @property
    def dtype(self) -> DTypeLike:
        """The smallest unsigned type that holds every id."""
        return np.uint8 if self.size <= 1 << 8 else np.uint16 if self.size <= 1 << 16 else np.uint32


BYTES = Vocabulary(path=None, digest="", size=256, end_of_file=0)


def read_vocabulary(path: str | None) -> Vocabulary:
    """The vocabulary of ``data.tokenizer``, bytes if it is None. Raises ConfigError naming what is wrong with it."""
    if path is None:
        return BYTES
    content, tokenizer = _load(Path(path).expanduser())
    ids = tokenizer.get_vocab(with_added_tokens=True)
    if not ids:
        raise ConfigError(SETTING, path, "has no tokens; train one with: xmoe tokenizer train")
    size = max(ids.values()) + 1
    end = next((ids[name] for name in _END_NAMES if name in ids), size)
    return Vocabulary(
        path=Path(path).expanduser(),
        digest=hashlib.sha256(content).hexdigest(),
        size=max(size, end + 1),
        end_of_file=end,
    )


def _load(path: Path) -> tuple[bytes, Any]:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            SETTING, str(path), f"cannot be read ({error.strerror}); train one with: xmoe tokenizer train"
        ) from None
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError:
        raise ConfigError(
            SETTING, str(path), "needs the package tokenizers (pip install tokenizers); null trains on bytes"
        ) from None
    try:
        return content, Tokenizer.from_str(content.decode("utf-8"))
    except Exception as error:  # what the package raises has no type of its own
        raise ConfigError(SETTING, str(path), f"is not a tokenizer.json of Hugging Face tokenizers ({error})") from None


class Encoder:
    """Turns the bytes of files into ids of a vocabulary. Raises ConfigError when its file is no longer the same."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary, self._tokenizer = vocabulary, None
        if vocabulary.path is not None:
            content, self._tokenizer = _load(vocabulary.path)
            if hashlib.sha256(content).hexdigest() != vocabulary.digest:
                raise ConfigError(SETTING, str(vocabulary.path), "changed while the text was packed; start again")
            # Settings of the file that would cut or fill the pieces.
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()

    def encode(self, chunks: Iterable[bytes]) -> Iterator[bytes]:
        """The ids of one file, as the bytes of arrays of the vocabulary's dtype. The end of the file is not added."""
        if self._tokenizer is None:
            yield from chunks
            return
        pieces = whole_lines(_cut(chunks))
        while batch := [piece.decode("utf-8") for piece in itertools.islice(pieces, _BATCH)]:
            for encoding in self._tokenizer.encode_batch_fast(batch, add_special_tokens=False):
                yield np.array(encoding.ids, dtype=self._vocabulary.dtype).tobytes()


def _cut(chunks: Iterable[bytes]) -> Iterator[bytes]:
    return (chunk[at : at + _PIECE_BYTES] for chunk in chunks for at in range(0, len(chunk), _PIECE_BYTES))


def whole_lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """The same bytes cut after line ends, where no character and hardly a token goes on.

    A file without line ends comes in one piece.
    """
    rest = b""
    for chunk in chunks:
        head, newline, tail = chunk.rpartition(b"\n")
        if newline:
            yield rest + head + newline
            rest = tail
        else:
            rest += chunk
    if rest:
        yield rest


def check_vocab_size(vocab_size: int) -> None:
    """Raises ConfigError for a vocabulary without room for all bytes."""
    if vocab_size < MIN_VOCAB_SIZE:
        raise ConfigError("--vocab-size", vocab_size, f"must be at least {MIN_VOCAB_SIZE}: all bytes, and the end")


def train_tokenizer(texts: Iterable[bytes], *, vocab_size: int, target: Path) -> int:
    """Trains a byte-level BPE on UTF-8 texts, writes its ``tokenizer.json`` and returns its number of tokens.

    Every text can be encoded, since all bytes are tokens. Raises ConfigError for a target that cannot be written.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[_END_NAMES[0]],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text.decode("utf-8") for text in texts), trainer=trainer)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target) as scratch:
            scratch.write_text(tokenizer.to_str(pretty=True) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError("--out", str(target), f"cannot be written ({error.strerror})") from None
    return tokenizer.get_vocab_size()
