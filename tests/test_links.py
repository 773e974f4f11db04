"""Link figures: the fit finds what made the times, and a file is whole, found again, or named in the error."""

from __future__ import annotations

import json
import math
import os
import random
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from xmoe.config import ConfigError
from xmoe.links import Link, Links, Point, Setting, find_links, fit_link, links_path, read_links, write_links

SIZES = [1024 * 4**i for i in range(8)]
LINK = Link(latency_s=4e-6, bandwidth_bytes_per_s=2.5e9)


def points_of(link: Link, messages: int, *, noise: float = 0.0) -> list[Point]:
    chance = random.Random(0)
    return [
        Point(
            messages=messages,
            num_bytes=size,
            seconds=link.seconds(messages=messages, num_bytes=size) * (1 + noise * chance.uniform(-1, 1)),
        )
        for size in SIZES
    ]


@given(
    latency_s=st.floats(1e-7, 1e-3),
    bandwidth=st.floats(1e7, 1e12),
    messages=st.integers(1, 255),
)
def test_exact_times_give_back_their_link(latency_s: float, bandwidth: float, messages: int) -> None:
    assume(SIZES[-1] / bandwidth > 0.03 * messages * latency_s)
    fit = fit_link(points_of(Link(latency_s=latency_s, bandwidth_bytes_per_s=bandwidth), messages))
    # Both figures together make every time, also where one of them drowns in the other.
    assert fit.relative_error < 1e-4


def test_noisy_times_give_a_link_within_their_noise() -> None:
    fit = fit_link(points_of(LINK, 7, noise=0.1))
    assert fit.link.latency_s == pytest.approx(LINK.latency_s, rel=0.1)
    assert fit.link.bandwidth_bytes_per_s == pytest.approx(LINK.bandwidth_bytes_per_s, rel=0.1)
    assert 0.01 < fit.relative_error < 0.1


def test_one_time_that_is_far_off_does_not_move_the_rest() -> None:
    # A link that was idle let one size pass at six times its speed.
    points = points_of(LINK, 1)
    points[3] = Point(messages=1, num_bytes=points[3].num_bytes, seconds=points[3].seconds / 6)
    fit = fit_link(points)
    assert fit.link.bandwidth_bytes_per_s == pytest.approx(LINK.bandwidth_bytes_per_s, rel=0.5)
    assert fit.link.latency_s == pytest.approx(LINK.latency_s, rel=0.5)


def test_no_latency_is_less_than_none() -> None:
    # Small messages that ride along for less than their bytes' share.
    points = [Point(messages=1, num_bytes=10, seconds=0.5), Point(messages=1, num_bytes=100, seconds=10.0)]
    fit = fit_link(points)
    assert 0 <= fit.link.latency_s < 1e-3
    assert fit.link.bandwidth_bytes_per_s == pytest.approx(10 * math.sqrt(2), rel=0.01)
    assert fit.relative_error == pytest.approx(math.log(2) / 2, rel=0.01)


@pytest.mark.parametrize(
    ("points", "message"),
    [
        ([Point(messages=1, num_bytes=8, seconds=1.0)] * 3, "cannot be told apart"),
        ([Point(messages=n, num_bytes=8 * n, seconds=1.0 * n) for n in (1, 2, 3)], "cannot be told apart"),
        ([Point(messages=1, num_bytes=n, seconds=1.0 / n) for n in (1, 2, 4)], "measure larger ones"),
    ],
)
def test_times_that_fit_no_link_are_refused(points: list[Point], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit_link(points)


def test_impossible_links_are_refused() -> None:
    with pytest.raises(ValueError, match="latency_s"):
        Link(latency_s=-1e-6, bandwidth_bytes_per_s=1e9)
    with pytest.raises(ValueError, match="bandwidth_bytes_per_s"):
        Link(latency_s=0.0, bandwidth_bytes_per_s=0.0)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XMOE_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("XMOE_LINKS", raising=False)
    return tmp_path


HERE = Setting(ranks_per_node=2, backend="gloo", device="cpu")


def find(hosts: list[str]) -> tuple[Links, str] | None:
    return find_links(hosts, HERE, needed=["intra_node", "inter_node"])


def keep(path: Path, hosts: list[str], link: Link = LINK, *, age_s: float = 0.0) -> Path:
    write_links(path, intra_node=link, inter_node=link, hosts=hosts, setting=vars(HERE))
    os.utime(path, (1e9 - age_s, 1e9 - age_s))
    return path


def test_a_job_finds_the_newest_measurement_of_its_hosts(cache: Path) -> None:
    assert find(["b", "a"]) is None
    pair = keep(links_path(["b", "a"], 8), ["b", "a"], age_s=2.0)
    assert pair.is_relative_to(cache)
    assert links_path(["a", "b", "a"], 8) == pair
    three = keep(links_path(["a", "b", "c"], 8), ["a", "b", "c"], Link(latency_s=1e-3, bandwidth_bytes_per_s=1e6))
    assert find(["a", "b", "b"])[1] == str(three)
    os.utime(three, (9e8, 9e8))
    found, source = find(["a", "b", "b"])
    assert source == str(pair)
    assert found.inter_node.latency_s == pytest.approx(LINK.latency_s)
    assert found.inter_node.bandwidth_bytes_per_s == pytest.approx(LINK.bandwidth_bytes_per_s)
    assert find(["c"])[1] == str(three)
    assert find(["a", "d"]) is None


def test_a_named_file_comes_first_and_must_be_good(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(links_path(["a"], 2), ["a"])
    named = keep(cache / "mine.json", ["elsewhere"], Link(latency_s=1e-3, bandwidth_bytes_per_s=1e6))
    monkeypatch.setenv("XMOE_LINKS", str(named))
    found, source = find(["a"])
    assert found.inter_node.latency_s == pytest.approx(1e-3)
    assert source == str(named)
    monkeypatch.setenv("XMOE_LINKS", str(cache / "none.json"))
    with pytest.raises(ConfigError, match=r"XMOE_LINKS is '.*none\.json'.*FileNotFoundError.*bench links --out"):
        find(["a"])


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        '{"format": 99}',
        '{"format": 1, "intra_node": null, "inter_node": {"latency_us": 1}, "hosts": ["a"]}',
        '{"format": 1, "intra_node": null, "inter_node": null}',
        '{"format": 1, "intra_node": null, "inter_node": null, "hosts": ["a"]}',
        pytest.param(
            f'{{"format": 1, "intra_node": {{"latency_us": 1, "bandwidth_gb_per_s": {"1" * 400}}}, "hosts": ["a"]}}',
            id="more than a float holds",
        ),
        pytest.param("[" * 100_000, id="deeper than Python's stack"),
    ],
)
def test_a_spoilt_file_is_named_or_passed_over(cache: Path, content: str, caplog: pytest.LogCaptureFixture) -> None:
    path = links_path(["a"], 2)
    path.parent.mkdir(parents=True)
    path.write_text(content)
    with pytest.raises(ValueError, match="holds no link figures"):
        read_links(path)
    assert find(["a"]) is None
    assert "holds no link figures" in caplog.text
    other = keep(links_path(["a"], 3), ["a"], age_s=100.0)
    assert find(["a"])[1] == str(other)


def test_a_write_that_fails_leaves_the_old_file(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = keep(links_path(["a"], 2), ["a"])
    before = path.read_text()
    assert json.loads(before)["intra_node"]["bandwidth_gb_per_s"] == pytest.approx(2.5)

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="No space"):
        write_links(path, intra_node=None, inter_node=None, hosts=[], setting={})
    assert path.read_text() == before
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
