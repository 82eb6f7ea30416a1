"""What layers save for the backward waits in host memory: the same bits, and fewer bytes of the device."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron.mesh import Mesh, Sizes
from lightning_megatron.models import GPTConfig, GPTModel
from lightning_megatron.planner.dry_run import dry_run
from lightning_megatron.planner.hardware import gpu_of
from lightning_megatron.planner.measured import measured
from lightning_megatron.planner.measured_time import measured_time
from lightning_megatron.planner.memory import rank_memory
from lightning_megatron.planner.model_parts import SequenceLengths
from lightning_megatron.planner.run import Run
from lightning_megatron.precision.kernels import KernelConfig
from lightning_megatron.rules.cross_config import Facts, faults
from lightning_megatron.transformer.recompute import RecomputeConfig, RecomputeRunner, set_recomputed, to_host

SMALL = GPTConfig(
    num_layers=3,
    hidden_size=32,
    num_attention_heads=4,
    vocab_size=64,
    max_sequence_length=16,
    hidden_dropout=0.1,
    attention_dropout=0.1,
)
CONFIG = GPTConfig(
    num_layers=12,
    hidden_size=1024,
    num_attention_heads=16,
    vocab_size=16384,
    max_sequence_length=1024,
    tie_embeddings=False,
)
OFFLOAD = RecomputeConfig(offload=True)
WAYS = [
    OFFLOAD,
    RecomputeConfig(granularity="full", offload=True),
    RecomputeConfig(granularity="selective", parts=("core_attention", "mlp"), offload=True),
]


def step(config: RecomputeConfig, *, spoils: bool = False) -> tuple[list[Tensor], int]:
    """Loss and gradients of a step, and how many numbers went to the host; `spoils` changes those there."""
    model, axis, sent = GPTModel(SMALL, seed=0), Mesh.single().tp, [0]

    def noted(x: Tensor) -> Tensor:
        held = to_host(x)
        assert held.data_ptr() != x.data_ptr()
        sent[0] += x.numel()
        return held + 1 if spoils else held

    set_recomputed(model, config)
    model.runner = RecomputeRunner(config, tp=axis, sp=axis)
    model.runner.to_host = noted
    tokens = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(1))
    loss = model(tokens, labels=tokens)
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)], sent[0]


@pytest.mark.parametrize("config", WAYS, ids=lambda config: config.granularity)
def test_loss_and_gradients_do_not_change_by_a_bit(config: RecomputeConfig) -> None:
    (wanted, num_none), (found, num_sent) = step(RecomputeConfig()), step(config)
    assert num_none == 0 and all(torch.equal(ours, theirs) for ours, theirs in zip(found, wanted, strict=True))
    # Of three layers that are recomputed their inputs alone: 32 tokens of 32 numbers.
    num_inputs = 3 * 32 * 32
    assert num_sent == num_inputs if config.granularity == "full" else num_sent > 4 * num_inputs
    # The backward reads what is on the host.
    spoilt, _ = step(config, spoils=True)
    assert not all(torch.equal(ours, theirs) for ours, theirs in zip(spoilt, wanted, strict=True))


def run_of(recompute: RecomputeConfig) -> Run:
    return Run(
        model=CONFIG,
        lengths=SequenceLengths(sequence=1024),
        sizes=Sizes(world=4, pp=4),
        global_batch_size=16,
        precision="bf16-mixed",
        recompute=recompute,
    )


def test_the_planner_knows_the_bytes_of_both_and_the_time_of_the_copies() -> None:
    kept, run = run_of(RecomputeConfig()), run_of(OFFLOAD)
    before, found = dry_run(kept, 3), dry_run(run, 3)
    assert found.host_bytes == pytest.approx(before.saved_bytes, rel=0.06) and before.host_bytes == 0
    assert found.saved_bytes < 0.1 * before.saved_bytes
    assert before.peak_bytes - found.peak_bytes > 0.4 * before.saved_bytes
    closed, closed_before = rank_memory(run, 0), rank_memory(kept, 0)
    assert closed.host == pytest.approx(found.host_bytes, rel=0.1)
    # One layer's are on the device while it runs: of four microbatches of three layers.
    assert closed.activations == pytest.approx(closed_before.activations / 12, rel=0.1)
    gpu = gpu_of("h100")
    times = [measured_time(one, measured(one).ranks, gpu, gpu.constants) for one in (kept, run)]
    assert times[0].exposed.get("host", 0.0) == 0
    copied = found.messages["host", "copy"].tensor_bytes
    # Both ways, of every microbatch.
    assert copied == pytest.approx(2 * 16 / 4 * found.host_bytes, rel=0.1)
    assert times[1].exposed["host"] == pytest.approx(copied / 32e9, rel=0.5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kernels": KernelConfig(compile_layers=True)}, "has a compiler save it"),
    ],
)
def test_what_it_does_not_go_with_is_refused(changes: Any, message: str) -> None:
    facts = Facts(sizes=Sizes(world=1), recompute=OFFLOAD)
    assert not faults(facts)
    assert any(message in fault for fault in faults(replace(facts, **changes)))
    with pytest.raises(ValueError, match="both move the saved inputs of layers"):
        RecomputeConfig(granularity="full", shard_saved_inputs=True, offload=True)
    with pytest.raises(ValueError, match="does not move what 'norm', 'activation' are recomputed from"):
        RecomputeConfig(granularity="selective", parts=("core_attention", "norm", "activation"), offload=True)
