"""Which figures ``"auto"`` goes by: those of these links, in this setting, or none; and one answer for all ranks."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from xmoe.config import ConfigError
from xmoe.cost import Layer, choose_dispatch, classes_used
from xmoe.dispatch import auto
from xmoe.groups import host_names
from xmoe.launch import bench_cli
from xmoe.link_bench import LinkReport
from xmoe.links import Link, Links, Setting, find_links, links_folder, links_path, write_links
from xmoe.testing import run_ranks
from xmoe.topology import NodeLayout

LINK = Link(latency_s=1e-6, bandwidth_bytes_per_s=1e9)
HERE = Setting(ranks_per_node=4, backend="nccl", device="AMD Instinct MI250X")
OTHERS = [replace(HERE, ranks_per_node=1), replace(HERE, backend="gloo"), replace(HERE, device="cpu")]
BOTH = ["intra_node", "inter_node"]
LAYER = Layer(num_experts=64, top_k=8, hidden_size=1024, tokens=4096, item_bytes=2)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XMOE_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("XMOE_LINKS", raising=False)
    return tmp_path


def keep(name: str, *, setting: dict[str, Any], age_s: float = 0.0, **missing: None) -> str:
    path = links_folder() / name
    figures = {"intra_node": LINK, "inter_node": LINK} | missing
    write_links(path, **figures, hosts=["a", "b"], setting=setting)
    os.utime(path, (1e9 - age_s, 1e9 - age_s))
    return str(path)


def source_of(needed: list[str] = BOTH) -> str | None:
    found = find_links(["a", "b"], HERE, needed=needed)
    return found and found[1]


@pytest.mark.parametrize("other", [*map(vars, OTHERS), {}], ids=["ranks", "backend", "device", "nothing"])
def test_figures_of_another_setting_are_passed_over_for_older_ones(other: dict[str, Any]) -> None:
    keep("other.json", setting=other)
    assert source_of() is None
    right = keep("right.json", setting=vars(HERE), age_s=100.0)
    assert source_of() == right


def test_a_class_of_links_that_was_not_there_was_not_measured(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one_node = keep("one_node.json", setting=vars(HERE), inter_node=None)
    assert source_of(["intra_node"]) == one_node
    assert source_of() is None
    monkeypatch.setenv("XMOE_LINKS", one_node)
    assert source_of(["intra_node"]) == one_node
    assert source_of(["inter_node"]) is None
    monkeypatch.delenv("XMOE_LINKS")
    both = keep("both.json", setting=vars(HERE), age_s=100.0)
    assert source_of() == both


def test_the_classes_are_those_of_the_layout() -> None:
    layouts = {(0, 0): {"intra_node"}, (0, 1): {"inter_node"}, (0, 0, 1, 1): set(BOTH), (0, 0, 1): {"inter_node"}}
    assert {nodes: set(classes_used(NodeLayout(nodes=nodes))) for nodes in layouts} == layouts
    for nodes, needed in layouts.items():
        for missing in BOTH:
            links = Links(**{"intra_node": LINK, "inter_node": LINK} | {missing: None})
            layer = replace(LAYER, num_experts=12)
            if missing in needed:
                with pytest.raises(ValueError, match="no figures"):
                    choose_dispatch(NodeLayout(nodes=nodes), layer, links)
            else:
                choose_dispatch(NodeLayout(nodes=nodes), layer, links)


def test_a_named_file_of_another_setting_is_used_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for index, other in enumerate([*OTHERS, HERE]):
        monkeypatch.setenv("XMOE_LINKS", keep(f"named{index}.json", setting=vars(other)))
        for _ in range(3):
            assert source_of() == os.environ["XMOE_LINKS"]
    assert [record.getMessage().partition("setting: ")[2] for record in caplog.records] == [
        "ranks_per_node is 1 there and 4 here",
        "backend is 'gloo' there and 'nccl' here",
        "device is 'cpu' there and 'AMD Instinct MI250X' here",
    ]


def test_what_cannot_be_looked_through_holds_no_figures(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    keep(".half.0123.json", setting=vars(HERE))
    assert source_of() is None

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied", "/root")

    monkeypatch.setattr(Path, "glob", refuse)
    assert source_of() is None
    assert "Permission denied" in caplog.text


def no_home() -> Path:
    raise RuntimeError("Could not determine home directory.")


def test_without_a_home_nothing_was_measured_and_nothing_can_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XMOE_CACHE_DIR")
    monkeypatch.setattr(Path, "home", no_home)
    assert source_of() is None
    with pytest.raises(ConfigError, match="XMOE_CACHE_DIR is None: there is no home directory"):
        links_path(["a"], 4)
    path, error = bench_cli._keep(LinkReport(hosts=("a",), setting=HERE, measurements=()), None)
    assert path is None
    assert isinstance(error, ConfigError)


# All ranks of a group


def choose(nodes: tuple[int, int], group: dist.ProcessGroup) -> str:
    try:
        return auto.agreed_dispatch(group, NodeLayout(nodes=nodes), LAYER, device=torch.device("cpu"))
    except Exception as error:
        return repr(error)


def ranks_that_choose() -> tuple[str, list[int], str]:
    """On one host, in two groups: the choice without a home, the settings asked for, the choice after an error."""
    socket.gethostname = lambda: "a"
    host_names(dist.group.WORLD)
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    group = groups[dist.get_rank() // 2]
    asked, find = [], auto.find_links

    def find_links(hosts: list[str], setting: Setting, *, needed: list[str]) -> tuple[Links, str] | None:
        asked.append(setting.ranks_per_node)
        if nodes == (0, 1) and dist.get_rank() == 0:
            raise NotImplementedError("odd")
        return find(hosts, setting, needed=needed)

    auto.find_links = find_links
    os.environ.pop("XMOE_CACHE_DIR", None)
    Path.home = staticmethod(no_home)
    nodes = (0, 0)
    homeless = choose(nodes, group)
    nodes = (0, 1)  # as ``ranks_per_node`` says, and not the hosts
    return homeless, asked, choose(nodes, group)


@pytest.mark.dist
def test_the_ranks_of_a_group_agree_whatever_befalls_the_first() -> None:
    answers = run_ranks(4, ranks_that_choose, timeout_s=30.0)
    assert [homeless for homeless, _, _ in answers] == ["flat"] * 4
    assert [last for _, _, last in answers] == ["NotImplementedError('odd')"] * 2 + ["flat"] * 2
    # All four ranks share the host; in nodes of another making a group knows its own ranks only.
    assert [asked for _, asked, _ in answers] == [[4, 1], [], [4, 1], []]
