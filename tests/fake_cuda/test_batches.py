"""Tests of batches on their way to a GPU: what models read on the host stays there, and is read there."""

import torch

from benchmarks.device_work import DeviceWork
from lightning_megatron.lightning_modules.data_module import LoaderConfig, ParallelDataModule
from tests.fake_cuda.cases import CASES, build
from tests.harness.fake_cuda import FakeCuda
from tests.harness.ranks import on_ranks


@on_ranks(1, init=False)
def test_segments_stay_on_the_host() -> None:
    with FakeCuda():
        batch = {name: torch.zeros(2, 8, dtype=torch.int64) for name in ("tokens", "segments")}
        data = ParallelDataModule(LoaderConfig(global_batch_size=2))
        moved = data.transfer_batch_to_device(batch, torch.device("cuda"), 0)
        assert {name: value.device.type for name, value in moved.items()} == {"tokens": "cuda", "segments": "cpu"}


@on_ranks(1, init=False)
def test_the_host_waits_for_segments_on_the_device() -> None:
    case = CASES["Llama 3 8B, eight packed documents"]
    with FakeCuda():
        model = build(case.config(1))
        with DeviceWork() as counted, torch.autocast("cuda", torch.bfloat16):
            model(**{name: value.to("cuda") for name, value in case.batch().items()})
    of_documents = [where for where in counted.work.waits if "context/documents.py" in where]
    assert len(of_documents) == 1
