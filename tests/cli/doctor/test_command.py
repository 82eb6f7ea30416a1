"""The command `lightning-megatron doctor`: what it prints, its exit codes, and what it does under launchers."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_megatron.cli.doctor import command, facts
from lightning_megatron.cli.doctor.command import sections_of
from lightning_megatron.cli.doctor.facts import DoctorFacts, FabricPort, FoundGpu, TorchFacts, gathered_facts
from lightning_megatron.cli.doctor.finding import KINDS, mind, ok, section_text, summary_text, wrong
from lightning_megatron.cli.doctor.outcome import FORMULA, PingOutcome, Timing, ping_findings
from lightning_megatron.cli.doctor.ping import PingRequest
from lightning_megatron.cli.main import main
from lightning_megatron.testing.processes import free_port
from tests.cli.doctor.cases import ALONE, CPU_TORCH, MACHINE, TORCH, TORCHRUN
from tests.cli.doctor.test_software import NEW

ROOT = Path(__file__).resolve().parents[3]
FACTS = DoctorFacts(python="3.12.1", versions=NEW, torch=TORCH, machine=MACHINE, launch=ALONE)


def run(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A process of the command."""
    return subprocess.run(
        [sys.executable, "-m", *args],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=180,
    )


def test_a_section_has_a_line_for_each_finding_and_each_mend() -> None:
    findings = [ok("one", "well"), mind("two", "slow", "make it fast"), wrong("three", "bad", "make it good")]
    assert section_text("things", findings) == (
        "things\n"
        "  ok     one: well\n"
        "  mind   two: slow\n"
        "         mend: make it fast\n"
        "  wrong  three: bad\n"
        "         mend: make it good"
    )
    assert summary_text({"things": findings, "others": findings[:1]}) == "1 wrong, 1 mind, 2 ok"


def test_all_sections_of_a_machine_that_is_well_are_ok() -> None:
    sections = sections_of(FACTS)
    assert list(sections) == ["versions", "GPUs", "launcher", "variables", "machine"]
    assert {finding.kind for findings in sections.values() for finding in findings} == {"ok"}


def test_the_page_shows_what_is_printed() -> None:
    page = (ROOT / "docs/doctor.md").read_text()
    timings = tuple(Timing(size_bytes=size, seconds=0.001, bus_gb_per_second=1.0) for size in (4, 10**6, 64 * 10**6))
    sections = {
        **sections_of(replace(FACTS, torch=CPU_TORCH, variables={"NCCL_SOCKET_IFNAME": "eth9"})),
        f"ping: {FORMULA}": ping_findings(PingOutcome(world=2, backend="gloo", timings=timings)),
    }
    titles, shown = set(), 0
    for block in re.findall(r"^```text\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
        for line in block.splitlines():
            if match := re.match(r"  (ok   |mind |wrong)  (.*?): ", line):
                assert match[2] in {finding.about for findings in sections.values() for finding in findings}, line
                shown += 1
            elif not line.startswith("         mend: ") and not re.fullmatch(r"\d+ wrong, \d+ mind, \d+ ok", line):
                titles.add(line)
    assert titles == set(sections) and shown > 10


def test_the_facts_of_this_machine_are_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    monkeypatch.setenv("A_PASSWORD", "secret")
    facts = gathered_facts()
    assert facts.variables["NCCL_DEBUG"] == "WARN" and "A_PASSWORD" not in facts.variables
    assert facts.versions["torch"] and not facts.torch.fault and "gloo" in facts.torch.backends
    machine = facts.machine
    assert 0 < machine.free_memory_bytes <= machine.memory_bytes
    assert machine.num_cores > 0 and machine.open_files > 0 and machine.files_seconds > 0
    assert {Path(disk.path) for disk in machine.disks} >= {Path.cwd()}
    # It is judged without a fault of our own.
    assert sections_of(facts)


def test_ports_of_adapters_are_read_from_the_files_of_their_drivers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, state, rate in (("mlx5_0", "4: ACTIVE\n", "400 Gb/sec (4X NDR)\n"), ("mlx5_1", "1: DOWN\n", None)):
        port = tmp_path / name / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(state)
        if rate is not None:
            (port / "rate").write_text(rate)
    monkeypatch.setattr(facts, "_FABRIC", tmp_path)
    first, second = gathered_facts().machine.fabric_ports
    assert first == FabricPort(name="mlx5_0:1", is_active=True, rate="400 Gb/sec (4X NDR)")
    assert second == FabricPort(name="mlx5_1:1", is_active=False, rate="")


def test_the_facts_of_gpus_are_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    found = SimpleNamespace(name="H200", major=9, minor=0)

    def memory(index: int) -> tuple[int, int]:
        if index == 2:
            raise RuntimeError("CUDA error: all CUDA-capable devices are busy\nCompile with ...")
        return 140, 150

    fakes = {
        "torch.version.cuda": "13.0",
        "torch.cuda.is_available": lambda: True,
        "torch.cuda.device_count": lambda: 3,
        "torch.cuda.get_device_properties": lambda index: found,
        "torch.cuda.mem_get_info": memory,
        "torch.cuda.can_device_access_peer": lambda one, other: False,
        "torch.cuda.get_arch_list": lambda: ["sm_90"],
        "torch.cuda.nccl.version": lambda: (2, 29, 7),
        "torch.distributed.is_nccl_available": lambda: True,
    }
    for name, value in fakes.items():
        monkeypatch.setattr(name, value)
    gpu = FoundGpu(name="H200", memory_bytes=150, free_bytes=140, capability=(9, 0))
    assert gathered_facts().torch == TorchFacts(
        built_for="CUDA 13.0",
        backends=("gloo", "nccl"),
        nccl="2.29.7",
        archs=("sm_90",),
        gpus=(gpu, gpu, FoundGpu(fault="CUDA error: all CUDA-capable devices are busy")),
        strangers=((0, 1),),
    )
    # A second rank of the machine leaves GPUs alone.
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert gathered_facts().torch.gpus == (FoundGpu(),) * 3


def test_as_many_ranks_ping_as_gpus_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def ping(request: PingRequest, num_ranks: int, *, has_gpus: bool) -> PingOutcome:
        asked.append((num_ranks, has_gpus))
        return PingOutcome(world=num_ranks, backend="", failure="not tried", mend="none")

    monkeypatch.setattr("lightning_megatron.cli.doctor.ping.ping_locally", ping)
    fake(monkeypatch)
    for args in ((), ("--ping", "1"), ("--ping", "3")):
        assert main(["doctor", *args]) == 1
    fake(monkeypatch, torch=CPU_TORCH)
    main(["doctor"])
    assert asked == [(2, True), (1, True), (3, False), (2, False)]


def fake(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    monkeypatch.setattr(command, "gathered_facts", lambda: replace(FACTS, **changes))


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({}, 0),
        ({"machine": replace(MACHINE, open_files=1024)}, 0),
        ({"versions": {**NEW, "lightning": "2.6.3"}}, 1),
    ],
    ids=["ok", "mind", "wrong"],
)
def test_the_exit_code_says_whether_something_is_wrong(
    changes: dict[str, Any], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake(monkeypatch, **changes)
    assert main(["doctor", "--ping", "0"]) == code
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "versions" and not any("latency" in line for line in lines)
    assert lines[-1].startswith(f"{code} wrong, ")


def test_json_has_all_that_the_text_has(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    fake(monkeypatch, machine=replace(MACHINE, open_files=1024), torch=CPU_TORCH)
    main(["doctor", "--ping", "0"])
    text = capsys.readouterr().out
    main(["doctor", "--ping", "0", "--json"])
    record = json.loads(capsys.readouterr().out)
    assert record["ping"] is None and set(record["counts"]) == set(KINDS)
    for finding in record["findings"]:
        assert f"{finding['kind']:<5}  {finding['about']}: {finding['found']}\n" in text
        assert not finding["mend"] or f"mend: {finding['mend']}\n" in text
    assert text.count("\n  ") - text.count("\n         mend") == len(record["findings"])


def test_ranks_do_not_meet_where_torch_or_the_launch_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake(monkeypatch, torch=TorchFacts(fault="no libcudart"))
    assert main(["doctor"]) == 1
    assert "they did not meet, since torch cannot communicate" in capsys.readouterr().out
    monkeypatch.undo()
    for name, value in {**TORCHRUN, "RANK": "7"}.items():
        monkeypatch.setenv(name, value)
    # Of a rank that is not the first nobody else says why it does not come.
    assert main(["doctor"]) == 1
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    assert "what the launcher has set is wrong; RANK: rank 7 is not below WORLD_SIZE (2)" in printed.err
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_RANK", "7")
    assert main(["doctor"]) == 1
    assert "LOCAL_RANK: 7 is not below LOCAL_WORLD_SIZE (2)" in capsys.readouterr().out


def test_ranks_of_a_launcher_that_names_no_place_do_not_meet(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake(monkeypatch, launch=replace(ALONE, launcher="LSF", world=2), torch=CPU_TORCH)
    assert main(["doctor"]) == 0
    assert "LSF does not say where" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--ping", "-1"), ("--ping (-1) must be from 0 to 64",)),
        (("--sizes-mb", "1,big,-2"), ("--sizes-mb ('big')", "--sizes-mb ('-2')")),
        (("--sizes-mb", "nan"), ("--sizes-mb ('nan')",)),
        (("--limit-seconds", "0"), ("--limit-seconds (0) must be from 5 to 3600",)),
        (("--limit-seconds", "nan"), ("--limit-seconds (nan)",)),
        (("--pings", "2"), ("did you mean --ping?",)),
    ],
)
def test_wrong_usage_ends_with_one_line_and_code_2(
    args: tuple[str, ...], words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", *args]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    for word in words:
        assert word in printed.err


def test_another_number_of_ranks_than_the_launcher_has_started_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert main(["doctor", "--ping", "3"]) == 2
    assert "--ping (3) must be the number of ranks that torchrun has started (2)" in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_pings_over_two_processes_of_the_machine() -> None:
    ended = run("lightning_megatron", "doctor", "--sizes-mb", "1,0.5", "--json", CUDA_VISIBLE_DEVICES="")
    record = json.loads(ended.stdout)
    assert ended.returncode == (1 if record["counts"]["wrong"] else 0), ended.stderr
    assert record["ping"]["failure"] == "" and record["ping"]["backend"] == "gloo"
    assert [timing["size_bytes"] for timing in record["ping"]["timings"]] == [4, 1_000_000, 500_000]
    assert "2 (n - 1) / n x bytes / seconds" in record["formula"]


@pytest.mark.slow
def test_every_rank_of_torchrun_joins_and_the_first_one_prints() -> None:
    ended = run(
        *("torch.distributed.run", "--nproc-per-node", "2", "-m", "lightning_megatron", "doctor", "--sizes-mb", "1"),
        CUDA_VISIBLE_DEVICES="",
    )
    assert ended.stdout.count("versions\n") == 1
    assert "ok     launcher: torchrun has started 2 ranks; this is rank 0\n" in ended.stdout
    assert "ok     ranks: 2 ranks joined by gloo: no rank has a GPU of its own\n" in ended.stdout
    assert "all-reduce of 1.0 MB: " in ended.stdout


@pytest.mark.slow
def test_ranks_of_slurm_meet_at_the_port_of_the_job() -> None:
    job = {
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_NNODES": "1",
        "SLURM_JOB_NAME": "train",
        "SLURM_NODELIST": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, "-m", "lightning_megatron", "doctor", "--sizes-mb", "1"]
    tasks = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **job, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    first, second = (task.communicate(timeout=180)[0] for task in tasks)
    assert second == "" and tasks[1].returncode == 0
    assert "ok     launcher: SLURM has started 2 ranks; this is rank 0\n" in first
    assert "ok     ranks: 2 ranks joined by gloo" in first


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_wrong_within_the_limit() -> None:
    alone = {**TORCHRUN, "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ended = run("lightning_megatron", "doctor", "--limit-seconds", "5", **alone)
    assert ended.returncode == 1
    where = f"127.0.0.1:{alone['MASTER_PORT']}"
    assert f"wrong  ranks: rank 1 of 2 has not come to {where} within 5 s\n" in ended.stdout


@pytest.mark.slow
def test_a_rank_whose_first_one_does_not_come_says_so() -> None:
    alone = {**TORCHRUN, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ended = run("lightning_megatron", "doctor", "--limit-seconds", "5", **alone)
    assert ended.returncode == 1 and ended.stdout == ""
    assert ended.stderr.startswith("error: rank 1 on ") and "rank 0 has not come to 127.0.0.1:" in ended.stderr
