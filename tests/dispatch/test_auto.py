"""The choice of ``"auto"``: by the link figures of the group's first rank, and the same on every rank."""

import os

import pytest
import torch
import torch.distributed as dist

from xmoe.config import ConfigError
from xmoe.cost import Layer
from xmoe.dispatch.auto import agreed_dispatch
from xmoe.links import Link, write_links
from xmoe.testing import run_ranks
from xmoe.topology import NodeLayout

pytestmark = pytest.mark.dist

LAYER = Layer(num_experts=64, top_k=8, hidden_size=1024, tokens=4096, item_bytes=2)
FAST = Link(latency_s=1e-6, bandwidth_bytes_per_s=1e11)
SLOW = Link(latency_s=1e-6, bandwidth_bytes_per_s=1e9)


def choose_all(cases):
    return [choose(*case) for case in cases]


def choose(files, ranks_per_node):
    """What every rank chooses where each finds figures of its own."""
    os.environ["XMOE_LINKS"] = files[dist.get_rank()]
    os.environ["XMOE_CACHE_DIR"] = "/nowhere"
    layout = NodeLayout.from_ranks_per_node(range(dist.get_world_size()), ranks_per_node)
    return agreed_dispatch(dist.group.WORLD, layout, LAYER, device=torch.device("cpu"))


@pytest.fixture
def files(tmp_path):
    paths = {}
    for name, link in {"slow": SLOW, "fast": FAST}.items():
        path = tmp_path / f"{name}.json"
        write_links(path, intra_node=FAST, inter_node=link, hosts=["a"], setting={})
        paths[name] = str(path)
    return paths


def test_every_rank_follows_the_first_ranks_figures(files):
    slow, fast = files["slow"], files["fast"]
    cases = [([slow, fast, fast, fast], 2), ([fast, slow, slow, slow], 2), ([slow] * 4, 4)]
    assert run_ranks(4, choose_all, cases) == [["node+gpu", "gpu", "gpu"]] * 4


def test_without_figures_it_is_flat(files):
    assert run_ranks(2, choose, ["", files["slow"]], 1) == ["flat"] * 2


def test_a_bad_file_is_an_error_on_every_rank(files):
    answers = run_ranks(2, choose, ["nowhere.json", files["fast"]], 1, return_exceptions=True)
    assert [type(answer) for answer in answers] == [ConfigError] * 2
    assert "XMOE_LINKS is 'nowhere.json'" in str(answers[1])
