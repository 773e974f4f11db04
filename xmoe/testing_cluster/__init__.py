"""An emulated cluster on one machine: nodes with their own host names, joined by links of a given speed.

    shape = ClusterShape(num_nodes=2, ranks_per_node=4, link_mbit_per_s=200)
    with EmulatedCluster(shape, preload=["torch"]) as cluster:
        job = cluster.run(train, 20, timeout_s=60)  # train(20) on 8 ranks; RANK, MASTER_ADDR, ... are set
        print(job.values, job.traffic[0].sent_bytes)

Ranks of one node talk over its loopback, ranks of different nodes over links that ``tc tbf`` limits; the kernel's
counters say how many bytes crossed them. A tool for tests and benchmarks: it needs Linux, root, and the programs
``ip``, ``tc`` and ``unshare``; ``unavailable`` says what is missing. All of it lives in namespaces of its own and is
gone with its owner, even one killed by SIGKILL (``nodes.py`` says how).
"""

from .cluster import EmulatedCluster, unavailable
from .jobs import ClusterShape, Outcome, RankFailure, Report, Traffic
from .nodes import read_traffic

__all__ = [
    "ClusterShape",
    "EmulatedCluster",
    "Outcome",
    "RankFailure",
    "Report",
    "Traffic",
    "read_traffic",
    "unavailable",
]
