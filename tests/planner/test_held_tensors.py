"""What a rank holds at its peak, by module and line: all of it, and each where it comes from."""

from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron import MoEConfig, RouterConfig
from lightning_megatron.mesh import Sizes
from lightning_megatron.models import GPTConfig, T5Config
from lightning_megatron.planner.dry_run import dry_run
from lightning_megatron.planner.held_tensors import IN_BACKWARD, held_tensors
from lightning_megatron.planner.memory_tracker import OTHERS
from lightning_megatron.planner.model_parts import SequenceLengths
from lightning_megatron.planner.run import Run
from lightning_megatron.transformer import mlp
from lightning_megatron.transformer.recompute import RecomputeConfig

GPT = GPTConfig(num_layers=4, hidden_size=256, num_attention_heads=4, vocab_size=1024, max_sequence_length=128)
EXPERTS = GPTConfig(
    num_layers=4,
    hidden_size=256,
    num_attention_heads=4,
    vocab_size=1024,
    max_sequence_length=128,
    moe=MoEConfig(router=RouterConfig(num_experts=4, top_k=2)),
)
T5 = T5Config(hidden_size=256, num_attention_heads=4, num_layers=2, num_decoder_layers=2, vocab_size=1024)


def run_of(model: GPTConfig | T5Config = GPT, **changes: object) -> Run:
    lengths = SequenceLengths(sequence=128, decoder_sequence=64 if isinstance(model, T5Config) else 0)
    settings: dict[str, object] = {"sizes": Sizes(world=8, tp=2, pp=2), "global_batch_size": 16} | changes
    return Run(model=model, lengths=lengths, **settings)  # type: ignore[arg-type]


RUNS = {
    "pp": run_of(),
    "chunks": run_of(sizes=Sizes(world=4, pp=2, vp=2)),
    "zero bubble": run_of(schedule_name="zb_h1"),
    "recomputed": run_of(recompute=RecomputeConfig(granularity="full")),
    "accumulated": run_of(num_accumulated=2),
    "experts": run_of(EXPERTS, sizes=Sizes(world=8, ep=2, pp=2)),
    "T5": run_of(T5),
}


@pytest.mark.parametrize("name", RUNS)
def test_what_is_held_is_the_peak_of_a_dry_run(name: str) -> None:
    run = RUNS[name]
    for rank in (0, run.sizes.world // 2):
        sizes: Counter[str] = Counter()
        for one in held_tensors(run, rank):
            sizes[one.kind] += one.num_bytes
        peak = dry_run(run, rank).peak_by_kind
        assert sum(sizes.values()) == pytest.approx(sum(peak.values()), rel=1e-3)
        assert {kind: sizes[kind] for kind in peak if kind != OTHERS} == {
            kind: size for kind, size in peak.items() if kind != OTHERS
        }


def test_each_is_told_with_the_module_and_the_line_that_made_it() -> None:
    run = run_of(sizes=Sizes(world=1), global_batch_size=16, micro_batch_size=16)
    ups = [one for one in held_tensors(run, 0) if one.module == "model.layers.*.mlp.up" and one.kind == OTHERS]
    file, _, number = ups[0].line.partition(":")
    line = (Path(__file__).parents[2] / file).read_text().splitlines()[int(number) - 1]
    # Of four layers, what the activation function reads: 16 x 128 tokens and 4 x 256 features.
    assert [(one.num_tensors, one.shape, one.dtype) for one in ups] == [(4, (2048, 1024), "bfloat16")]
    assert "matmul" in line or "linear" in line or "mm" in line, line


class Leaky(nn.Module):
    """Twice its input, of which it keeps a copy for a backward that does not read it."""

    def forward(self, x: Tensor) -> Tensor:
        double: Tensor = Keeping.apply(x)
        return double


class Keeping(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x.to(torch.float64))
        return 2 * x

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> Tensor:
        return 2 * grad


def test_what_a_module_keeps_for_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(sizes=Sizes(world=1), global_batch_size=16, micro_batch_size=16)
    assert not [one for one in held_tensors(run, 0) if one.dtype == "float64" and one.num_tensors == 4]
    leaky = Leaky()
    monkeypatch.setattr(mlp, "activate", lambda x, activation: leaky(x))
    [kept] = [one for one in held_tensors(run, 0) if one.dtype == "float64" and one.num_tensors == 4]
    assert kept.line.startswith("tests/planner/test_held_tensors.py:") and kept.module == "model.layers.*.mlp"
    assert kept.num_bytes == 4 * 8 * 2048 * 1024


def test_what_torch_makes_in_its_backwards_has_no_line() -> None:
    found = [one for one in held_tensors(RUNS["accumulated"], 0) if one.kind == OTHERS]
    assert all(one.line for one in found) and any(one.line == IN_BACKWARD for one in found)
