"""Predictions that say when data, not gradients, are the limit."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from hocket import predict
from hocket.cli.main import app
from hocket.cluster.spec import ClusterSpec
from hocket.cluster.spec_file import text_of
from hocket.errors import HocketError

TABLE = {"storage": {"bandwidth": "1Gbit", "latency": "10ms", "cache": "20G"}, "link": {"bandwidth": "10Gbit"}}


def said(spec: ClusterSpec, **given: float) -> str:
    found = predict(
        parameters=1e6, step_s=0.05, cluster=spec, strategies=["local(16)"], workers=[1, 4, 64], batch_size=100, **given
    )
    return found.answers()[-1]


def test_a_storage_is_read_and_written_again() -> None:
    import tomllib

    spec = ClusterSpec.of(TABLE)
    assert (spec.storage_bandwidth, spec.storage_latency_s, spec.cache_bytes) == (125e6, 0.01, 20e9)
    assert ClusterSpec.of(tomllib.loads(text_of(spec))) == spec
    with pytest.raises(HocketError, match=r"\[storage\] has no 'lattency'.*latency"):
        ClusterSpec.of({"storage": {"lattency": "1ms"}})


def test_small_files_wait_for_opens_and_shards_for_bandwidth() -> None:
    spec = ClusterSpec.of(TABLE)
    found = predict(
        parameters=1e6, step_s=0.05, cluster=spec, strategies=["bulk"], workers=[1, 64], sample_bytes=3000, batch_size=100
    )
    one, many = found.plain()["data"]
    assert one["files_s"] == pytest.approx(100 * 0.01 / 4)  # 4 requests at a time
    assert one["shards_s"] < one["files_s"] / 50
    assert many["shards_s"] == pytest.approx(max(64 * 300_000 / 125e6, many["shards_s"]))
    text = said(spec, sample_bytes=3000)
    assert "data are the limit from one worker on if they are small files (250 ms" in text
    assert "from 64 workers on if they are packed into shards" in text


def test_a_cache_that_holds_all_leaves_the_first_epoch() -> None:
    spec = ClusterSpec.of(TABLE)
    assert "only the first epoch waits" in said(spec, sample_bytes=3000, samples=1e6)
    assert "a cache that holds 20% of them leaves" in said(spec, sample_bytes=100_000, samples=1e6)


def test_fast_storage_is_no_limit_and_nothing_is_said_without_a_size() -> None:
    spec = ClusterSpec.of({"link": {"bandwidth": "10Gbit"}})
    assert "data are not the limit" in said(spec, sample_bytes=100)
    assert "data" not in said(spec)
    with pytest.raises(HocketError, match="sample_bytes=0"):
        said(spec, sample_bytes=0)


def test_the_command_says_it() -> None:
    line = ["predict", "--parameters", "1M", "--step-s", "0.05", "-s", "bulk", "-n", "4", "--sample-bytes", "110k", "--json"]
    ended = CliRunner().invoke(app, line, catch_exceptions=False)
    assert json.loads(ended.stdout)["data"][0]["shards_s"] > 0
