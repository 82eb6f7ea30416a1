"""What the doctor says of torch's build and of GPUs."""

from dataclasses import replace
from typing import Any

import pytest

from lightning_megatron.cli.doctor.facts import FoundGpu, TorchFacts
from lightning_megatron.cli.doctor.gpus import gpu_findings, has_kernels, torch_findings
from tests.cli.doctor.cases import CPU_TORCH, GB, H200, TORCH, about, kinds


def test_gpus_that_are_well_are_ok() -> None:
    findings = torch_findings(TORCH, driver="580.65.06") + gpu_findings(TORCH)
    assert kinds(findings) == {"ok"}
    assert about(findings, "build of torch").found == "for CUDA 13.0, driver 580.65.06"
    assert about(findings, "backends").found == "gloo, nccl 2.29.7"
    assert about(findings, "GPU 1").found == "H200, 149.0 GB of 150.0 GB free, compute capability 9.0"
    assert about(findings, "peer access").found == "each of 1 pair of GPUs can read the other's memory"


def test_a_machine_without_gpus_is_ok() -> None:
    assert kinds(torch_findings(CPU_TORCH, driver="") + gpu_findings(CPU_TORCH)) == {"ok"}


def test_a_build_for_the_cpu_beside_a_driver_is_to_mind() -> None:
    finding = about(torch_findings(CPU_TORCH, driver="580.65.06"), "build of torch")
    assert finding.kind == "mind" and "580.65.06" in finding.found


def test_a_build_for_cuda_that_sees_no_gpu_beside_a_driver_is_wrong_and_says_what_torch_says() -> None:
    torch = replace(TORCH, gpus=(), warning="the driver is too old (found version 11040)")
    finding = about(torch_findings(torch, driver="470.82.01"), "build of torch")
    assert finding.kind == "wrong" and "found version 11040" in finding.found
    assert about(torch_findings(torch, driver=""), "build of torch").kind == "ok"


def test_a_build_for_rocm_is_named() -> None:
    finding = about(torch_findings(replace(TORCH, built_for="ROCm 7.1"), driver=""), "build of torch")
    assert (finding.kind, finding.found) == ("ok", "for ROCm 7.1")


def test_a_torch_that_cannot_be_imported_is_wrong_and_nothing_else_is_said() -> None:
    [finding] = torch_findings(TorchFacts(fault="libcudart.so.13: cannot open"), driver="")
    assert finding.kind == "wrong" and "libcudart" in finding.found


@pytest.mark.parametrize(("backends", "word"), [(("gloo",), "nccl"), (("nccl",), "gloo")])
def test_a_backend_that_lacks_is_wrong(backends: tuple[str, ...], word: str) -> None:
    finding = about(torch_findings(replace(TORCH, backends=backends), driver="1.0"), "backends")
    assert finding.kind == "wrong" and finding.found.startswith(word)


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({"free_bytes": 100 * GB}, "mind", "others hold memory"),
        ({"capability": (7, 5)}, "wrong", "no kernels (sm_80, sm_90, compute_90)"),
        ({"capability": (12, 0)}, "ok", "compute capability 12.0"),
    ],
)
def test_each_gpu_is_judged(changes: dict[str, Any], kind: str, words: str) -> None:
    finding = about(gpu_findings(replace(TORCH, gpus=(H200, replace(H200, **changes)))), "GPU 1")
    assert finding.kind == kind and words in finding.found


def test_an_old_gpu_that_torch_has_kernels_for_is_to_mind() -> None:
    torch = replace(TORCH, archs=("sm_75",), gpus=(replace(H200, capability=(7, 5)),))
    assert about(gpu_findings(torch), "GPU 0").kind == "mind"


def test_a_gpu_that_cannot_be_used_is_wrong() -> None:
    finding = about(gpu_findings(replace(TORCH, gpus=(FoundGpu(fault="all devices are busy"),))), "GPU 0")
    assert finding.kind == "wrong" and "busy" in finding.found


def test_gpus_that_another_rank_looks_at_are_counted_and_ok() -> None:
    findings = gpu_findings(replace(TORCH, gpus=(FoundGpu(), FoundGpu())))
    assert kinds(findings) == {"ok"} and about(findings, "GPUs").found == "torch sees 2"


def test_gpus_of_two_kinds_are_to_mind() -> None:
    findings = gpu_findings(replace(TORCH, gpus=(H200, replace(H200, name="A100"))))
    assert about(findings, "kinds of GPUs").found == "they differ: A100, H200"


def test_gpus_that_do_not_reach_each_other_are_to_mind() -> None:
    torch = replace(TORCH, gpus=(H200,) * 3, strangers=((0, 2), (1, 2)))
    finding = about(gpu_findings(torch), "peer access")
    assert finding.kind == "mind" and "2 of 3 pairs" in finding.found and "(0-2, 1-2)" in finding.found


@pytest.mark.parametrize(
    ("capability", "archs", "is_it"),
    [
        ((8, 9), ["sm_86"], True),
        ((8, 0), ["sm_86"], False),
        ((9, 0), ["sm_90a"], True),
        ((10, 0), ["sm_90a", "sm_90"], False),
        ((10, 0), ["compute_90"], True),
        ((12, 0), ["sm_120"], True),
        ((9, 0), ["gfx942"], False),
    ],
)
def test_kernels_run_on_the_gpus_that_cuda_says(capability: tuple[int, int], archs: list[str], is_it: bool) -> None:
    assert has_kernels(capability, archs) is is_it
