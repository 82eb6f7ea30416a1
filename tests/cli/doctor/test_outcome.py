"""What the doctor says of a ping, and of machines that differ."""

import json

import pytest

from lightning_megatron.cli.doctor.finding import mind
from lightning_megatron.cli.doctor.outcome import (
    PingOutcome,
    Timing,
    Word,
    backend_for,
    bus_gb_per_second,
    failed_outcome,
    machine_differences,
    missing_outcome,
    ping_findings,
)
from tests.cli.doctor.cases import about, kinds


def word(host: str = "node1", has_gpu: bool = True, **versions: str) -> Word:
    """A rank's word about itself."""
    return Word(host=host, has_gpu=has_gpu, versions={"torch": "2.13.0", "python": "3.11.7", **versions})


def test_bus_bandwidth_is_that_of_nccl_tests() -> None:
    # 2 x 7/8 x 1 GB in 10 ms.
    assert bus_gb_per_second(8, 10**9, 0.01) == pytest.approx(175.0)
    assert bus_gb_per_second(2, 10**9, 0.01) == pytest.approx(100.0)
    assert bus_gb_per_second(1, 10**9, 0.01) == 0.0


def test_a_ping_that_went_well_is_ok() -> None:
    timings = (
        Timing(size_bytes=4, seconds=12e-6, bus_gb_per_second=0.001),
        Timing(size_bytes=64_000_000, seconds=0.0015, bus_gb_per_second=74.67),
    )
    findings = ping_findings(PingOutcome(world=8, backend="nccl", why="each rank has a GPU", timings=timings))
    assert kinds(findings) == {"ok"}
    assert about(findings, "ranks").found == "8 ranks joined by nccl: each rank has a GPU"
    assert about(findings, "latency").found == "an all-reduce of 4 bytes takes 12 microseconds"
    assert about(findings, "all-reduce of 64.0 MB").found.startswith("1,500 microseconds, bus bandwidth 74.7 GB/s")


def test_ranks_that_have_not_come_are_wrong_and_named() -> None:
    [finding] = ping_findings(missing_outcome(16, [3, 4, 5, 9], "node1:29500", 60.0))
    assert finding.kind == "wrong" and "MASTER_ADDR" in finding.mend
    assert finding.found == "ranks 3 to 5 and 9 of 16 have not come to node1:29500 within 60 s"
    [finding] = ping_findings(missing_outcome(16, [1], "node1:29500", 60.0))
    assert finding.found.startswith("rank 1 of 16 has not come")
    [finding] = ping_findings(missing_outcome(99, list(range(1, 99, 2)), "node1:29500", 60.0))
    assert finding.found.startswith("ranks 1, 3, 5 and others of 99 have")


def test_a_ping_that_failed_tells_the_first_failures_and_how_far_ranks_had_come() -> None:
    outcome = failed_outcome(
        8,
        "nccl",
        failures={5: "DistBackendError: unhandled", 0: "lost"},
        stages={5: "had joined"},
        silent=[1, 2, 3],
        seconds=60.0,
    )
    [finding] = ping_findings(outcome)
    assert finding.kind == "wrong" and "NCCL_DEBUG=INFO" in finding.mend
    assert finding.found == (
        "the ping failed: rank 5, which had joined: DistBackendError: unhandled; rank 0, which had not started: lost; "
        "rank 1, which had not started, was not done; and 2 more"
    )
    silent = failed_outcome(2, "gloo", failures={}, stages={1: "had joined"}, silent=[1], seconds=60.0)
    assert silent.failure == "the ping was not done after 60 s: rank 1, which had joined, was not done"


def test_the_backend_is_nccl_where_every_rank_has_a_gpu() -> None:
    assert backend_for({0: True, 1: True})[0] == "nccl"
    assert backend_for({0: False, 1: False})[0] == "gloo"
    assert backend_for({0: True, 1: False}) == ("gloo", "rank 1 has no GPU, and others have")


def test_machines_that_are_alike_differ_in_nothing() -> None:
    assert machine_differences({0: word(), 1: word("node2")}) == []


def test_versions_and_gpus_that_differ_are_said() -> None:
    words = {0: word(), 1: word(), 2: word("node2", has_gpu=False, torch="2.12.0", python="3.12.1")}
    findings = machine_differences(words)
    torch = about(findings, "torch")
    assert torch.kind == "wrong" and torch.found == "it differs: 2.13.0 on ranks 0 to 1; 2.12.0 on rank 2"
    assert about(findings, "python").kind == "mind"
    assert about(findings, "GPUs").found == "rank 2 of 3 has no GPU, and the others have"


def test_what_is_amiss_with_another_machine_is_said_with_its_name() -> None:
    low = mind("shared memory", "/dev/shm holds 67.1 MB", "give it more")
    other = Word(host="node2", has_gpu=True, versions=word().versions, findings=(low,))
    same = Word(host="node1", has_gpu=True, versions=word().versions, findings=(low,))
    # It goes over a store.
    told = {rank: Word.of(json.loads(json.dumps(one.record))) for rank, one in {0: word(), 1: same, 2: other}.items()}
    [finding] = machine_differences(told)
    assert (finding.about, finding.kind) == ("shared memory of node2", "mind")
