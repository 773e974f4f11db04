"""Tokenizers for the training text: what they cost in bits per byte, how they fail, and a whole run with one."""

from __future__ import annotations

import json
import math
import shutil
import sys
from pathlib import Path
from typing import Any

import jobs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xmoe.config import ConfigError, DataConfig
from xmoe.testing import run_ranks
from xmoe.training.corpus import open_corpus, plan_corpus, write_corpus
from xmoe.training.tokenizer import BYTES, Encoder, check_vocab_size, read_vocabulary, train_tokenizer, whole_lines

tokenizers = pytest.importorskip("tokenizers")

TEXT = "The fish swims, naïvely, où il veut: 魚は泳ぐ。\n    indented = {'a': 1}\n"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    assert train_tokenizer([TEXT.encode()] * 3, vocab_size=300, target=path) == 300
    return path


@pytest.fixture
def text(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    for i in range(8):
        (folder / f"{i}.txt").write_text(f"file {i}\n" + TEXT * (i + 1))
    (folder / "latin.txt").write_bytes("naïve".encode("latin-1") * 9)
    return folder


def data(text: Path, tokenizer: Path | None, **settings: Any) -> DataConfig:
    settings = {"sequence_length": 8, "held_out_fraction": 0.3} | settings
    return DataConfig(paths=[str(text)], tokenizer=None if tokenizer is None else str(tokenizer), **settings)


def test_the_streams_decode_to_the_files(text: Path, tokenizer: Path, tmp_path: Path) -> None:
    split = plan_corpus(data(text, tokenizer))
    corpus = open_corpus(write_corpus(split, tmp_path / "cache"))
    reader = tokenizers.Tokenizer.from_file(str(tokenizer))
    end = reader.token_to_id("<|endoftext|>")
    assert (split.vocabulary.size, split.vocabulary.end_of_file) == (300, end)
    for stream, files, bytes_per_token in (
        (corpus.train, split.train, corpus.train_bytes_per_token),
        (corpus.held_out, split.held_out, corpus.held_out_bytes_per_token),
    ):
        assert stream.dtype == np.uint16
        ends = np.flatnonzero(stream == end)
        assert [reader.decode(part[:-1].tolist()) for part in np.split(stream, ends + 1)[:-1]] == [
            file.path.read_text() for file in files
        ]
        assert bytes_per_token == sum(file.path.stat().st_size + 1 for file in files) / len(stream)
        assert bytes_per_token > 1.5
        assert "latin.txt" not in [file.path.name for file in files]
    assert bytes(corpus.held_out_bytes) == b"".join(file.path.read_bytes() + b"\0" for file in split.held_out)


def test_a_long_file_goes_through_in_pieces(tokenizer: Path) -> None:
    text = TEXT * 3000  # 250 kB; the cuts fall inside characters
    content = text.encode()
    chunks = [content[at : at + 99_991] for at in range(0, len(content), 99_991)]
    stream = b"".join(Encoder(read_vocabulary(str(tokenizer))).encode(chunks))
    reader = tokenizers.Tokenizer.from_file(str(tokenizer))
    assert reader.decode(np.frombuffer(stream, dtype=np.uint16).tolist()) == text


def test_the_cache_is_keyed_by_the_tokenizers_content(text: Path, tokenizer: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    shutil.copy(tokenizer, other)
    key = plan_corpus(data(text, tokenizer)).fingerprint()
    assert plan_corpus(data(text, other)).fingerprint() == key
    (text / "latin.txt").unlink()
    assert plan_corpus(data(text, None)).fingerprint() != key
    train_tokenizer([TEXT.encode()], vocab_size=290, target=other)
    split = plan_corpus(data(text, other))
    assert split.fingerprint() != key
    other.write_text(tokenizer.read_text())
    with pytest.raises(ConfigError, match=r"data\.tokenizer .* changed while the text was packed"):
        write_corpus(split, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_bytes_are_one_byte_a_token(text: Path, tmp_path: Path) -> None:
    assert read_vocabulary(None) == BYTES
    corpus = open_corpus(write_corpus(plan_corpus(data(text, None)), tmp_path / "cache"))
    assert (corpus.train_bytes_per_token, corpus.held_out_bytes_per_token) == (1.0, 1.0)
    assert corpus.held_out_bytes is corpus.held_out


def test_a_tokenizer_without_an_end_gets_one(tmp_path: Path) -> None:
    path = tmp_path / "words.json"
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 7}, unk_token="a")).save(str(path))
    vocabulary = read_vocabulary(str(path))
    assert (vocabulary.size, vocabulary.end_of_file) == (9, 8)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param(None, r"cannot be read \(No such file or directory\); train one with", id="missing"),
        pytest.param("{}", r"is not a tokenizer\.json of Hugging Face tokenizers", id="other-json"),
        pytest.param("{", r"is not a tokenizer\.json of Hugging Face tokenizers", id="broken"),
    ],
)
def test_an_unusable_file_is_a_config_error(text: Path, tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=rf"data\.tokenizer is '.*tokenizer\.json': {message}"):
        plan_corpus(data(text, path))


def test_a_missing_package_is_a_config_error(
    text: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ConfigError, match=r"needs the package tokenizers \(pip install tokenizers\)"):
        plan_corpus(data(text, tokenizer))


def test_a_vocabulary_smaller_than_bytes_is_refused() -> None:
    with pytest.raises(ConfigError, match="--vocab-size is 256: must be at least 257"):
        check_vocab_size(256)


@given(st.lists(st.text(alphabet="ab\n", max_size=9)))
def test_pieces_are_whole_lines_and_nothing_is_lost(chunks: list[str]) -> None:
    pieces = list(whole_lines(chunk.encode() for chunk in chunks))
    assert b"".join(pieces) == "".join(chunks).encode()
    assert all(piece.endswith(b"\n") for piece in pieces[:-1])


def train_on_this_rank(work: str, arguments: tuple[str, ...], missing: str) -> tuple[int, str]:
    if missing:
        sys.modules[missing] = None  # type: ignore[assignment]
    return jobs.command_on_this_rank(work, arguments)


def train(work: Path, name: str, *settings: str, missing: str = "") -> str:
    """Trains on two ranks, one package hidden, and returns what rank 0 said on standard error."""
    overrides = [argument for setting in settings for argument in ("--set", setting)]
    arguments = ("train", "--config", "run.json", "--name", name, *overrides)
    (code, said), *others = run_ranks(2, train_on_this_rank, str(work), arguments, missing, timeout_s=100)
    assert (code, others) == (0, [(0, "")]), said
    return said


def lines(work: Path, name: str, kind: str) -> list[dict[str, Any]]:
    content = [json.loads(line) for line in (work / f"runs/{name}/metrics.jsonl").read_text().splitlines()]
    return [line for line in content if line["kind"] == kind]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run file with a tokenizer that the documented command has trained on the run's own text."""
    work = tmp_path_factory.mktemp("work")
    jobs.write_text(work / "text")
    settings = {"paths": ["text"], "cache_dir": "cache", "held_out_fraction": 0.2, "tokenizer": "tokenizer.json"}
    model = {"ep_size": 2, "hidden_size": 16}
    content = jobs.run_file(data=settings | {"sequence_length": 16}, model=model, run={"steps": 6, "eval_interval": 3})
    (work / "run.json").write_text(json.dumps(content | {"tensorboard": {"enabled": True}}))
    arguments = ("tokenizer", "train", "--vocab-size", "270", "--out", "tokenizer.json", "--config", "run.json")
    assert jobs.run_on_ranks(work, *arguments, world=1) == [(0, "")]
    return work


@pytest.mark.dist
@pytest.mark.timeout(240)
def test_a_run_with_a_tokenizer_and_tensorboard(work: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert train(work, "tokens") == ""
    steps = lines(work, "tokens", "train")
    # Untrained, the model gives each of the tokens the same probability.
    assert steps[0]["loss_bits_per_token"] == pytest.approx(math.log2(270), abs=0.05)
    assert steps[-1]["loss_bits_per_token"] < steps[0]["loss_bits_per_token"] - 0.05
    corpus = open_corpus(*(work / "cache").iterdir())
    assert corpus.train_bytes_per_token > 1.5
    for step in steps:
        assert step["loss_bits_per_byte"] * corpus.train_bytes_per_token == pytest.approx(step["loss_bits_per_token"])
    validations = lines(work, "tokens", "validation")
    for line in validations:
        per_token = line["val_bits_per_byte"] * corpus.held_out_bytes_per_token
        assert per_token == pytest.approx(line["val_bits_per_token"])

    (events,) = (work / "runs/tokens/tensorboard").iterdir()
    written = EventAccumulator(str(events)).Reload()
    for tag, kind, key in [
        ("xmoe/loss_bits_per_byte", "train", "loss_bits_per_byte"),
        ("xmoe/val_bits_per_byte", "validation", "val_bits_per_byte"),
    ]:
        found = [(event.step, event.value) for event in written.Scalars(tag)]
        expected = [(line["step"], pytest.approx(line[key], rel=1e-6)) for line in lines(work, "tokens", kind)]
        assert found == expected
    assert [event.step for event in written.Scalars("xmoe/load_cv")] == [1, 2, 3, 4, 5, 6]


@pytest.mark.dist
@pytest.mark.timeout(240)
def test_without_tensorboard_a_warning_and_csv_files(work: Path) -> None:
    said = train(work, "bytes", "data.tokenizer=null", missing="tensorboard")
    assert said.count("\n") == 1
    assert "no TensorBoard files without the package tensorboard (pip install tensorboard): CSV instead" in said
    csv = (work / "runs/bytes/csv/xmoe_loss_bits_per_byte.csv").read_text().splitlines()
    assert len(csv) == 1 + 6
    assert not (work / "runs/bytes/tensorboard").exists()
    steps = lines(work, "bytes", "train")
    assert [step["loss_bits_per_token"] for step in steps] == [step["loss_bits_per_byte"] for step in steps]
    # What the text itself is worth does not depend on the tokens.
    if (work / "runs/tokens").exists():
        assert lines(work, "bytes", "baseline") == lines(work, "tokens", "baseline")


@pytest.mark.dist
@pytest.mark.timeout(240)
def test_a_text_too_short_in_tokens_is_one_error(work: Path) -> None:
    longest = 1 + sum(file.num_bytes for file in plan_corpus(data(work / "text", None, held_out_fraction=0.2)).held_out)
    settings = ("--set", f"data.sequence_length={longest - 1}")
    answers = jobs.run_on_ranks(work, "train", "--config", "run.json", "--name", "short", *settings, world=2)
    assert [code for code, _ in answers] == [2, 2]
    for _, said in answers:
        assert said.startswith(f"error: data.sequence_length is {longest - 1}: the held-out text has only ")
        assert " tokens, and one sequence needs" in said
    assert not (work / "runs/short/metrics.jsonl").exists()
