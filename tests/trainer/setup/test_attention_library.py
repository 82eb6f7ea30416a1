"""Attention by another library: what is missing is told in one line, and the choice holds inside its block alone."""

import sys
from types import ModuleType
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
from torch.nn.attention import current_flash_attention_impl

from lightning_megatron import ConfigurationError, KernelConfig, MegatronStrategy
from lightning_megatron.models import GPTConfig, GPTModel
from lightning_megatron.precision.kernels import AttentionLibrary
from lightning_megatron.trainer.setup import checks
from lightning_megatron.trainer.setup.attention_library import attention_by, attention_faults
from tests.harness.ranks import on_ranks
from tests.trainer.layouts import PLAIN, make_trainer

GPU = torch.device("cuda", 0)
CUDNN = 3
SMALL = GPTConfig(num_layers=1, hidden_size=16, num_attention_heads=2, vocab_size=32, max_sequence_length=8)


@pytest.mark.parametrize(
    ("library", "capability", "said"),
    [
        ("cudnn", (9, 0), "needs cuDNN"),
        ("flash3", (9, 0), "needs the module flash_attn_interface, which is not installed: build it"),
        ("flash3", (10, 0), "compute capability 9.0, and this one has 10.0"),
        ("flash4", (10, 0), "not installed: pip install flash-attn-4"),
        ("flash4", (8, 0), "compute capability 9.0 or 10.0, and this one has 8.0"),
    ],
)
def test_what_is_missing_is_told_in_one_line(
    library: AttentionLibrary, capability: tuple[int, int], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: False)
    [fault] = attention_faults(KernelConfig(attention=library), GPU)
    assert said in fault and f"kernels attention ({library!r})" in fault
    [fault] = attention_faults(KernelConfig(attention=library), torch.device("cpu"))
    assert "this run is on cpu" in fault


def test_torchs_own_kernels_need_nothing_and_an_unknown_library_is_refused() -> None:
    assert attention_faults(KernelConfig(), torch.device("cpu")) == []
    with pytest.raises(ValueError, match=r"attention \('flash2'\) must be one of 'torch', 'cudnn', 'flash3', 'flash4'"):
        KernelConfig(attention="flash2")  # type: ignore[arg-type]


def test_cudnn_comes_first_inside_of_its_block_alone() -> None:
    before = torch._C._get_sdp_priority_order()
    with attention_by("cudnn"):
        assert torch._C._get_sdp_priority_order()[0] == CUDNN != before[0]
    assert torch._C._get_sdp_priority_order() == before


class Watched(L.LightningModule):
    """A model that notes which kernel of attention comes first in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.first: list[int] = []

    def configure_model(self) -> None:
        self.model = GPTModel(SMALL)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.first.append(torch._C._get_sdp_priority_order()[0])
        loss: torch.Tensor = self.model(batch, labels=batch)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@on_ranks(1, init=False)
def test_the_choice_is_refused_on_a_cpu_and_ends_with_the_run_elsewhere() -> None:
    before, loader = torch._C._get_sdp_priority_order(), torch.utils.data.DataLoader(torch.ones(2, 8).long())
    for is_taken in (False, True):
        strategy, module = MegatronStrategy(kernels=KernelConfig(attention="cudnn")), Watched()
        trainer = make_trainer(PLAIN, strategy=strategy, max_epochs=1, limit_val_batches=0)
        if not is_taken:
            with pytest.raises(ConfigurationError, match=r"attention \('cudnn'\) runs on CUDA, and this run is on cpu"):
                trainer.fit(module, loader)
            continue
        # Torch takes its own kernel on a CPU, whichever comes first.
        with mock.patch.object(checks, "attention_faults", return_value=[]):
            trainer.fit(module, loader)
        assert module.first == [CUDNN, CUDNN]
        assert torch._C._get_sdp_priority_order() == before


# The two operators of FlashAttention-3 that torch calls. Source: `hopper/flash_api_stable.cpp`, STABLE_TORCH_LIBRARY.
FORWARD = (
    "fwd(Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new=None, Tensor(v_new!)? v_new=None, Tensor? q_v=None, "
    "Tensor(out!)? out=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? cu_seqlens_k_new=None, "
    "Tensor? seqused_q=None, Tensor? seqused_k=None, int? max_seqlen_q=None, int? max_seqlen_k=None, "
    "Tensor? page_table=None, Tensor? kv_batch_idx=None, Tensor? leftpad_k=None, Tensor? rotary_cos=None, "
    "Tensor? rotary_sin=None, Tensor? seqlens_rotary=None, Tensor? q_descale=None, Tensor? k_descale=None, "
    "Tensor? v_descale=None, float? softmax_scale=None, bool is_causal=False, int window_size_left=-1, "
    "int window_size_right=-1, int attention_chunk=0, float softcap=0.0, bool is_rotary_interleaved=False, "
    "Tensor? scheduler_metadata=None, int num_splits=0, bool? pack_gqa=None, int sm_margin=0) "
    "-> (Tensor(out!), Tensor, Tensor, Tensor)"
)
BACKWARD = (
    "bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor(dq!)? dq=None, "
    "Tensor(dk!)? dk=None, Tensor(dv!)? dv=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, "
    "Tensor? seqused_q=None, Tensor? seqused_k=None, int? max_seqlen_q=None, int? max_seqlen_k=None, "
    "float? softmax_scale=None, bool is_causal=False, int window_size_left=-1, int window_size_right=-1, "
    "float softcap=0.0, bool deterministic=False, int sm_margin=0) "
    "-> (Tensor(dq!), Tensor(dk!), Tensor(dv!), Tensor, Tensor, Tensor, Tensor, Tensor)"
)


@on_ranks(1, init=False)
def test_flash_attention_3_is_called_inside_of_its_block_alone() -> None:
    library = torch.library.Library("flash_attn_3", "DEF")
    library.define(FORWARD)
    library.define(BACKWARD)
    calls = []

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, ...]:
        calls.append(rest)
        return q.clone(), q.new_zeros(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32), q.new_empty(0), q

    library.impl("fwd", forward, "CPU")
    with mock.patch.dict(sys.modules, flash_attn_interface=ModuleType("flash_attn_interface")):
        assert current_flash_attention_impl() is None
        with attention_by("flash3"):
            assert current_flash_attention_impl() == "FA3"
            assert torch._C._dispatch_has_kernel_for_dispatch_key("aten::_flash_attention_forward", "CUDA")
            # Torch's own call of the operator fits its signature.
            q = torch.randn(2, 8, 4, 16)
            from torch.nn.attention import _fa3

            out, _ = _fa3._fa3_run_forward(q, q, q, None, None, 8, 8, 0.5, True, None, None, None)
            assert torch.equal(out, q) and len(calls) == 1
        assert current_flash_attention_impl() is None
