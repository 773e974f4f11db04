"""One MoE layer on a CPU, forward and backward: time and memory against its peers at the same mathematics.

    python benchmarks/bench_layer.py [--json] [--rounds 15]

Correctness comes first: every peer's output and input gradient must equal xmoe's, or nothing is timed. Times are
medians of interleaved runs on 2 threads with a random upstream gradient. Each shape has a process of its own: what
earlier shapes leave in the heap decides how many page faults a layer's buffers cost. Saved bytes are those of all
tensors kept for backward (by storage; parameters excluded, the layer's input included).

Hidden states of a language model share a mean, and so their routing is uneven. The inputs here have a common mean of
0.2 standard deviations, which gives the loads a coefficient of variation of 0.3 to 0.4 (printed with each shape):
`make train` falls below that after about 200 steps and ends at 0.2, where an auxiliary loss has evened its loads.
All contestants get the same inputs; ``--mean 0`` makes loads even.

Figures of the metrics:

    layer.time_over_fastest_peer       against the fastest of the peers that compute the same
    layer.time_over_gemm_limit         against the experts' matrix products alone
    layer.saved_bytes_over_formula     against R*H*b + N*G*F*b + 4*T*E (R = T tokens; N = T*k; G = 2 if gated)
    layer.saved_bytes_over_deepspeed   against deepspeed.moe.layer.MoE without drops
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

from common import Result, Samples, fail, interleaved, report, versions

try:
    import torch
    import transformers  # noqa: F401
    from layer_peers import Activation, Shape, build, forward, gemm_limit
except ModuleNotFoundError as error:
    fail(f"the benchmark needs the package {error.name!r}: pip install -r requirements/test.txt")

from rich.console import Console
from rich.progress import track
from torch import Tensor, nn

SHAPES = (Shape(2048, 512, 352, 64, 6), Shape(1024, 768, 256, 128, 8), Shape(4096, 384, 512, 32, 4))
THREADS = 2
NO_PEERS = ("xmoe", "deepspeed_1.25", "gemm_limit")
TOLERANCE = 1e-4  # float32, sums of up to 4096 terms in another order


def check(layers: dict[str, nn.Module], x: Tensor, upstream: Tensor) -> None:
    """Output and input gradient of every contestant that drops nothing equal xmoe's."""
    found = {}
    for name, layer in layers.items():
        inputs = x.clone().requires_grad_()
        output = forward(layer, inputs)
        output.backward(upstream)
        found[name] = output.detach(), inputs.grad
    for name in layers.keys() - set(NO_PEERS):
        for what, actual, expected in zip(("output", "input gradient"), found[name], found["xmoe"], strict=True):
            worst = float((actual - expected).abs().max() / expected.abs().max())
            if not worst < TOLERANCE:
                fail(f"{name} disagrees with xmoe: relative error of the {what} {worst:.2g}")


def saved_bytes(layer: nn.Module, x: Tensor) -> int:
    """Bytes of the distinct storages that one forward keeps for backward, parameters excluded."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in layer.parameters()}
    inputs = x.clone().requires_grad_()
    storages = {inputs.untyped_storage().data_ptr(): inputs.untyped_storage().nbytes()}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        kept = forward(layer, inputs)  # alive until counted: a freed storage's address may come again
        total = sum(storages.values())
    del kept
    return total


def measure(shape: Shape, activation: Activation, rounds: int, mean: float) -> list[Result]:
    """All results of one shape and activation."""
    logging.disable(logging.WARNING)
    torch.set_num_threads(THREADS)
    layers = build(shape, activation)
    x = torch.randn(1, shape.T, shape.H) + mean * torch.randn(shape.H)
    upstream = torch.randn(1, shape.T, shape.H)
    check(layers, x, upstream)
    counts = layers["xmoe"](x)[2]
    loads = counts.float()
    setting = {
        **shape.setting(activation),
        "load_cv": round(float(loads.std(correction=0) / loads.mean()), 2),
        "max_over_mean_load": round(float(loads.max() / loads.mean()), 2),
    }

    def step(layer: nn.Module) -> None:
        inputs = x.detach().requires_grad_()
        forward(layer, inputs).backward(upstream)

    def contestant(layer: nn.Module):
        def run() -> None:
            layer.zero_grad(set_to_none=True)
            step(layer)

        return run

    runs = {name: contestant(layer) for name, layer in layers.items()}
    runs["gemm_limit"] = gemm_limit(layers["xmoe"], shape, activation, counts.tolist())
    samples = interleaved(runs, rounds=rounds)
    memory = {name: saved_bytes(layer, x) for name, layer in layers.items()}
    projections = 2 if activation == "swiglu" else 1
    formula = 4 * (shape.T * shape.H + shape.T * shape.k * projections * shape.F + shape.T * shape.E)
    return [*times(setting, samples), *bytes_kept(setting, memory, formula)]


def times(setting: dict[str, Any], samples: dict[str, Samples]) -> list[Result]:
    ours = samples["xmoe"].median_s
    peers = {name: found.median_s for name, found in samples.items() if name not in NO_PEERS}
    fastest = min(peers, key=peers.__getitem__)
    results = [
        Result(
            metric="layer.time",
            value=found.median_s,
            unit="s",
            better="lower",
            setting={**setting, "contestant": name, "samples": len(found.seconds), "discarded": found.discarded},
        )
        for name, found in samples.items()
    ]
    ratios = (
        ("layer.time_over_fastest_peer", ours / peers[fastest], {"fastest_peer": fastest}),
        ("layer.time_over_gemm_limit", ours / samples["gemm_limit"].median_s, {}),
    )
    return results + [
        Result(metric=metric, value=value, unit="ratio", better="lower", setting={**setting, **extra})
        for metric, value, extra in ratios
    ]


def bytes_kept(setting: dict[str, Any], memory: dict[str, int], formula: int) -> list[Result]:
    results = [
        Result(
            metric="layer.saved_bytes", value=kept, unit="B", better="lower", setting={**setting, "contestant": name}
        )
        for name, kept in memory.items()
    ]
    ratios = (
        ("layer.saved_bytes_over_formula", memory["xmoe"] / formula),
        ("layer.saved_bytes_over_deepspeed", memory["xmoe"] / memory["deepspeed"]),
    )
    return results + [
        Result(metric=metric, value=value, unit="ratio", better="lower", setting=setting) for metric, value in ratios
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON lines")
    parser.add_argument("--rounds", type=int, default=15, help="timed runs of each contestant")
    parser.add_argument("--mean", type=float, default=0.2, help="common mean of the inputs, in standard deviations")
    options = parser.parse_args()
    used = {**versions("torch", "deepspeed", "transformers", "numpy"), "threads": str(THREADS)}
    results: list[Result] = []
    jobs = [(shape, activation) for shape in SHAPES for activation in ("gelu", "swiglu")]
    context = multiprocessing.get_context("spawn")
    for shape, activation in track(jobs, "measuring", console=Console(stderr=True), transient=True):
        with context.Pool(1) as fresh_process:
            results += fresh_process.apply(measure, (shape, activation, options.rounds, options.mean))
    report(results, as_json=options.json, used=used, title="One MoE layer, forward and backward")


if __name__ == "__main__":
    main()
