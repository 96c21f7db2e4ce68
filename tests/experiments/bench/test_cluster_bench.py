"""The overhead of a cluster, measured on the smallest work."""

import argparse

import pytest

from experiments.bench import cluster


@pytest.mark.soak
def test_a_merge_and_tasks_are_measured_in_turns():
    parser = argparse.ArgumentParser()
    cluster.options(parser)
    words = ["--size=tiny", "--tasks=2", "--seconds=.01", "--repeat=1"]
    record = cluster.measure(parser.parse_args(words))
    assert record["good"]
    assert record["merge"]["ratio"] > 1
    assert record["tasks"]["least"] == 0.01
    assert {len(times) for times in record["tasks"]["seconds"].values()} == {1}
