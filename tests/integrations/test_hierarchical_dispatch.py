"""Hierarchical dispatch by the JSON: trained under the engine like flat's, and refused where nodes do not suit it."""

import os
import socket

import pytest
import torch
import torch.distributed as dist
from ds_nets import PLAIN, Net, config, engine_of, gather_whole, init_distributed, local_state, train, whole_state

from xmoe.config import ConfigError
from xmoe.groups import hosts_of_job
from xmoe.integrations.deepspeed import initialize
from xmoe.links import Link, write_links
from xmoe.metrics import take_layer_loads
from xmoe.testing import run_ranks

pytestmark = pytest.mark.dist


def live_on(hosts):
    socket.gethostname = lambda: hosts[dist.get_rank()]


def trained(sections, ep_size, hosts, options):
    """For each section: losses, all parameters, and the rows between nodes of both layers."""
    init_distributed()
    if hosts is not None:
        live_on(hosts)
    results, whole = [], whole_state()
    for section in sections:
        net = Net(ep_size=ep_size, k=3, **PLAIN)
        net.load_state_dict(local_state(whole, net, data_first="use_data_before_expert_parallelism" in options))
        engine = engine_of(net, xmoe=section, **options)
        losses = train(engine, range(2), tokens=2 + 3 * dist.get_rank())
        loads = take_layer_loads(net)
        traffic = [load.traffic for load in loads]
        assert all(load.between_nodes_bytes <= load.all_to_all_bytes for load in loads)
        results.append((torch.tensor(losses), gather_whole(net), traffic))
    return results


@pytest.mark.parametrize(
    ("world", "ep_size", "hosts", "options"),
    [
        (4, 4, None, {"stage": 1}),
        (4, 4, "abab", {"stage": 2, "accumulation": 2}),
        (4, 2, "aabb", {"stage": 0, "use_data_before_expert_parallelism": True}),
        (2, 2, "aa", {"stage": 0}),
    ],
)
def test_training_by_any_dispatch_is_training_by_flat(world, ep_size, hosts, options):
    given, names = ({}, ["gpu", "node"]) if hosts else ({"ranks_per_node": 2}, [])
    sections = [{"dispatch": name, **given} for name in ("flat", *names, "node+gpu")]
    sections += [{"dispatch": "node+gpu", "overlap_chunks": 3, **given}]
    for found in run_ranks(world, trained, sections, ep_size, hosts, options):
        losses, whole, flat = found[0]
        for (other_losses, other, traffic), section in zip(found[1:], sections[1:], strict=True):
            torch.testing.assert_close(other_losses, losses, rtol=0, atol=1e-5, msg=section["dispatch"])
            for key, value in whole.items():
                torch.testing.assert_close(other[key], value, rtol=1e-4, atol=1e-5, msg=key)
            for ours, theirs in zip(traffic, flat, strict=True):
                assert ours.assigned_remote == theirs.assigned_remote == theirs.between_nodes
                assert ours.between_nodes <= theirs.between_nodes
                assert ours.redundancy >= theirs.redundancy == 0.0


def chosen(files, hosts):
    """What "auto" makes of both layers by each of the files of measured links, or its error."""
    os.environ["XMOE_CACHE_DIR"] = "/nowhere"
    init_distributed()
    live_on(hosts)
    results = []
    for links in files:
        os.environ["XMOE_LINKS"] = links
        net = Net(ep_size=4, k=4, **PLAIN)
        try:
            train(engine_of(net), range(2))
            assert hosts_of_job() == list(hosts)  # by which "auto" counts the ranks of a node
            results.append([type(layer.deepspeed_moe.dispatcher).__name__ for layer in (net.a, net.b)])
        except ConfigError as error:
            results.append(str(error))
    return results


def test_auto_follows_the_measured_links(tmp_path):
    path = tmp_path / "links.json"
    link = Link(latency_s=0.0, bandwidth_bytes_per_s=1e6)
    write_links(path, intra_node=link, inter_node=link, hosts=["a", "b"], setting={})
    for unmeasured, measured, missing in run_ranks(4, chosen, ["", str(path), str(tmp_path / "none.json")], "aabb"):
        assert unmeasured == ["FlatDispatcher"] * 2
        assert measured == ["HierarchicalDispatcher"] * 2
        assert "XMOE_LINKS" in missing


def refused(sections, hosts):
    """What xmoe.initialize says here of each; then a good start, to show that nothing was left half done."""
    init_distributed()
    live_on(hosts)
    said = []
    for section in sections:
        try:
            initialize(model=Net(ep_size=3, num_experts=6), config=config(xmoe=section))
        except ValueError as error:
            said.append(f"{type(error).__name__}: {error}")
    engine = engine_of(Net(ep_size=3, num_experts=6, **PLAIN), xmoe={"dispatch": "gpu"})
    train(engine, range(1))
    return said


def test_unequal_nodes_of_one_group_are_every_ranks_error():
    # Only one of the two expert-parallel groups lies unequally.
    sections = [{"dispatch": "node+gpu"}, {"dispatch": "node", "ranks_per_node": 5}]
    answers = run_ranks(6, refused, sections, "aabccc")
    assert answers == [answers[0]] * 6
    by_hosts, by_number = answers[0]
    assert by_hosts.startswith(
        "ConfigError: xmoe.ranks_per_node is None: the hosts hold unequal numbers of the 3 ranks of an "
        "expert-parallel group (a: 2, b: 1)"
    )
    assert by_number.startswith(
        "ConfigError: xmoe.ranks_per_node is 5: lays the 3 ranks of an expert-parallel group (3, 4, 5) unequally "
        "on nodes (2 on node 0, 1 on node 1)"
    )
