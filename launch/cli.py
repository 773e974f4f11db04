"""The ``xmoe`` command. Nothing here imports torch before a sub-command needs it."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from xmoe import __version__
from xmoe.config import ConfigError, TrainConfig, json_schema, read_json, read_train_config

from .bench_cli import bench
from .env import ProcessPlace, find_place, is_launched
from .kernels_cli import kernels

logger = logging.getLogger(__name__)

USER_ERROR = 2
_LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
_INSTALL = {
    "torch": 'pip install torch  (CPU: add "--index-url https://download.pytorch.org/whl/cpu"; on a ROCm or CUDA '
    "machine use its own build)",
    "deepspeed": 'pip install "deepspeed>=0.19.8,<0.20"',
    "tokenizers": "pip install tokenizers",
    "matplotlib": "pip install matplotlib",
    "triton": "a ROCm or CUDA build of torch brings its own; elsewhere pip install triton",
    "mpi4py": 'build it for the MPI of this machine, "pip install --no-binary mpi4py mpi4py" (a machine without MPI: '
    '"pip install mpi4py mpich"), or set MASTER_ADDR and MASTER_PORT',
}

app = typer.Typer(
    name="xmoe",
    help="Mixture-of-experts training with DeepSpeed.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Entry point of the console script. A user's mistake is one line on stderr and exit code 2."""
    # The deepspeed launcher puts --local_rank=N first; LOCAL_RANK says the same.
    arguments = [a for a in sys.argv[1:] if not a.startswith(("--local_rank=", "--local-rank="))]
    try:
        app(args=arguments)
    except ValueError as error:
        logger.debug("the error came from here", exc_info=True)
        _fail(str(error))
    except ModuleNotFoundError as error:
        package = (error.name or "").split(".")[0]
        if package not in _INSTALL:
            raise
        _fail(f"{package} is not installed: {_INSTALL[package]}")


def _fail(message: str) -> None:
    sys.stderr.write(f"error: {' '.join(message.split())}\n")
    raise SystemExit(USER_ERROR)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"xmoe {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    level = os.environ.get("XMOE_LOG", "WARNING").upper()
    if level not in _LOG_LEVELS:
        raise ConfigError("XMOE_LOG", level, f"must be one of {', '.join(_LOG_LEVELS)}")
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("xmoe").setLevel(level)


@app.command()
def train(
    config: Annotated[Path, typer.Option(help="Run file: a DeepSpeed JSON with xmoe, model, data and run sections.")],
    name: Annotated[str | None, typer.Option(help="Write to runs/NAME; overrides run.name.")] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps; overrides run.steps.")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override one setting (VALUE is JSON)."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the run's newest checkpoint.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier run of this name.")] = False,
) -> None:
    """Train the reference model; start it once per rank with torchrun, deepspeed, srun or mpiexec."""
    from xmoe.training.stop import StopRequest

    stop = StopRequest.install(launched=is_launched(os.environ))
    place = find_place(os.environ)
    overrides = [*(set_ or [])]
    overrides += [f"run.name={json.dumps(name)}"] if name is not None else []
    overrides += [f"run.steps={steps}"] if steps is not None else []
    settings = _read_settings(config, overrides, place)
    place.export(os.environ)

    from xmoe.training.run import RunRequest, run

    run(RunRequest(config=settings, resume=resume, overwrite=overwrite), stop)


def _read_settings(path: Path, overrides: list[str], place: ProcessPlace) -> TrainConfig | Exception:
    """The run file with its overrides; in a world of several ranks an error is returned, for all to raise."""
    try:
        content = read_json(path)
        for override in overrides:
            apply_override(content, override)
        return read_train_config(content)
    except ConfigError as error:
        if place.world_size == 1:
            raise
        return error


def apply_override(content: dict[str, Any], override: str) -> None:
    """Sets one value of a JSON object in place: ``apply_override(content, "run.steps=10")``.

    The value is JSON where it parses, else a string. Raises ConfigError when the path is empty or leads through
    something that is no object.
    """
    path, equals, text = override.partition("=")
    keys = path.split(".")
    if not equals or not all(keys):
        raise ConfigError("--set", override, "must read section.key=value")
    try:
        value = json.loads(text)
    except ValueError:
        value = text
    for depth, key in enumerate(keys[:-1], start=1):
        content = content.setdefault(key, {})
        if not isinstance(content, dict):
            raise ConfigError("--set", override, f"{'.'.join(keys[:depth])} is no JSON object")
    content[keys[-1]] = value


@app.command()
def config(
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema of all xmoe sections.")] = False,
    check: Annotated[Path | None, typer.Option(help="Check a run file without training.")] = None,
) -> None:
    """Print the configuration schema, or check a file."""
    if schema == (check is not None):
        raise ConfigError("xmoe config", _given(schema=schema, check=check), "give either --schema or --check FILE")
    if schema:
        typer.echo(json.dumps(json_schema(), indent=2))
    elif check is not None:
        read_train_config(read_json(check))
        typer.echo(f"{check}: no mistake in the sections of xmoe")


tokenizer = typer.Typer(help="Make a tokenizer for data.tokenizer.", no_args_is_help=True)
app.add_typer(tokenizer, name="tokenizer")
app.add_typer(kernels, name="kernels")
app.add_typer(bench, name="bench")


@tokenizer.callback()
def _tokenizer_options() -> None:
    """Keeps ``train`` a sub-command: typer runs a lone command without its name."""


@tokenizer.command("train")
def train_tokenizer(
    vocab_size: Annotated[int, typer.Option(help="Tokens, the 256 bytes and the end of a text included.")],
    out: Annotated[Path, typer.Option(help="The tokenizer.json to write; an older one is replaced.")],
    config: Annotated[Path | None, typer.Option(help="Run file whose training text to use.")] = None,
    paths: Annotated[list[str] | None, typer.Option(help="Text file or folder; may be given several times.")] = None,
) -> None:
    """Train a byte-level BPE on a run's training text (not on what the run holds out)."""
    from xmoe.training import corpus
    from xmoe.training.tokenizer import check_vocab_size, train_tokenizer, whole_lines

    check_vocab_size(vocab_size)
    content = read_json(config) if config is not None else {}
    data = dict(content.get("data", {})) | ({"paths": paths} if paths else {}) | {"tokenizer": None}
    settings = read_train_config(content | {"data": data}).data
    split = corpus.plan_corpus(settings, only_utf8=True)
    texts = (piece for file in split.train for piece in whole_lines(corpus.read_unchanged(file)))
    size = train_tokenizer(texts, vocab_size=vocab_size, target=out)
    num_bytes = sum(file.num_bytes for file in split.train)
    typer.echo(f"{out}: {size} tokens, from {num_bytes:,} bytes in {len(split.train)} files")


def _given(**options: object) -> Mapping[str, object]:
    return {name: value for name, value in options.items() if value}


if __name__ == "__main__":
    main()
