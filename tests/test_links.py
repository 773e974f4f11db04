"""Link figures: the fit finds what made the times, and a file is whole, found again, or named in the error."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xmoe.links import FRONTIER, Link, Links, Point, find_links, fit_link, links_path, read_links, write_links

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
    fit = fit_link(points_of(Link(latency_s=latency_s, bandwidth_bytes_per_s=bandwidth), messages))
    # Both figures together make every time, also where one of them drowns in the other.
    assert fit.relative_error < 1e-4


def test_noisy_times_give_a_link_within_their_noise() -> None:
    fit = fit_link(points_of(LINK, 7, noise=0.1))
    assert fit.link.latency_s == pytest.approx(LINK.latency_s, rel=0.1)
    assert fit.link.bandwidth_bytes_per_s == pytest.approx(LINK.bandwidth_bytes_per_s, rel=0.1)
    assert 0.01 < fit.relative_error < 0.1


def test_no_latency_is_less_than_none() -> None:
    # Small messages that ride along for less than their bytes' share.
    points = [Point(messages=1, num_bytes=10, seconds=0.5), Point(messages=1, num_bytes=100, seconds=10.0)]
    fit = fit_link(points)
    assert fit.link.latency_s == 0
    assert 10 < fit.link.bandwidth_bytes_per_s < 20


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


def test_figures_are_found_by_their_hosts_in_any_order(cache: Path) -> None:
    assert find_links(["b", "a"], 8) == (FRONTIER, "defaults")
    path = links_path(["a", "b"], 8)
    write_links(path, intra_node=LINK, inter_node=None, setting={"backend": "gloo"})
    found, source = find_links(["b", "a", "b"], 8)
    assert found.intra_node.latency_s == pytest.approx(LINK.latency_s)
    assert found.intra_node.bandwidth_bytes_per_s == pytest.approx(LINK.bandwidth_bytes_per_s)
    assert found.inter_node == FRONTIER.inter_node
    assert source == str(path)
    assert path.is_relative_to(cache)
    assert find_links(["a", "b"], 4) == (FRONTIER, "defaults")  # other shares of the network
    assert find_links(["a", "c"], 8) == (FRONTIER, "defaults")


def test_a_named_file_comes_first_and_must_be_good(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_links(links_path(["a"], 2), intra_node=LINK, inter_node=LINK, setting={})
    other = Link(latency_s=1e-3, bandwidth_bytes_per_s=1e6)
    write_links(cache / "mine.json", intra_node=other, inter_node=other, setting={})
    monkeypatch.setenv("XMOE_LINKS", str(cache / "mine.json"))
    found, source = find_links(["a"], 2)
    assert found.inter_node.latency_s == pytest.approx(1e-3)
    assert source == str(cache / "mine.json")
    monkeypatch.setenv("XMOE_LINKS", str(cache / "none.json"))
    with pytest.raises(ValueError, match=r"none\.json holds no link figures"):
        find_links(["a"], 2)


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"format": 99}', '{"format": 1, "intra_node": null, "inter_node": {"latency_us": 1}}']
)
def test_a_spoilt_file_is_named_or_passed_over(cache: Path, content: str, caplog: pytest.LogCaptureFixture) -> None:
    path = links_path(["a"], 2)
    path.parent.mkdir(parents=True)
    path.write_text(content)
    with pytest.raises(ValueError, match="holds no link figures"):
        read_links(path)
    default = Links(intra_node=LINK, inter_node=LINK)
    assert find_links(["a"], 2, default=default) == (default, "defaults")
    assert "holds no link figures" in caplog.text


def test_a_write_that_fails_leaves_the_old_file(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = links_path(["a"], 2)
    write_links(path, intra_node=LINK, inter_node=LINK, setting={})
    before = path.read_text()
    assert json.loads(before)["intra_node"]["bandwidth_gb_per_s"] == pytest.approx(2.5)

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="No space"):
        write_links(path, intra_node=None, inter_node=None, setting={})
    assert path.read_text() == before
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
