"""Small networks, engines and states shared by the tests of the DeepSpeed seam. Runs on the ranks of run_ranks."""

import re

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE as NativeMoE
from deepspeed.utils import groups, logger
from torch import nn

from xmoe.integrations.deepspeed import MoE, init_distributed, initialize

D = 8
NUM_EXPERTS = 8
EXPERT_KEY = re.compile(r"(.*\.deepspeed_experts\.)(\d+)(\..*)")
# Every assignment is kept and nothing is drawn: what a loop over tokens computes.
PLAIN = {"drop_tokens": False, "use_rts": False, "top2_2nd_expert_sampling": False}


def mlp(width=6):
    return nn.Sequential(nn.Linear(D, width), nn.GELU(), nn.Linear(width, D))


class Net(nn.Module):
    """Linear, then two MoE layers with residual connections; returns the loss."""

    def __init__(self, layer=MoE, *, ep_size=1, k=2, num_experts=NUM_EXPERTS, aux=0.1, **options):
        super().__init__()
        sizes = ep_size if isinstance(ep_size, tuple) else (ep_size, ep_size)
        self.first = nn.Linear(D, D)
        self.a = layer(D, mlp(), num_experts=num_experts, ep_size=sizes[0], k=k, **options)
        self.b = layer(D, mlp(), num_experts=num_experts, ep_size=sizes[1], k=k, **options)
        self.aux = aux

    def forward(self, x, y):
        h = self.first(x)
        out_a, aux_a, _ = self.a(h)
        h = h + out_a
        out_b, aux_b, _ = self.b(h)
        error = (h + out_b - y).float()
        return error.square().sum() / max(error.numel(), 1) + self.aux * (aux_a + aux_b)


def whole_state(num_experts=NUM_EXPERTS, *, seed=0, **options):
    """State of the whole network under global expert ids; every expert differs."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = Net(ep_size=1, num_experts=num_experts, **options)
        return {key: torch.randn_like(v) * 0.4 if v.is_floating_point() else v for key, v in net.state_dict().items()}


def local_state(whole, net, *, data_first=False):
    """This rank's share of ``whole`` under local expert ids."""
    rank, world = dist.get_rank(), dist.get_world_size()
    modules = dict(net.named_modules())
    state = {}
    for key in net.state_dict():
        found = EXPERT_KEY.fullmatch(key)
        if found:
            layer = modules[key.split(".deepspeed_moe.")[0]]
            place = rank // (world // layer.ep_size) if data_first else rank % layer.ep_size
            first = place * layer.num_local_experts
            state[key] = whole[f"{found[1]}{first + int(found[2])}{found[3]}"]
        else:
            state[key] = whole[key]
    return state


def gather_whole(net):
    """The whole network's parameters by global name; replicas must agree bitwise."""
    modules = dict(net.named_modules())
    named = {}
    for key, value in net.named_parameters():
        found = EXPERT_KEY.fullmatch(key)
        if found:
            layer = modules[key.split(".deepspeed_moe.")[0]]
            rank = groups._get_expert_parallel_rank(layer.expert_group_name)
            key = f"{found[1]}{rank * layer.num_local_experts + int(found[2])}{found[3]}"
        named[key] = value.detach().float().numpy()  # tensors take ten times as long to send
    everywhere = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, named)
    whole = {}
    for part in everywhere:
        for key, value in part.items():
            found = whole.setdefault(key, torch.from_numpy(value))
            assert torch.equal(torch.from_numpy(value), found), f"replicas of {key} differ"
    return whole


def config(*, stage=0, lr=0.01, kind="Adam", bf16=False, clip=0.0, accumulation=1, **more):
    content = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": kind, "params": {"lr": lr, **({"torch_adam": True} if kind == "Adam" else {})}},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": clip,
        "steps_per_print": 10**6,
    }
    if bf16:
        content["bf16"] = {"enabled": True}
    return {**content, **more}


def engine_of(net, *, native=False, ds=None, **options):
    """An engine around ``net``: by plain DeepSpeed or by xmoe."""
    logger.setLevel("ERROR")
    init_distributed()
    start = deepspeed.initialize if native else initialize
    return start(model=net, model_parameters=list(net.parameters()), config=ds or config(**options))[0]


def batch(step, rank=None, *, tokens=6, dtype=torch.float32):
    rank = dist.get_rank() if rank is None else rank
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x, y = torch.randn(2, tokens, D, generator=generator).to(dtype)
    return x[None], y[None]


def train(engine, steps, *, tokens=6, dtype=torch.float32):
    """Losses of the optimizer steps in ``steps``; each step's random draws depend on step and rank only."""
    losses = []
    for step in steps:
        for part in range(engine.gradient_accumulation_steps()):
            torch.manual_seed(7919 * step + 31 * part + dist.get_rank())
            loss = engine(*batch(step + 100 * part, tokens=tokens, dtype=dtype))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    return losses


def native_and_ours(whole, **options):
    """The same network twice, from the same state: DeepSpeed's layer, and ours in strict_compat."""
    nets = Net(NativeMoE, **options), Net(MoE, strict_compat=True, **options)
    for net in nets:
        net.load_state_dict(local_state(whole, net))
    return nets


def reference_loss(state, x, y, *, k, aux=0.1):
    """``Net``'s loss in one process by a loop over experts, from tensors by global name. Nothing of xmoe's."""
    h = x.reshape(-1, D) @ state["first.weight"].T + state["first.bias"]
    total_aux = 0.0
    for name in ("a", "b"):
        prefix = f"{name}.deepspeed_moe."
        probabilities = (h @ state[prefix + "gate.wg.weight"].T).softmax(dim=1)
        num_experts = probabilities.shape[1]
        weights, ids = probabilities.topk(k, dim=1)
        weights = weights / weights.sum(dim=1, keepdim=True) if k > 1 else weights
        out = torch.zeros_like(h)
        for expert in range(num_experts):
            part = f"{prefix}experts.deepspeed_experts.{expert}."
            up = nn.functional.gelu(h @ state[part + "0.weight"].T + state[part + "0.bias"])
            share = (weights * (ids == expert)).sum(dim=1, keepdim=True)
            out = out + share * (up @ state[part + "2.weight"].T + state[part + "2.bias"])
        if len(h):
            chosen = ids[:, :1] if k == 2 else ids
            counts = torch.stack([(chosen == expert).any(dim=1).to(h.dtype).mean() for expert in range(num_experts)])
            total_aux = total_aux + (probabilities.mean(dim=0) * counts).sum() * num_experts / (1 if k == 2 else k)
        h = h + out
    error = h - y.reshape(-1, D)
    return error.square().sum() / max(error.numel(), 1) + aux * total_aux


def reference_steps(whole, batches, *, k, lr, clip=0.0):
    """Parameters and gradient norms after SGD on ``batches[step][part]`` = list of the ranks' (x, y), in float64."""
    state = {key: value.double().requires_grad_() for key, value in whole.items()}
    norms = []
    for parts in batches:
        losses = [reference_loss(state, x.double(), y.double(), k=k) for part in parts for x, y in part]
        gradients = torch.autograd.grad(sum(losses) / len(losses), list(state.values()))
        norm = float(torch.stack([g.square().sum() for g in gradients]).sum().sqrt())
        norms.append(norm)
        factor = min(1.0, clip / norm) if clip else 1.0
        state = {
            key: (value - lr * factor * gradient).detach().requires_grad_()
            for (key, value), gradient in zip(state.items(), gradients, strict=True)
        }
    return {key: value.detach() for key, value in state.items()}, norms


class TensorParallel:
    """A Megatron-style mpu: ``size`` consecutive ranks share one batch."""

    def __init__(self, size=2):
        self.size, world, rank = size, dist.get_world_size(), dist.get_rank()
        for first in range(0, world, size):
            group = dist.new_group(list(range(first, first + size)))
            if first <= rank < first + size:
                self.model = group
        for place in range(size):
            group = dist.new_group(list(range(place, world, size)))
            if rank % size == place:
                self.data = group

    def get_model_parallel_group(self):
        return self.model

    get_tensor_model_parallel_group = get_model_parallel_group

    def get_data_parallel_group(self):
        return self.data

    def get_model_parallel_world_size(self):
        return self.size

    def get_model_parallel_rank(self):
        return dist.get_rank() % self.size

    get_tensor_model_parallel_world_size = get_model_parallel_world_size
    get_tensor_model_parallel_rank = get_model_parallel_rank

    def get_data_parallel_world_size(self):
        return dist.get_world_size() // self.size

    def get_data_parallel_rank(self):
        return dist.get_rank() // self.size
