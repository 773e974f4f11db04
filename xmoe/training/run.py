"""One run of ``xmoe train`` on one rank, from start-up to the last picture."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import importlib.util
import json
import logging
import os
import random
import shutil
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from xmoe.config import ConfigError, TrainConfig
from xmoe.files import replacing
from xmoe.groups import TensorParallelUnit, raise_together
from xmoe.integrations.deepspeed import MoE, init_distributed, initialize
from xmoe.integrations.deepspeed.activation import activation_checkpoint
from xmoe.models.flops import count_flops
from xmoe.models.transformer import Transformer

from . import checkpoints
from .baselines import measure_baselines
from .corpus import Corpus, Split, check_length, open_corpus, plan_corpus, write_corpus
from .display import Display
from .loop import Trainer, agreed_to_stop
from .metrics_file import MetricsFile, trim_after
from .sampler import Sampler
from .stop import StopRequest
from .validate import without_routed_experts

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Settings of the model that a resumed run may change: they shape neither a parameter nor what it means.
_CHANGEABLE = {"activation_checkpointing", "aux_loss_weight", "capacity_factor", "init_std"}


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """What the command line asked for on this rank.

    ``config``  the validated run file, or the error that reading it gave: the ranks first meet, then all raise it
    """

    config: TrainConfig | Exception
    resume: bool
    overwrite: bool
    runs_folder: Path = Path("runs")


def run(request: RunRequest, stop: StopRequest) -> None:
    """Trains as requested. Collective over the ranks of the launcher.

    Raises the same ConfigError on every rank for a wrong setting on any of them, before anything is written.
    """
    _quiet_libraries()
    init_distributed()
    try:
        _run(request, stop)
    finally:
        stop.ignore_further()
        # With a dead launcher its store is gone too, and tearing down may complain about that.
        with contextlib.suppress(Exception):
            dist.destroy_process_group()


def _quiet_libraries() -> None:
    """Keeps remarks of the libraries that no user of this command can act on out of its output."""
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    if not logger.isEnabledFor(logging.INFO):
        first = os.environ.get("RANK", "0") == "0"
        logging.getLogger("DeepSpeed").setLevel(logging.WARNING if first else logging.ERROR)
        # Said in every initialize with a scheduler, before the scheduler's own first step.
        logging.getLogger("DeepSpeed").addFilter(lambda record: "before it has started" not in record.getMessage())


def _run(request: RunRequest, stop: StopRequest) -> None:
    raise_together(request.config if isinstance(request.config, Exception) else None)
    config: TrainConfig = request.config  # type: ignore[assignment]
    _together(lambda: _check_across_ranks(request, config))
    folder = request.runs_folder / config.run.name
    split = _together(lambda: _plan_run(request, config, folder), only_rank=0)
    if request.resume:
        _together(lambda: checkpoints.newest(folder / "checkpoints"))

    seed_everything(config.run.seed, data_rank=dist.get_rank() // config.model.tp_size)
    ds_config = _together(lambda: _deepspeed_config(config, folder), only_rank=0)
    engine = _build_engine(config, ds_config, vocab_size=split.vocabulary.size)
    made_with = _made_with(config, engine, fingerprint=split.fingerprint())
    checkpoint = _together(lambda: _check_checkpoint(config, folder, made_with)) if request.resume else None

    cache = _together(lambda: write_corpus(split, config.data.cache_dir), only_rank=0)
    corpus = _together(lambda: _open_corpus(config, cache))
    first_step = checkpoints.load(engine, checkpoint) if checkpoint else 0
    display = Display(active=dist.get_rank() == 0, num_steps=config.run.steps)
    if agreed_to_stop(stop, engine.device):
        display.say(f"stopped before the first step ({stop.reason or 'another rank was asked to'})")
        return
    metrics = _together(lambda: _open_run(config, folder, first_step=first_step), only_rank=0, share=False)
    trainer = Trainer(
        engine=engine,
        config=config,
        corpus=corpus,
        sampler=_make_sampler(config, engine, corpus),
        flops=count_flops(config.model, vocab_size=split.vocabulary.size, sequence_length=config.data.sequence_length),
        stop=stop,
        display=display,
        metrics=metrics,
        checkpoint_folder=folder / "checkpoints",
        made_with=made_with,
    )
    _announce(display, config, engine, corpus, first_step=first_step)
    if metrics is not None and not first_step:
        metrics.write("baseline", step=0, **asdict(measure_baselines(corpus.held_out_bytes)))
    if trainer.train(first_step=first_step):
        _finish(trainer, folder)
    else:
        display.say(f"stopped ({stop.reason or 'another rank was asked to'}); continue with --resume")
    if metrics is not None:
        metrics.close()


def _together(action: Callable[[], T], *, only_rank: int | None = None, share: bool = True) -> T:
    """Runs ``action`` on every rank, or on one; an error of any rank is raised on all of them.

    With ``only_rank`` its result is sent to the other ranks, or, with ``share=False``, they get None.
    """
    error: Exception | None = None
    result: Any = None
    if only_rank is None or dist.get_rank() == only_rank:
        try:
            result = action()
        except (ValueError, RuntimeError, OSError) as problem:
            error = problem
    raise_together(error)
    if only_rank is not None and share:
        box = [result]
        dist.broadcast_object_list(box, src=only_rank)
        result = box[0]
    return result


def _check_across_ranks(request: RunRequest, config: TrainConfig) -> None:
    """Raises ConfigError on a rank whose settings differ from rank 0's, or cannot be laid out on this world."""
    world = dist.get_world_size()
    mine = json.dumps(config.model_dump(mode="json"), sort_keys=True) + repr((request.resume, request.overwrite))
    digests: list[str] = [""] * world
    dist.all_gather_object(digests, hashlib.sha256(mine.encode()).hexdigest())
    if digests[dist.get_rank()] != digests[0]:
        raise ConfigError(
            "--config",
            f"other settings on rank {dist.get_rank()} than on rank 0",
            "start every rank with the same",
        )
    for key in ("ep_size", "tp_size"):
        size = getattr(config.model, key)
        if world % size:
            raise ConfigError(
                f"model.{key}", size, f"must divide the number of ranks ({world}); start more or lower it"
            )


def _plan_run(request: RunRequest, config: TrainConfig, folder: Path) -> Split:
    """Checks the run's folder and plans its data; writes nothing."""
    if request.resume and request.overwrite:
        raise ConfigError("--resume", True, "excludes --overwrite; give one of them")
    if not (request.resume or request.overwrite) and (folder / "metrics.jsonl").exists():
        raise ConfigError(
            "run.name",
            config.run.name,
            f"{folder} already holds a run; continue it with --resume, replace it with --overwrite, or choose "
            "another --name",
        )
    return plan_corpus(config.data)


def seed_everything(seed: int, *, data_rank: int) -> None:
    """Seeds this rank's noise, which ranks of other tokens draw otherwise; weights have generators of their own."""
    random.seed(seed + data_rank)
    np.random.seed((seed + data_rank) % 2**32)
    torch.manual_seed(seed + data_rank)


def _open_corpus(config: TrainConfig, cache: Path) -> Corpus:
    corpus = open_corpus(cache)
    for side, stream in (("training", corpus.train), ("held-out", corpus.held_out)):
        check_length(config.data, side, len(stream), "tokens")
    return corpus


def _build_engine(config: TrainConfig, ds_config: dict[str, Any], *, vocab_size: int) -> Any:
    model = Transformer(
        config.model,
        MoE,
        vocab_size=vocab_size,
        seed=config.run.seed,
        deepspeed_checkpoint=activation_checkpoint,
    )
    mpu = TensorParallelUnit(config.model.tp_size) if config.model.tp_size > 1 else None
    try:
        engine, *_ = initialize(model=model, model_parameters=list(model.parameters()), config=ds_config, mpu=mpu)
    except AssertionError as error:
        # DeepSpeed's way of refusing its own settings, the same on every rank.
        logger.debug("DeepSpeed refused its settings", exc_info=True)
        raise ConfigError(
            "--config", "the DeepSpeed settings", f"refused by DeepSpeed: {checkpoints.first_line(error)}"
        ) from None
    return engine


def _deepspeed_config(config: TrainConfig, folder: Path) -> dict[str, Any]:
    """DeepSpeed's part of the run file, with what only the run knows filled in.

    ``"auto"`` as the scheduler's ``total_num_steps`` is ``run.steps``; the CSV and TensorBoard monitors write into the
    run's folder unless they have an ``output_path``. Where the package tensorboard is missing, which DeepSpeed would
    crash on, CSV files take its place. Asked of rank 0 only, which alone writes.
    """
    content = copy.deepcopy(config.deepspeed)
    parameters = content.get("scheduler", {}).get("params", {})
    if parameters.get("total_num_steps") == "auto":
        parameters["total_num_steps"] = config.run.steps
    if content.get("tensorboard", {}).get("enabled") and importlib.util.find_spec("tensorboard") is None:
        logger.warning("no TensorBoard files without the package tensorboard (pip install tensorboard): CSV instead")
        content["tensorboard"] = {"enabled": False}
        content["csv_monitor"] = content.get("csv_monitor", {}) | {"enabled": True}
    for monitor, name in (("csv_monitor", "csv"), ("tensorboard", "tensorboard")):
        settings = content.get(monitor, {})
        if settings.get("enabled") and not settings.get("output_path"):
            content[monitor] = settings | {"output_path": str(folder), "job_name": name}
    return content


def _made_with(config: TrainConfig, engine: Any, *, fingerprint: str) -> dict[str, Any]:
    """What must be the same for a checkpoint to continue, by JSON path where there is one."""
    # A size of 1 goes unsaid, as in checkpoints older than the setting.
    left_out = _CHANGEABLE | ({"tp_size"} if config.model.tp_size == 1 else set())
    return {
        "model": config.model.model_dump(exclude=left_out),
        "data": {
            "text": fingerprint,
            "seed": config.data.seed,
            "sequence_length": config.data.sequence_length,
        },
        "ranks": dist.get_world_size(),
        "train_micro_batch_size_per_gpu": engine.train_micro_batch_size_per_gpu(),
        "gradient_accumulation_steps": engine.gradient_accumulation_steps(),
        "zero_optimization": {"stage": engine.zero_optimization_stage()},
        "dtype": str(next(engine.module.parameters()).dtype),
    }


def _check_checkpoint(config: TrainConfig, folder: Path, made_with: dict[str, Any]) -> Path:
    checkpoint = checkpoints.newest(folder / "checkpoints")
    step = checkpoints.check(checkpoint, made_with, rank=dist.get_rank(), world=dist.get_world_size())
    if step > config.run.steps:
        raise ConfigError("run.steps", config.run.steps, f"{checkpoint} has more; ask for at least {step}")
    return checkpoint


def _open_run(config: TrainConfig, folder: Path, *, first_step: int) -> MetricsFile:
    """Creates or clears the run's folder; on a resumed run, removes what will be written again."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        metrics = folder / "metrics.jsonl"
        if first_step:
            removed = trim_after(metrics, first_step, finished=first_step == config.run.steps)
            logger.info("%d lines after step %d removed from %s", removed, first_step, metrics)
        else:
            events = [p for p in folder.glob("tensorboard/events.*") if f".{os.getpid()}." not in p.name]  # not ours
            for stale in (metrics, *folder.glob("*.png"), *folder.glob("csv/*.csv"), *events):
                stale.unlink(missing_ok=True)
            shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        with replacing(folder / "config.json") as scratch:
            content = config.deepspeed | config.model_dump(mode="json", include={"xmoe", "model", "data", "run"})
            scratch.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        return MetricsFile(metrics)
    except OSError as error:
        raise ConfigError(
            "run.name",
            config.run.name,
            f"{folder} cannot be written ({error.strerror}); work in a writable folder",
        ) from None


def _make_sampler(config: TrainConfig, engine: Any, corpus: Corpus) -> Sampler:
    return Sampler(
        num_tokens=len(corpus.train),
        sequence_length=config.data.sequence_length,
        seed=config.data.seed,
        micro_batch=engine.train_micro_batch_size_per_gpu(),
        accumulation=engine.gradient_accumulation_steps(),
        world=dist.get_world_size() // config.model.tp_size,
    )


def _announce(display: Display, config: TrainConfig, engine: Any, corpus: Corpus, *, first_step: int) -> None:
    model = config.model
    num_parameters = torch.tensor(
        [
            sum(p.numel() for n, p in engine.module.named_parameters() if ("deepspeed_experts" in n) == routed)
            for routed in (False, True)
        ]
    ).tolist()
    display.say(
        f"{num_parameters[0] + num_parameters[1] * model.ep_size:,} parameters: {model.num_layers} layers, "
        f"{model.num_layers - model.num_dense_layers} of them with {model.num_experts} experts, top-{model.top_k}; "
        f"{dist.get_world_size()} ranks, expert parallel {model.ep_size}, "
        + (f"tensor parallel {model.tp_size}, " if model.tp_size > 1 else "")
        + f"ZeRO {engine.zero_optimization_stage()}"
    )
    num_bytes = [
        round(len(corpus.train) * corpus.train_bytes_per_token),
        round(len(corpus.held_out) * corpus.held_out_bytes_per_token),
    ]
    tokens = "" if config.data.tokenizer is None else f", in {len(corpus.train):,} and {len(corpus.held_out):,} tokens"
    display.say(f"{num_bytes[0]:,} bytes of training text, {num_bytes[1]:,} held out{tokens}")
    if first_step:
        display.say(f"resumed after step {first_step}")


def _finish(trainer: Trainer, folder: Path) -> None:
    """Final validations, baselines, table and pictures."""
    config = trainer.config
    full_bits = trainer.validate(config.run.final_eval_sequences)
    with without_routed_experts(trainer.engine.module):
        ablated_bits = trainer.validate(config.run.final_eval_sequences)
    trainer.report_final_validation(full_bits)
    if trainer.metrics is None:
        return
    baselines = measure_baselines(trainer.corpus.held_out_bytes)
    results = [
        ("train.val_bits_per_byte", full_bits),
        ("train.bigram_bits_per_byte", baselines.bigram_bits_per_byte),
        ("train.val_bits_without_routed_experts", ablated_bits),
    ]
    for metric, value in results:
        trainer.metrics.write("final", step=config.run.steps, metric=metric, value=value, unit="bits/byte")
    pictures = _draw(folder)
    trainer.display.summary(
        f"{folder}: {config.run.steps} steps",
        [
            ("validation loss", f"{full_bits:.3f} bits/byte"),
            ("H(next byte | byte) of the held-out text", f"{baselines.bigram_bits_per_byte:.3f} bits/byte"),
            ("H(next byte) of the held-out text", f"{baselines.unigram_bits_per_byte:.3f} bits/byte"),
            ("validation loss without routed experts", f"{ablated_bits:.3f} bits/byte"),
            ("they are worth", f"{ablated_bits - full_bits:.3f} bits/byte"),
            ("metrics", str(folder / "metrics.jsonl")),
            *(("picture", str(path)) for path in pictures),
        ],
    )


def _draw(folder: Path) -> list[Path]:
    try:
        from .pictures import draw_all
    except ImportError:
        logger.warning('no pictures without matplotlib: pip install "xmoe[train]"')
        return []
    return draw_all(folder / "metrics.jsonl", folder)
