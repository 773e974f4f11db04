"""What the wires of a machine carry: link figures, fitted from measurements and kept in a file.

A link's time for one exchange is ``messages * latency_s + bytes / bandwidth_bytes_per_s``, the postal model with one
start-up time a message (R. Hockney, Parallel Computing 20, 1994; a personalised all-to-all among P ranks starts P - 1
messages, as in R. Thakur et al., Int. J. High Performance Computing Applications 19, 2005).

``xmoe bench links`` measures the figures; :func:`find_links` is how the cost model comes by them.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import math
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from .config import ConfigError
from .files import replacing

logger = logging.getLogger(__name__)

LinkClass = Literal["intra_node", "inter_node"]

FILE_VARIABLE = "XMOE_LINKS"
CACHE_VARIABLE = "XMOE_CACHE_DIR"
_FORMAT = 1
_MAX_ITERATIONS = 200
# Of the largest size's time, that its bytes must take: less is lost in what repeated measurements differ by.
_LEAST_SHARE = 0.02


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
    """The links between the ranks of one node, and those between nodes; None where there are no such links."""

    intra_node: Link | None
    inter_node: Link | None


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What else figures depend on than hosts: other ranks share a network interface, other backends other wires.

    ``ranks_per_node``  of the whole job, since all of them send at once
    ``backend``         that carries the collectives: ``"nccl"``, ``"gloo"``
    ``device``          a GPU's name, or ``"cpu"``
    """

    ranks_per_node: int
    backend: str
    device: str

    def differences(self, written: Mapping[str, Any]) -> str:
        """How the setting in a file differs, in words; ``""`` where it does not."""
        own = ((field.name, getattr(self, field.name)) for field in fields(self))
        return ", ".join(
            f"{name} is {written.get(name)!r} there and {value!r} here"
            for name, value in own
            if written.get(name) != value
        )


# One die (GCD) of an MI250X on a machine like Frontier or LUMI, eight to a node: for estimates of such machines, and
# for nobody's choice of a dispatcher.
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
    """``link``, and the RMS over the points of log(predicted / measured), for small errors the RMS relative error."""

    link: Link
    relative_error: float


def fit_link(points: Sequence[Point]) -> Fit:
    """The link with the least squares of log(predicted / measured).

    Logarithms, because sizes span decades: plain errors would leave the latency to the noise of the largest size, and
    relative ones would rather halve every time than double one. Raises ValueError for messages of one size, and for
    times that hardly grow with the size.
    """
    if len({point.num_bytes / point.messages for point in points}) < 2:
        raise ValueError("latency and bandwidth cannot be told apart: all messages had one size")
    smallest, largest = min(points, key=_message_bytes), max(points, key=_message_bytes)
    # Levenberg and Marquardt's method on the logarithms of latency and of seconds a byte, which keeps both positive.
    found = (math.log(smallest.seconds / smallest.messages), math.log(largest.seconds / largest.num_bytes))
    error, damping = _log_errors(found, points), 1e-3
    for _ in range(_MAX_ITERATIONS):
        step = _newton_step(found, points, damping)
        tried = (found[0] + step[0], found[1] + step[1])
        tried_error = _log_errors(tried, points)
        if tried_error < error:
            gain, found, error, damping = error - tried_error, tried, tried_error, damping / 4
            if gain < 1e-12 * error:
                break
        else:
            damping *= 4
            if damping > 1e12:
                break
    link = Link(latency_s=math.exp(found[0]), bandwidth_bytes_per_s=math.exp(-found[1]))
    if largest.num_bytes / link.bandwidth_bytes_per_s < _LEAST_SHARE * largest.seconds:
        raise ValueError("larger messages took no longer: measure larger ones")
    return Fit(link=link, relative_error=math.sqrt(error / len(points)))


def _message_bytes(point: Point) -> float:
    return point.num_bytes / point.messages


def _parts(logs: tuple[float, float], point: Point) -> tuple[float, float]:
    return point.messages * math.exp(logs[0]), point.num_bytes * math.exp(logs[1])


def _log_errors(logs: tuple[float, float], points: Sequence[Point]) -> float:
    return sum(math.log(sum(_parts(logs, point)) / point.seconds) ** 2 for point in points)


def _newton_step(logs: tuple[float, float], points: Sequence[Point], damping: float) -> tuple[float, float]:
    aa = bb = ab = ar = br = 0.0
    for point in points:
        by_latency, by_bytes = _parts(logs, point)
        predicted = by_latency + by_bytes
        a, b, error = by_latency / predicted, by_bytes / predicted, math.log(predicted / point.seconds)
        aa, bb, ab, ar, br = aa + a * a, bb + b * b, ab + a * b, ar + a * error, br + b * error
    aa, bb = aa + damping, bb + damping
    determinant = aa * bb - ab * ab
    steps = (ab * br - bb * ar) / determinant, (ab * ar - aa * br) / determinant
    return max(min(steps[0], 1.0), -1.0), max(min(steps[1], 1.0), -1.0)


def links_path(hosts: Iterable[str], ranks_per_node: int) -> Path:
    """Where the figures of a job on these hosts lie, below :func:`links_folder`. Raises ConfigError as that does."""
    names = sorted(set(hosts))
    digest = hashlib.sha256("\n".join(names).encode()).hexdigest()[:16]
    return links_folder() / f"{len(names)}x{ranks_per_node}-{digest}.json"


def links_folder() -> Path:
    """``XMOE_CACHE_DIR``, else ``~/.cache/xmoe``; measured figures lie in its folder ``links``.

    Raises ConfigError where neither is there.
    """
    named = os.environ.get(CACHE_VARIABLE)
    try:
        return (Path(named) if named else Path.home() / ".cache" / "xmoe") / "links"
    except RuntimeError as error:  # no HOME, and no entry for the user: a container under any user's number
        raise ConfigError(CACHE_VARIABLE, None, f"there is no home directory ({error}); name a folder") from error


def write_links(
    path: Path,
    *,
    intra_node: Link | None,
    inter_node: Link | None,
    hosts: Sequence[str],
    setting: Mapping[str, Any],
) -> None:
    """Keeps what was measured on ``hosts`` in ``path``, whole or not at all.

    A link is None where the job has none of its class; ``setting`` has what :class:`Setting` has, and what else people
    may want to know. Raises OSError where the file cannot be written.
    """
    content = {
        "format": _FORMAT,
        "intra_node": _as_json(intra_node),
        "inter_node": _as_json(inter_node),
        "hosts": list(hosts),
        "setting": dict(setting),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as scratch:
        scratch.write_text(json.dumps(content, indent=1), encoding="utf-8")


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a file holds: the links, the hosts they lie between, and the setting as it was written."""

    links: Links
    hosts: frozenset[str]
    setting: Mapping[str, Any]

    def missing(self, needed: Collection[LinkClass]) -> str:
        """The classes of links that are needed and were not measured, in words; ``""`` where there are none."""
        return ", ".join(name for name in sorted(needed) if getattr(self.links, name) is None)


def read_links(path: Path) -> Measured:
    """The figures in ``path``. Raises ValueError naming the file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != _FORMAT:
            raise ValueError(f"format {content['format']!r}, and this version reads format {_FORMAT}")
        links = Links(intra_node=_from_json(content["intra_node"]), inter_node=_from_json(content["inter_node"]))
        return Measured(links=links, hosts=frozenset(content["hosts"]), setting=dict(content["setting"]))
    except Exception as error:  # a spoilt file can hold anything: numbers beyond float's, lists in 10^5 lists
        raise ValueError(f"{path} holds no link figures ({type(error).__name__}: {error})") from error


def find_links(hosts: Iterable[str], setting: Setting, *, needed: Collection[LinkClass]) -> tuple[Links, str] | None:
    """Figures of these hosts' links of the classes ``needed``, and the file they come from; None: nobody measured.

    The file named by ``XMOE_LINKS`` where that is set (one file for all jobs of a machine whose jobs get other nodes
    each time), whatever its setting, of which a warning says how it differs. Else the newest measurement in the same
    setting of which these hosts were part. Raises ConfigError when the named file cannot be read; a spoilt file of the
    cache is passed over with a warning.
    """
    named = os.environ.get(FILE_VARIABLE)
    if named:
        return _named_links(named, setting, needed)
    wanted = set(hosts)
    for path in _cached_files():
        try:
            measured = read_links(path)
        except ValueError as error:
            _warn_once(str(error))
            continue
        if not wanted <= measured.hosts:
            continue
        differs, missing = setting.differences(measured.setting), measured.missing(needed)
        if not differs and not missing:
            return measured.links, str(path)
        logger.info("%s is not of these links: %s", path, differs or f"it has no {missing}")
    return None


def _named_links(named: str, setting: Setting, needed: Collection[LinkClass]) -> tuple[Links, str] | None:
    try:
        measured = read_links(Path(named))
    except ValueError as error:
        raise ConfigError(FILE_VARIABLE, named, f"{error}; write it with 'xmoe bench links --out'") from error
    if missing := measured.missing(needed):
        _warn_once(f"{FILE_VARIABLE} ({named}) has no figures for {missing}: these links count as not measured")
        return None
    if differs := setting.differences(measured.setting):
        _warn_once(f"{FILE_VARIABLE} ({named}) was measured in another setting: {differs}")
    return measured.links, named


def _cached_files() -> list[Path]:
    """The newest first; none where there is no folder, or none that this user may read."""
    try:
        # Those that begin with a dot are being written, or were when their writer was killed.
        return sorted((path for path in links_folder().glob("*.json") if not path.name.startswith(".")), key=_age)
    except ConfigError:  # no home directory: nothing was ever kept
        return []
    except OSError as error:
        _warn_once(f"no link figures can be looked for: {error}")
        return []


@functools.cache
def _warn_once(message: str) -> None:
    """Every layer of a model asks for figures."""
    logger.warning("%s", message)


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
