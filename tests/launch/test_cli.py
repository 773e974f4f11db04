"""The command line: what it accepts, and that a mistake is one line and exit code 2."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import xmoe
from xmoe.config import ConfigError, read_json, read_train_config
from xmoe.launch import cli
from xmoe.testing import run_ranks

CONFIGS = Path(cli.__file__).parent / "configs"


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of ``xmoe ARGUMENTS`` in this process."""
    sys.argv = ["xmoe", *arguments]
    with pytest.raises(SystemExit) as stop:
        cli.main()
    captured = capsys.readouterr()
    return int(stop.value.code or 0), captured.out, captured.err


@pytest.fixture(autouse=True)
def _leave_process_as_it_was(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr("xmoe.training.stop.STOP_SIGNALS", ())
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        # Set first: only then does monkeypatch also undo what the command sets.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"train_micro_batch_size_per_gpu": 1, "data": {"paths": ["nowhere"]}}))
    return path


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--version") == (0, f"xmoe {xmoe.__version__}\n", "")


def test_schema_is_json_of_all_sections(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "config", "--schema")
    assert code == 0
    assert set(json.loads(out)["properties"]) == {"xmoe", "model", "data", "run"}


def test_check_accepts_a_good_file(capsys: pytest.CaptureFixture[str], run_file: Path) -> None:
    code, out, err = run(capsys, "config", "--check", str(run_file))
    assert (code, err) == (0, "")
    assert "no mistake" in out


def test_the_deepspeed_launchers_argument_is_ignored(capsys: pytest.CaptureFixture[str], run_file: Path) -> None:
    code, _, _ = run(capsys, "--local_rank=0", "config", "--check", str(run_file))
    assert code == 0


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.json")), ids=lambda path: path.stem)
def test_the_example_files_are_valid(path: Path) -> None:
    settings = read_train_config(read_json(path))
    batch = settings.deepspeed["train_micro_batch_size_per_gpu"]
    assert batch > 0
    assert settings.deepspeed["wall_clock_breakdown"] is False


def test_the_cpu_example_is_fine_grained() -> None:
    model = read_train_config(read_json(CONFIGS / "moe_cpu_small.json")).model
    assert model.num_experts >= 32
    assert model.top_k >= 4
    assert model.ep_size == 4


BAD_SETTINGS: list[tuple[str, str, str]] = [
    ("model.colour", '"red"', "error: model.colour is 'red': unknown key; allowed in 'model' are"),
    ("model.hidden_size", '"128"', "error: model.hidden_size is '128': input should be a valid integer"),
    ("model.hidden_size", "-1", "error: model.hidden_size is -1: input should be greater than 0"),
    ("model.hidden_size", "30", "error: model.hidden_size is 30: must be a multiple of num_heads (4)"),
    ("model.num_kv_heads", "3", "error: model.num_heads is 4: must be a multiple of num_kv_heads (3)"),
    ("model.top_k", "33", "error: model.top_k is 33: must be at most num_experts (32)"),
    ("model.ep_size", "5", "error: model.num_experts is 32: must be a multiple of ep_size (5)"),
    ("model.num_dense_layers", "9", "error: model.num_dense_layers is 9: must be at most num_layers (4)"),
    ("model.expert_activation", '"relu"', "error: model.expert_activation is 'relu'"),
    ("model", "3", "error: model is 3: must be a JSON object"),
    ("data.paths", "[]", "error: data.paths is []"),
    ("data.held_out_fraction", "1.5", "error: data.held_out_fraction is 1.5: input should be less than 1"),
    ("run.steps", "0", "error: run.steps is 0: input should be greater than 0"),
    ("run.name", '"../x"', "error: run.name is '../x'"),
    ("xmoe.num_experts", "8", "error: xmoe.num_experts is 8: this setting creates parameters"),
    ("xmoe.dispatch", '"magic"', "error: xmoe.dispatch is 'magic': input should be 'auto'"),
]


@pytest.mark.parametrize(("setting", "value", "message"), BAD_SETTINGS, ids=lambda text: text[:24])
def test_a_bad_setting_is_one_line_and_exit_2(
    capsys: pytest.CaptureFixture[str], run_file: Path, setting: str, value: str, message: str
) -> None:
    code, out, err = run(capsys, "train", "--config", str(run_file), "--set", f"{setting}={value}")
    assert (code, out) == (2, "")
    assert err.startswith(message)
    assert err.count("\n") == 1
    assert [path.name for path in Path().iterdir()] == ["run.json"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "error: --config is 'bad.json': cannot be read"),
        ("{", "error: --config is 'bad.json': is not valid JSON"),
        ("[]", "error: --config is 'bad.json': must hold a JSON object"),
        (b"\xff\xfe", "error: --config is 'bad.json': is not valid JSON"),
    ],
)
def test_a_bad_file_is_one_line_and_exit_2(
    capsys: pytest.CaptureFixture[str], content: str | bytes | None, message: str
) -> None:
    if content is not None:
        Path("bad.json").write_bytes(content.encode() if isinstance(content, str) else content)
    code, _, err = run(capsys, "config", "--check", "bad.json")
    assert code == 2
    assert err.startswith(message)
    assert err.count("\n") == 1


@pytest.mark.parametrize("arguments", [(), ("--schema", "--check", "x")])
def test_config_needs_one_request(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]) -> None:
    code, _, err = run(capsys, "config", *arguments)
    assert code == 2
    assert "give either --schema or --check FILE" in err


@pytest.mark.parametrize("override", ["steps", "=3", "run..steps=3", "run.=3"])
def test_a_malformed_override_is_an_error(override: str) -> None:
    with pytest.raises(ConfigError, match=r"--set is .*must read section\.key=value"):
        cli.apply_override({}, override)


def test_overrides_take_json_or_text_and_make_sections() -> None:
    content: dict[str, Any] = {"run": {"steps": 1}}
    for override in ("run.steps=5", "run.name=x-1", "optimizer.params.lr=1e-3", 'data.paths=["a=b"]'):
        cli.apply_override(content, override)
    assert content == {
        "run": {"steps": 5, "name": "x-1"},
        "optimizer": {"params": {"lr": 1e-3}},
        "data": {"paths": ["a=b"]},
    }


def test_an_override_through_a_value_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"run\.steps is no JSON object"):
        cli.apply_override({"run": {"steps": 1}}, "run.steps.x=3")


def test_a_missing_package_is_named_with_its_command(
    capsys: pytest.CaptureFixture[str], run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "xmoe.training.run", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    code, _, err = run(capsys, "train", "--config", str(run_file))
    assert code == 2
    assert "torch is not installed: pip install torch" in err


def test_schema_and_check_import_no_torch(run_file: Path) -> None:
    script = """
import sys
sys.modules["torch"] = sys.modules["deepspeed"] = sys.modules["numpy"] = None
from xmoe.launch.cli import main
for arguments in (["config", "--schema"], ["config", "--check", sys.argv[1]], ["--help"]):
    sys.argv[1:] = arguments
    try:
        main()
    except SystemExit as stop:
        assert not stop.code, arguments
    print("done", arguments)
"""
    command = [sys.executable, "-P", "-c", script, str(run_file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("done ['") == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "error: data.paths[0] is 'nowhere': no such file or folder"),
        (("--resume",), "no complete checkpoint"),
        (("--resume", "--overwrite"), "error: --resume is True: excludes --overwrite"),
        (("--set", "model.ep_size=2"), "error: model.ep_size is 2: must divide the number of ranks (1)"),
    ],
)
@pytest.mark.dist
def test_mistakes_that_need_torch_to_be_found(run_file: Path, arguments: tuple[str, ...], message: str) -> None:
    if arguments == ("--resume",):
        text = run_file.parent / "text"
        text.mkdir()
        for i in range(2):
            (text / f"{i}.txt").write_text(f"{i}" * 1000)
        arguments = (*arguments, "--set", f'data.paths=["{text}"]')
    before = sorted(run_file.parent.rglob("*"))
    [(code, errors)] = run_ranks(1, train_on_this_rank, str(run_file), arguments)
    assert code == 2
    assert message in errors
    assert errors.count("\n") == 1
    assert sorted(run_file.parent.rglob("*")) == before


def train_on_this_rank(run_file: str, arguments: tuple[str, ...]) -> tuple[object, str]:
    """A process of its own, since the command makes a process group."""
    os.chdir(Path(run_file).parent)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    sys.argv = ["xmoe", "train", "--config", run_file, *arguments]
    with contextlib.redirect_stderr(io.StringIO()) as errors:
        try:
            cli.main()
        except SystemExit as stop:
            return stop.code, errors.getvalue()
    return 0, errors.getvalue()
