"""Every JSON key of xmoe, once: the ``xmoe``, ``model``, ``data`` and ``run`` sections of a DeepSpeed JSON.

A DeepSpeed user needs only the ``xmoe`` section, all of whose keys have defaults. ``xmoe train`` reads the other
three as well. ``xmoe config --schema`` prints the JSON schema made from these classes.

Every mistake is one :class:`ConfigError` naming the JSON path, the value found and what is allowed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

# Settings of xmoe.MoE that create or shape parameters. They are arguments of the constructor and never JSON keys:
# a model exists before DeepSpeed reads its JSON.
CONSTRUCTOR_ONLY: Mapping[str, str] = {
    "hidden_size": "model width",
    "num_experts": "experts of the layer",
    "ep_size": "ranks of the expert-parallel group",
    "k": "experts selected per token",
    "use_residual": "residual MoE",
    "shared_mlp": "module applied to every token (shared experts)",
    "shared_gate": "sigmoid gate on the shared experts",
    "correction_bias": "auxiliary-loss-free balancing bias (a saved buffer)",
    "expert_init": "function that initialises each expert by its logical id",
}


class ConfigError(ValueError):
    """A wrong setting: ``path`` is where it stands, ``value`` what was found, ``allowed`` what is allowed."""

    def __init__(self, path: str, value: object, allowed: str) -> None:
        self.path, self.value, self.allowed = path, value, allowed
        super().__init__(f"{path} is {_shown(value)}: {allowed}")

    def __reduce__(self) -> tuple[Any, ...]:
        # Errors travel between ranks by pickle (xmoe.groups.raise_together).
        return type(self), (self.path, self.value, self.allowed)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class XMoEConfig(_Section):
    """The ``"xmoe"`` section: settings of every xmoe layer of the model."""

    model_config = ConfigDict(
        json_schema_extra={"x-constructor-only": dict(CONSTRUCTOR_ONLY)},
    )

    dispatch: Literal["auto", "local", "flat", "gpu", "node", "node+gpu"] = Field(
        "auto",
        description="How often a token's row is sent: once to each expert ('flat'), to each GPU ('gpu'), to each node "
        "and inside it to each expert ('node') or GPU ('node+gpu'); 'local' (ep_size 1 only) moves nothing; 'auto' is "
        "'local' at ep_size 1, above it what is predicted to be fastest on the links that 'xmoe bench links' measured, "
        "and 'flat' where nobody measured them.",
    )
    ranks_per_node: int | None = Field(
        None,
        ge=1,
        description="Consecutive ranks of the job that share a node, for 'node' and 'node+gpu' and for traffic "
        "metrics; null: ranks of one host name do.",
    )
    overlap_chunks: int = Field(
        1,
        ge=1,
        le=64,
        description="Chunks that a layer's tokens are cut into, so that rows of one are under way while the experts "
        "compute another; results are the same but for rounding. With 1, rows are under way while shared experts "
        "compute, and are otherwise waited for.",
    )
    stage_times: bool = Field(
        False,
        description="Time each layer's stages (route, plan, dispatch, experts, combine, their backwards, and waits for "
        "exchanges in them) for metrics.",
    )
    sequence_shard: bool = Field(
        False,
        description="Under tensor parallelism: each rank routes, sends and computes a slice of the tokens, shared "
        "experts too, and all get all results; false: each routes and keeps all tokens, and sends every n-th.",
    )
    kernels: Literal["auto", "torch", "triton"] = Field(
        "auto",
        description="What computes the layer: 'triton' kernels, their PyTorch twins ('torch'), or Triton on a GPU and "
        "the twins on a CPU ('auto').",
    )
    strict_compat: bool = Field(
        False,
        description="Reproduce the numerics of deepspeed.moe.layer.MoE, its random draws and its faults included.",
    )
    score_function: Literal["softmax", "sigmoid"] = Field("softmax", description="Router scores from logits.")
    normalize_weights: bool | None = Field(
        None,
        description="Divide a token's combine weights by their sum; null is DeepSpeed's rule: at k > 1 only.",
    )
    num_expert_groups: int | None = Field(
        None,
        ge=1,
        description="Group-limited (node-limited) routing: the experts in this many equal groups of consecutive ids. "
        "A token takes experts of num_limited_groups groups only; null: of any. With num_expert_groups = ep_size it "
        "sends to at most that many ranks.",
    )
    num_limited_groups: int | None = Field(
        None, ge=1, description="Groups whose experts a token may take; needs num_expert_groups."
    )
    group_score: Literal["top2_sum", "max"] = Field(
        "top2_sum",
        description="What ranks the groups: the sum of a group's two best scores, correction bias included "
        "(DeepSeek-V3), or its best score (DeepSeek-V2).",
    )
    routed_scaling_factor: float = Field(1.0, gt=0, description="Factor on all combine weights.")
    aux_loss_coefficient: float = Field(
        1.0,
        ge=0,
        description="Factor on the load-balancing loss inside the returned l_aux; the training script's own "
        "coefficient multiplies l_aux as with DeepSpeed.",
    )
    aux_loss_scope: Literal["micro_batch", "sequence", "global_batch"] = Field(
        "micro_batch",
        description="Tokens whose selections the load-balancing loss balances: this rank's of one forward (DeepSpeed); "
        "each sequence's, for hidden states [..., sequence, hidden] (DeepSeek-V3); or those of the whole global batch, "
        "by the selections of the last optimizer step.",
    )
    z_loss_coefficient: float = Field(
        0.0, ge=0, description="Factor on mean(logsumexp(logits)^2) inside the returned l_aux."
    )
    correction_bias_update_rate: float = Field(
        1e-3,
        ge=0,
        description="Step of the auxiliary-loss-free bias, once per optimizer step; needs correction_bias=True "
        "in the constructor.",
    )
    input_jitter: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Training only: multiply the router's input by uniform noise in [1 - x, 1 + x].",
    )
    drop_policy: Literal["probs", "position", "random"] | None = Field(
        None,
        description="Which assignments an expert over capacity keeps: highest score, first in the batch, or random; "
        "null is DeepSpeed's: random (use_rts) or position at k=1, position at k=2, probs above.",
    )
    force_balance: bool = Field(
        False, description="Benchmarks only: route slot s to expert s mod E, whatever the scores."
    )
    self_row_guard: Literal["auto", "on", "off"] = Field(
        "auto",
        description="Send one dummy row from a rank to itself when it would send or receive nothing: RCCL releases "
        "without the zero-byte fix hang otherwise. 'auto' is on under ROCm.",
    )
    collective_timeout_s: float = Field(
        600.0,
        gt=0,
        description="Seconds after which a waiting collective of an xmoe layer reports its name, layer and rank; "
        "on CPU tensors it is an error then.",
    )

    @model_validator(mode="before")
    @classmethod
    def _refuse_constructor_only(cls, section: Any) -> Any:
        for key in section if isinstance(section, Mapping) else ():
            if key in CONSTRUCTOR_ONLY:
                raise ConfigError(
                    f"xmoe.{key}",
                    section[key],
                    "this setting creates parameters and is constructor-only: "
                    f"pass {key}=... to xmoe.MoE and remove it from the JSON",
                )
        return section


class ModelConfig(_Section):
    """The ``"model"`` section: the reference DeepSeek-style decoder that ``xmoe train`` trains."""

    hidden_size: int = Field(128, gt=0, description="Model width.")
    num_layers: int = Field(4, gt=0, description="Decoder blocks, dense and MoE together.")
    num_dense_layers: int = Field(1, ge=0, description="The first blocks have a dense MLP instead of experts.")
    num_heads: int = Field(4, gt=0, description="Query heads of the attention.")
    num_kv_heads: int = Field(2, gt=0, description="Key/value heads (grouped-query attention).")
    dense_ffn_size: int = Field(384, gt=0, description="Width of a dense block's SwiGLU MLP.")
    num_experts: int = Field(32, gt=0, description="Routed experts of each MoE block.")
    top_k: int = Field(4, gt=0, description="Routed experts per token.")
    expert_ffn_size: int = Field(64, gt=0, description="Width of one routed expert.")
    expert_activation: Literal["swiglu", "gelu"] = Field("swiglu", description="MLP of the routed experts.")
    num_shared_experts: int = Field(
        1, ge=0, description="Shared experts, one MLP of num_shared_experts * expert_ffn_size."
    )
    shared_gate: bool = Field(False, description="Sigmoid gate on the shared experts.")
    ep_size: int = Field(1, gt=0, description="Ranks of the expert-parallel group.")
    tp_size: int = Field(
        1,
        gt=0,
        description="Ranks of a tensor-parallel group: they train on the same tokens, each with all of the model but "
        "the experts. With xmoe.sequence_shard each computes a slice of the tokens in the MoE blocks.",
    )
    capacity_factor: float | None = Field(
        None, gt=0, description="Expert capacity in units of the mean load; null drops nothing."
    )
    correction_bias: bool = Field(False, description="Auxiliary-loss-free balancing bias.")
    aux_loss_weight: float = Field(
        0.01, ge=0, description="Factor on the sum of the layers' l_aux in the training loss."
    )
    tie_embeddings: bool = Field(False, description="Use the token embedding as the output head too.")
    rope_theta: float = Field(10000.0, gt=0, description="Base of the rotary position embedding.")
    norm_eps: float = Field(1e-5, gt=0, description="Epsilon of RMSNorm.")
    init_std: float = Field(0.02, gt=0, description="Standard deviation of the initial weights.")
    activation_checkpointing: Literal["none", "reentrant", "non_reentrant", "deepspeed"] = Field(
        "none", description="Recompute each block in backward, and by which implementation."
    )

    @model_validator(mode="after")
    def _consistent(self) -> ModelConfig:
        checks = [
            (
                "hidden_size",
                self.hidden_size % self.num_heads == 0,
                f"must be a multiple of num_heads ({self.num_heads})",
            ),
            (
                "num_heads",
                self.num_heads % self.num_kv_heads == 0,
                f"must be a multiple of num_kv_heads ({self.num_kv_heads})",
            ),
            (
                "num_heads",
                (self.hidden_size // self.num_heads) % 2 == 0,
                f"rotary embedding needs an even head width, hidden_size / num_heads is "
                f"{self.hidden_size / self.num_heads:g}",
            ),
            (
                "num_dense_layers",
                self.num_dense_layers <= self.num_layers,
                f"must be at most num_layers ({self.num_layers})",
            ),
            ("top_k", self.top_k <= self.num_experts, f"must be at most num_experts ({self.num_experts})"),
            (
                "num_experts",
                self.num_experts % self.ep_size == 0,
                f"must be a multiple of ep_size ({self.ep_size})",
            ),
            (
                "ep_size",
                self.ep_size % self.tp_size == 0,
                f"must be a multiple of tp_size ({self.tp_size}): ranks that hold the same experts then have the same "
                "place in their tensor-parallel groups, by which DeepSpeed names the experts' checkpoint files",
            ),
        ]
        for key, holds, allowed in checks:
            if not holds:
                raise ConfigError(f"model.{key}", getattr(self, key), allowed)
        return self


class DataConfig(_Section):
    """The ``"data"`` section: which text ``xmoe train`` reads, and in which tokens."""

    paths: list[str] | None = Field(
        None,
        min_length=1,
        description="Text files or folders; null is the running Python's standard library.",
    )
    suffixes: list[str] = Field(
        [".py", ".txt", ".md", ".rst"], min_length=1, description="File name endings read from folders."
    )
    tokenizer: str | None = Field(
        None,
        description="A tokenizer.json of Hugging Face tokenizers ('xmoe tokenizer train' makes one); null: bytes. "
        "The model's vocabulary follows it.",
    )
    sequence_length: int = Field(256, gt=1, description="Tokens of one training sequence.")
    held_out_fraction: float = Field(
        0.05, gt=0, lt=1, description="Share of the bytes kept for validation, by whole files."
    )
    seed: int = Field(1234, ge=0, description="Seed of the split and of the sampling order.")
    cache_dir: str = Field(".cache/xmoe", description="Folder of the packed, memory-mapped token cache.")


class RunConfig(_Section):
    """The ``"run"`` section: how long ``xmoe train`` trains and where it writes."""

    name: str = Field("train", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="Results are written to runs/NAME.")
    steps: int = Field(300, gt=0, description="Optimizer steps.")
    eval_interval: int = Field(50, gt=0, description="Steps between validations.")
    eval_sequences: int = Field(64, gt=0, description="Held-out sequences of one validation, over all ranks.")
    final_eval_sequences: int = Field(
        256, gt=0, description="Held-out sequences of the validations after the last step, over all ranks."
    )
    save_interval: int | None = Field(
        None, gt=0, description="Steps between checkpoints; null saves only at the end and on a signal."
    )
    log_interval: int = Field(1, gt=0, description="Steps between lines of metrics.jsonl.")
    seed: int = Field(1234, ge=0, description="Seed of the initial weights and of training noise.")


class TrainConfig(BaseModel):
    """A whole run file: DeepSpeed's own JSON and the four sections."""

    model_config = ConfigDict(frozen=True)

    deepspeed: dict[str, Any]
    xmoe: XMoEConfig
    model: ModelConfig
    data: DataConfig
    run: RunConfig


SECTIONS: Mapping[str, type[_Section]] = {
    "xmoe": XMoEConfig,
    "model": ModelConfig,
    "data": DataConfig,
    "run": RunConfig,
}

S = TypeVar("S", bound=_Section)


def parse_section(name: str, cls: type[S], section: object) -> S:
    """Validates one JSON section. Raises ConfigError for the first mistake, with its path."""
    if section is None:
        section = {}
    if not isinstance(section, Mapping):
        raise ConfigError(name, section, "must be a JSON object")
    try:
        return cls.model_validate(dict(section), strict=True)
    except ValidationError as error:
        raise _config_error(name, cls, error) from None


def _config_error(name: str, cls: type[_Section], error: ValidationError) -> ConfigError:
    first = error.errors()[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, ConfigError):
        return cause
    path = ".".join([name, *map(str, first["loc"])])
    if first["type"] == "extra_forbidden":
        known = ", ".join(sorted(cls.model_fields))
        return ConfigError(path, first["input"], f"unknown key; allowed in {name!r} are: {known}")
    return ConfigError(path, first["input"], first["msg"][0].lower() + first["msg"][1:])


def read_json(path: str | Path) -> dict[str, Any]:
    """Reads a JSON object. Raises ConfigError naming the file when it is missing, unreadable or no object."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError("--config", str(path), f"cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise ConfigError("--config", str(path), f"is not valid JSON ({error})") from None
    if not isinstance(content, dict):
        raise ConfigError("--config", str(path), "must hold a JSON object")
    return content


def read_xmoe_section(config: object) -> XMoEConfig:
    """The ``xmoe`` section of a DeepSpeed config given as a dict or as a path; defaults where it is absent."""
    content = config if isinstance(config, Mapping) else read_json(str(config))
    return parse_section("xmoe", XMoEConfig, content.get("xmoe"))


def read_train_config(content: Mapping[str, Any]) -> TrainConfig:
    """Splits a run file into DeepSpeed's own keys and the four validated sections.

    Raises ConfigError for the first mistake. The ``xmoe`` section stays in ``deepspeed`` too, where
    ``xmoe.initialize`` reads it like any other user's.
    """
    sections = {name: parse_section(name, cls, content.get(name)) for name, cls in SECTIONS.items()}
    own = {key: value for key, value in content.items() if key not in ("model", "data", "run")}
    return TrainConfig(deepspeed=own, **sections)


def json_schema() -> dict[str, Any]:
    """JSON schema of the four sections, for editors and for ``xmoe config --schema``."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "xmoe sections of a DeepSpeed JSON",
        "type": "object",
        "properties": {name: cls.model_json_schema() for name, cls in SECTIONS.items()},
    }
