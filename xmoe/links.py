"""What the wires of a machine carry: link figures, fitted from measurements and kept in a file.

A link's time for one exchange is ``messages * latency_s + bytes / bandwidth_bytes_per_s``, the postal model with one
start-up time a message (R. Hockney, Parallel Computing 20, 1994; a personalised all-to-all among P ranks starts P - 1
messages, as in R. Thakur et al., Int. J. High Performance Computing Applications 19, 2005).

``xmoe bench links`` measures the figures; :func:`find_links` is how the cost model comes by them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .config import ConfigError

logger = logging.getLogger(__name__)

FILE_VARIABLE = "XMOE_LINKS"
NOT_MEASURED = "defaults"
_FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Link:
    """One class of links as one rank sees it while all ranks send at once.

    ``latency_s``              seconds each message adds
    ``bandwidth_bytes_per_s``  bytes a second that one rank sends to all its peers of this class together; ranks that
                               share a network interface each have their share of it
    """

    latency_s: float
    bandwidth_bytes_per_s: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.latency_s) and self.latency_s >= 0):
            raise ValueError(f"latency_s ({self.latency_s}) must be a number of seconds, 0 or more")
        if not self.bandwidth_bytes_per_s > 0:
            raise ValueError(f"bandwidth_bytes_per_s ({self.bandwidth_bytes_per_s}) must be more than 0")

    def seconds(self, *, messages: float, num_bytes: float) -> float:
        return messages * self.latency_s + num_bytes / self.bandwidth_bytes_per_s


@dataclass(frozen=True, kw_only=True)
class Links:
    """The links between the ranks of one node, and those between nodes."""

    intra_node: Link
    inter_node: Link


# One die (GCD) of an MI250X on a machine like Frontier or LUMI, eight to a node: stands in where nothing was measured.
FRONTIER = Links(
    intra_node=Link(
        # An eight-rank RCCL collective on a Frontier node takes 37 to 52 us with next to no data (PCCL's published
        # measurements, arXiv 2504.18658): seven messages.
        latency_s=6e-6,
        # RCCL's all-to-all of X-MoE's "Small" model within a node, 20 to 32 GB/s a die (derived from arXiv 2508.13337,
        # Fig. 11). Single pairs reach 39 GB/s over one xGMI link and 148 over four.
        bandwidth_bytes_per_s=26e9,
    ),
    inter_node=Link(
        # Slingshot 11 between two ranks, 3.4 to 3.7 us (D. De Sensi et al., SC24, arXiv 2408.14090).
        latency_s=3.6e-6,
        # Four interfaces of 25 GB/s for eight dies; 11 to 11.5 GB/s measured for each while all eight send (ibid.).
        bandwidth_bytes_per_s=11e9,
    ),
)


@dataclass(frozen=True, kw_only=True)
class Point:
    """One measurement: an exchange of ``messages`` messages and ``num_bytes`` bytes in all took ``seconds``."""

    messages: int
    num_bytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Fit:
    """``link``, and the RMS of (predicted - measured) / measured over the points it was fitted to."""

    link: Link
    relative_error: float


def fit_link(points: Sequence[Point]) -> Fit:
    """The link that minimises the sum of squared relative errors; neither figure below zero.

    Relative, because sizes span decades: absolute errors would leave the latency to the noise of the largest size.
    Raises ValueError for fewer than two sizes of a message, or for times that do not grow with the size.
    """
    # seconds ~ latency * messages + inverse * bytes, each equation divided by its seconds.
    a = [point.messages / point.seconds for point in points]
    b = [point.num_bytes / point.seconds for point in points]
    aa, bb = sum(x * x for x in a), sum(x * x for x in b)
    ab = sum(x * y for x, y in zip(a, b, strict=True))
    sum_a, sum_b = sum(a), sum(b)
    determinant = aa * bb - ab * ab
    if determinant <= 1e-12 * aa * bb:
        raise ValueError("latency and bandwidth cannot be told apart: all messages had one size")
    latency = (sum_a * bb - sum_b * ab) / determinant
    inverse = (sum_b * aa - sum_a * ab) / determinant
    if inverse <= 0:
        raise ValueError("larger messages took no longer: measure larger ones")
    if latency < 0:
        latency, inverse = 0.0, sum_b / bb
    link = Link(latency_s=latency, bandwidth_bytes_per_s=1.0 / inverse)
    errors = [link.seconds(messages=p.messages, num_bytes=p.num_bytes) / p.seconds - 1.0 for p in points]
    return Fit(link=link, relative_error=math.sqrt(sum(e * e for e in errors) / len(errors)))


def links_path(hosts: Iterable[str], ranks_per_node: int) -> Path:
    """Where the figures of a job on these hosts lie, below :func:`links_folder`."""
    names = sorted(set(hosts))
    digest = hashlib.sha256("\n".join(names).encode()).hexdigest()[:16]
    return links_folder() / f"{len(names)}x{ranks_per_node}-{digest}.json"


def links_folder() -> Path:
    """``XMOE_CACHE_DIR``, else ``~/.cache/xmoe``; measured figures lie in its folder ``links``."""
    named = os.environ.get("XMOE_CACHE_DIR")
    return (Path(named) if named else Path.home() / ".cache" / "xmoe") / "links"


def write_links(
    path: Path,
    *,
    intra_node: Link | None,
    inter_node: Link | None,
    hosts: Sequence[str],
    setting: Mapping[str, Any],
) -> None:
    """Keeps what was measured on ``hosts`` in ``path``, whole or not at all.

    A link is None where the job has none of its class; ``setting`` says more to people. Raises OSError where the file
    cannot be written.
    """
    content = {
        "format": _FORMAT,
        "intra_node": _as_json(intra_node),
        "inter_node": _as_json(inter_node),
        "hosts": list(hosts),
        "setting": dict(setting),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, beside = tempfile.mkstemp(prefix=f".{path.stem}-", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=1)
        os.replace(beside, path)
    except BaseException:
        Path(beside).unlink(missing_ok=True)
        raise


def read_links(path: Path, *, default: Links = FRONTIER) -> tuple[Links, frozenset[str]]:
    """The figures in ``path`` and the hosts they are of; a link the file has none for is ``default``'s.

    Raises ValueError naming the file.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != _FORMAT:
            raise ValueError(f"format {content['format']!r}, and this version reads format {_FORMAT}")
        links = Links(
            intra_node=_from_json(content["intra_node"]) or default.intra_node,
            inter_node=_from_json(content["inter_node"]) or default.inter_node,
        )
        return links, frozenset(content["hosts"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} holds no link figures ({type(error).__name__}: {error})") from error


def find_links(hosts: Iterable[str], *, default: Links = FRONTIER) -> tuple[Links, str]:
    """Figures for these hosts, and where they come from.

    The file named by ``XMOE_LINKS`` where that is set (one file for all jobs of a machine whose jobs get other nodes
    each time), else the newest measurement of which these hosts were part, else ``default`` and NOT_MEASURED. Raises
    ConfigError when the named file cannot be read; a spoilt file of the cache is passed over with a warning.
    """
    named = os.environ.get(FILE_VARIABLE)
    if named:
        try:
            return read_links(Path(named), default=default)[0], named
        except ValueError as error:
            raise ConfigError(FILE_VARIABLE, named, f"{error}; write it with 'xmoe bench links --out'") from error
    wanted = set(hosts)
    for path in sorted(links_folder().glob("*.json"), key=_age):
        try:
            links, measured = read_links(path, default=default)
        except ValueError as error:
            logger.warning("%s", error)
            continue
        if wanted <= measured:
            return links, str(path)
    return default, NOT_MEASURED


def _age(path: Path) -> float:
    try:
        return -path.stat().st_mtime
    except OSError:  # replaced or removed just now
        return math.inf


def _as_json(link: Link | None) -> dict[str, float] | None:
    if link is None:
        return None
    return {"latency_us": link.latency_s * 1e6, "bandwidth_gb_per_s": link.bandwidth_bytes_per_s / 1e9}


def _from_json(content: Any) -> Link | None:
    if content is None:
        return None
    return Link(
        latency_s=float(content["latency_us"]) / 1e6,
        bandwidth_bytes_per_s=float(content["bandwidth_gb_per_s"]) * 1e9,
    )
