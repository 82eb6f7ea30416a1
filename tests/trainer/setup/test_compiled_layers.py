"""Compiled layers have no graph breaks, equal layers share one graph, and numbers are those of uncompiled layers.

The backend `aot_eager` traces as Inductor's does, and runs torch's own kernels: nothing may differ by a bit.
"""

import copy
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from lightning_megatron import (
    ConfigurationError,
    Fp8Config,
    KernelConfig,
    MegatronStrategy,
    OptimizerConfig,
    PipelineConfig,
)
from lightning_megatron.any_module.plan import ModelPlan
from lightning_megatron.mesh import Mesh, Sizes, ambient
from lightning_megatron.models import BertConfig, BertModel, GPTConfig, GPTModel, T5Config, T5Model
from lightning_megatron.pipeline.module import PipelineModule, StagePart
from lightning_megatron.rules.cross_config import Facts, faults
from lightning_megatron.tensor import compiled_gradients, gemm
from lightning_megatron.tensor.weight_gradients import (
    Task,
    WeightGradientLayer,
    WeightGradientMode,
    WeightGradients,
    add_gradient,
    share,
)
from lightning_megatron.trainer.setup.compiled_layers import compile_layers, compiler_faults
from lightning_megatron.transformer import recompute
from lightning_megatron.transformer.lora import LoraConfig, add_lora
from lightning_megatron.transformer.recompute import RecomputeConfig, RecomputePart
from tests.any_module.model_families import Causal, batches
from tests.certificate.cases import Layout
from tests.certificate.runs import Data, Module
from tests.harness.ranks import run_on_ranks
from tests.harness.sample import every_nth
from tests.trainer import modules
from tests.trainer.layouts import PLAIN, make_trainer
from tests.trainer.layouts import Layout as CutLayout
from tests.transformer import test_recompute

ZERO_3 = OptimizerConfig(kind="distributed_parameters")
AOT_EAGER = KernelConfig(compile_layers=True, compile_backend="aot_eager")
GPT2 = replace(test_recompute.GPT2, hidden_dropout=0.0, attention_dropout=0.0)
DROPPING = replace(GPT2, hidden_dropout=0.1, attention_dropout=0.1, ffn_dropout=0.1)
LLAMA = replace(
    GPT2, num_query_groups=2, activation="swiglu", normalization="rmsnorm", add_bias_linear=False, position="rotary"
)
T5 = T5Config(
    num_layers=2, num_decoder_layers=2, hidden_size=32, num_attention_heads=4, ffn_hidden_size=48, vocab_size=131
)
BERT = BertConfig(num_layers=2, hidden_size=32, num_attention_heads=4, ffn_hidden_size=48, vocab_size=131)
Numbers = dict[str, Tensor | None]
# The compiler looks at all that a layer holds.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor:UserWarning")


def gpt(config: GPTConfig, *parts: RecomputePart, lora: LoraConfig | None = None) -> PipelineModule:
    model = GPTModel(config, seed=7)
    if parts:
        recompute.set_recomputed(model, RecomputeConfig(granularity="selective", parts=parts))
    if lora is not None:
        add_lora(model, lora)
    return model


# Each with the number of graphs that its layers need: one for each kind of layer.
KINDS: dict[str, tuple[Callable[[], PipelineModule], int]] = {
    "gpt2": (lambda: gpt(GPT2), 1),
    "dropout": (lambda: gpt(DROPPING), 1),
    "llama": (lambda: gpt(LLAMA), 1),
    "window": (lambda: gpt(replace(LLAMA, sliding_window=2, full_attention_layers=(1,))), 2),
    "norms of heads": (lambda: gpt(replace(LLAMA, qk_norm=True)), 1),
    "recomputed attention, norm, activation": (
        lambda: gpt(DROPPING, "core_attention", "norm", "activation"),
        1,
    ),
    "recomputed norm, mlp": (lambda: gpt(LLAMA, "norm", "mlp"), 1),
    # What comes into the first layer needs no gradient there.
    "lora": (lambda: gpt(LLAMA, lora=LoraConfig(rank=4, alpha=8, dropout=0.1)), 2),
    "t5": (lambda: T5Model(replace(T5, hidden_dropout=0.1, attention_dropout=0.1), seed=7), 2),
    "bert": (lambda: BertModel(replace(BERT, hidden_dropout=0.1), seed=7), 1),
    "bert, pre-norm": (lambda: BertModel(replace(BERT, norm_placement="pre"), seed=7), 1),
}


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def inputs_of(model: PipelineModule) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """3 rows of 7 tokens, and labels with holes."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(131, (3, 7), generator=generator)
    labels = torch.where(torch.rand(3, 7, generator=generator) < 0.2, -100, tokens.roll(-1, 1))
    return (tokens, tokens.roll(1, 1)) if isinstance(model, T5Model) else (tokens,), {"labels": labels}


def numbers_of(model: PipelineModule, *, is_mixed: bool) -> Numbers:
    """Loss and gradients of two calls, with what each part returned and its gradient."""
    found: Numbers = {}
    args, named = inputs_of(model)

    def recording(parts: Sequence[StagePart], hidden: Any) -> Any:
        for index, part in enumerate(parts):
            hidden = part.run(hidden)
            for key, one in enumerate(tree_leaves(hidden)):
                found[f"output {len(found)} of part {index}, {key}"] = one
                if one.requires_grad:
                    one.retain_grad()
        return hidden

    model.runner = recording
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16, enabled=is_mixed):
            loss = model(*args, **named)
        loss.backward()
    found |= {f"gradient of {name}": one.grad for name, one in found.items() if one is not None and one.requires_grad}
    return found | {name: weight.grad for name, weight in model.named_parameters()}


def test_packed_documents_share_a_graph_whatever_their_bounds() -> None:
    model, plain = (gpt(replace(DROPPING, position="rotary")).double() for _ in range(2))
    compile_in(model)
    (tokens,), labels = inputs_of(model)
    for bounds in ([[0, 0, 0, 1, 1, 1, 1]], [[0, 1, 1, 1, 2, 2, 2]], [[0, 0, 1, 2, 3, 4, 5]]):
        segments = torch.tensor(bounds).expand(3, 7)
        losses = [each(tokens, **labels, segments=segments) for each in (model, plain)]
        for loss in losses:
            loss.backward()
        assert torch.equal(*losses)
    assert_equal(*({name: weight.grad for name, weight in each.named_parameters()} for each in (model, plain)))
    assert counters["graph_break"] == {} and counters["stats"]["unique_graphs"] == 1


def compile_in(model: PipelineModule) -> list[nn.Module]:
    holder = nn.ModuleDict({"net": model})
    return compile_layers(AOT_EAGER, holder, ModelPlan(), {"net": model}, model.mesh)


def assert_equal(found: Numbers, wanted: Numbers) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        other = found[name]
        assert (value is None) == (other is None), name
        assert value is None or other is None or torch.equal(value, other), name


def assert_compiled_equals_uncompiled(make: Callable[[], PipelineModule], num_graphs: int, *, is_mixed: bool) -> None:
    found = []
    for is_compiled in (False, True):
        model = make()
        if not is_mixed:
            model.double()
        if is_compiled:
            assert len(compile_in(model)) == len(model.layer_names)
        found.append(numbers_of(model, is_mixed=is_mixed))
    assert_equal(found[1], found[0])
    assert sum(counters["graph_break"].values()) == 0, counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == counters["frames"]["total"] == num_graphs


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("kind", "precision"),
    [*every_nth([(kind, "float64") for kind in KINDS], 2), *every_nth([(kind, "bfloat16") for kind in KINDS][1:], 2)],
)
def test_compiled_layers_equal_uncompiled_ones_to_the_bit_without_graph_breaks(kind: str, precision: str) -> None:
    make, num_graphs = KINDS[kind]
    assert_compiled_equals_uncompiled(make, num_graphs, is_mixed=precision == "bfloat16")


@pytest.mark.parametrize("mode", WeightGradientMode)
def test_gradients_are_equal_wherever_uncompiled_layers_would_put_them(mode: WeightGradientMode) -> None:
    found: list[list[Numbers]] = []
    for is_compiled in (False, True):
        model, gradients, queue = gpt(LLAMA).double(), WeightGradients(), list[Task]()
        share(model, gradients)
        if is_compiled:
            compile_in(model)
        args, named = inputs_of(model)
        found.append([])
        for _ in range(2):
            loss = model(*args, **named)
            is_open = mode is not WeightGradientMode.RETURN
            with gradients.opened(queue if mode is WeightGradientMode.DEFER else None) if is_open else nullcontext():
                loss.backward()
            for _, task in queue:
                task()
            queue.clear()
            found[-1].append({name: weight.grad.clone() for name, weight in model.named_parameters()})
    for compiled, plain in zip(found[1], found[0], strict=True):
        assert_equal(compiled, plain)


def wide_product(dtype: torch.dtype, left_OT: Tensor, right_TI: Tensor) -> Tensor:
    """The product as a GPU makes it of factors in 16 bits: summed in `dtype`, and not rounded before."""
    with torch.autocast("cpu", enabled=False):
        return left_OT.to(dtype).mm(right_TI.to(dtype))


def add_wide_product(weight: Tensor, left_OT: Tensor, right_TI: Tensor, grad_view: Tensor | None) -> None:
    add_gradient(weight, wide_product(torch.float32, left_OT, right_TI), grad_view)


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4, alpha=8, dropout=0.1)], ids=["weights", "adapters"])
def test_gradients_of_weights_in_16_bits_are_not_rounded_to_them(lora: LoraConfig | None) -> None:
    found: list[Numbers] = []
    for is_compiled in (False, True):
        model = gpt(LLAMA, lora=lora)
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.data, weight.grad_dtype = weight.detach().to(torch.bfloat16), torch.float32
        share(model, gradients := WeightGradients(lambda weight: torch.empty_like(weight, dtype=torch.float32)))
        if is_compiled:
            compile_in(model)
        args, named = inputs_of(model)
        products: dict[str, Any] = {"product_in": wide_product, "add_product": add_wide_product}
        with mock.patch.multiple(gemm, **products), mock.patch.multiple(compiled_gradients, **products):
            for _ in range(2):
                with torch.autocast("cpu", torch.bfloat16):
                    loss = model(*args, **named)
                with gradients.opened():
                    loss.backward()
        found.append({name: weight.grad for name, weight in model.named_parameters() if name.startswith("layers.")})
        assert all(not one.stand_ins for one in model.modules() if isinstance(one, WeightGradientLayer))
    assert_equal(found[1], found[0])
    # Those of `a` are zero, as `b` is at first.
    matrices = [grad for grad in found[1].values() if grad is not None and grad.dim() > 1 and grad.any()]
    assert len(matrices) >= 12 and all(not torch.equal(grad, grad.bfloat16().float()) for grad in matrices)


WIDTHS: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "use_cache": False,
}
# What multiplies experts at once takes no float64.
AS_THEY_ARE: dict[str, tuple[Callable[[], nn.Module], torch.dtype]] = {
    "dense": (lambda: LlamaForCausalLM(LlamaConfig(**WIDTHS)), torch.float64),
    "experts": (lambda: MixtralForCausalLM(MixtralConfig(**WIDTHS, num_local_experts=4)), torch.float32),
}


@pytest.mark.parametrize("kind", AS_THEY_ARE)
def test_layers_of_a_model_of_transformers_as_it_is_are_compiled_alike(kind: str) -> None:
    make, dtype = AS_THEY_ARE[kind]
    found = []
    for is_compiled in (False, True):
        torch.manual_seed(1)
        holder = nn.ModuleDict({"net": make().to(dtype)})
        if is_compiled:
            layers = compile_layers(AOT_EAGER, holder, ModelPlan(), {}, Mesh.single())
            assert layers == list(holder["net"].model.layers)
        tokens = torch.arange(21).view(3, 7)
        loss = holder["net"](input_ids=tokens, labels=tokens).loss
        loss.backward()
        found.append({"loss": loss.detach()} | {name: weight.grad for name, weight in holder.named_parameters()})
        # Nothing is left in the modules, which are copied and saved.
        assert all("forward" not in vars(module) for module in holder.modules())
    assert_equal(found[1], found[0])
    assert not counters["graph_break"] and counters["stats"]["unique_graphs"] == 1


def compare_over_tp(kinds: list[str], has_sp: bool) -> None:
    rank = dist.get_rank()
    with ambient(Mesh.build(Sizes(world=2, tp=2, sequence_parallel=has_sp), rank, lambda ranks: dist.group.WORLD)):
        for kind in kinds:
            torch._dynamo.reset()
            counters.clear()
            make, num_graphs = KINDS[kind]
            assert_compiled_equals_uncompiled(make, num_graphs, is_mixed=False)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("kinds", "has_sp"), every_nth([(["lora"], True), (["dropout"], True), (["llama"], False), (["t5"], True)], 4)
)
def test_layers_cut_over_tensor_parallel_ranks_are_compiled_alike(kinds: list[str], has_sp: bool) -> None:
    run_on_ranks(2, compare_over_tp, kinds, has_sp, timeout=240)


def trained_in_shards(model_types: list[str], layout: CutLayout) -> None:
    """Trains models of transformers as they are with compiled layers, and without: no number differs by a bit."""
    for model_type in model_types:
        found: list[Numbers] = []
        for kernels in (KernelConfig(), AOT_EAGER):
            torch._dynamo.reset()
            counters.clear()
            strategy, module = layout.strategy(), Causal(model_type)
            assert isinstance(strategy, MegatronStrategy)
            strategy.kernels = kernels
            loader: Any = DataLoader(batches(), batch_size=None)  # type: ignore[arg-type]
            make_trainer(layout, strategy=strategy, max_epochs=1).fit(module, loader)
            found.append({name: weight.detach() for name, weight in module.named_parameters()})
        assert_equal(found[1], found[0])
        assert not counters["graph_break"], counters["graph_break"]
        assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.matrix
@pytest.mark.parametrize(
    "layout",
    every_nth([CutLayout(world=2, tp=2, sp=True), CutLayout(world=2, tp=2), CutLayout(world=2, optimizer=ZERO_3)], 2),
    ids=lambda layout: "tp2+sp" if layout.sp else "tp2" if layout.tp > 1 else "ZeRO-3",
)
def test_unchanged_layers_whose_weights_ranks_share_out_are_compiled_alike(layout: CutLayout) -> None:
    # Qwen3 has norms of which each rank has terms of the gradient, Mixtral experts that ranks share, and Phi biases.
    model_types = every_nth(["qwen3", "llama", "mixtral", "phi"], 2)
    run_on_ranks(2, trained_in_shards, model_types, layout, init=False, timeout=240)


class Looking(Module):
    """Notes in each step which layers are compiled, and what is left of that in copies."""

    def __init__(self) -> None:
        super().__init__("gpt2", Layout(world=1, num_steps=1))
        self.seen: set[tuple[str, bool]] = set()

    def _look(self, step: str) -> None:
        assert self.model is not None
        names = list(self.state_dict())
        for held in (self.model, copy.deepcopy(self.model), pickle.loads(pickle.dumps(self.model))):
            layers = [held.get_submodule(name) for name in held.part_names if name in held.layer_names]
            are_compiled = {layer._compiled_call_impl is not None for layer in layers}
            assert are_compiled == {held is self.model}
        self.seen.add((step, names == list(self.state_dict())))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self._look("training")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self._look("validation")
        super().validation_step(batch, batch_idx)


def trainer_of(**options: Any) -> L.Trainer:
    trainer = make_trainer(PLAIN, strategy=MegatronStrategy(**options), max_epochs=1, limit_val_batches=1)
    assert isinstance(trainer, L.Trainer)
    return trainer


def test_layers_are_compiled_within_the_run_alone() -> None:
    module = Looking()
    data = Data("gpt2", torch.float64, module.layout)
    trainer_of(kernels=AOT_EAGER).fit(module, data)
    assert module.seen == {("training", True), ("validation", True)}
    assert counters["frames"]["ok"] >= 2
    assert all(one._compiled_call_impl is None for one in module.modules())


def test_a_layer_that_its_user_compiled_stays_so() -> None:
    model = gpt(GPT2)
    own = model.get_submodule("layers.1")
    own.compile(backend="eager")
    mine = own._compiled_call_impl
    assert own not in compile_in(model) and own._compiled_call_impl is mine


def test_what_cannot_be_compiled_is_refused_in_one_line() -> None:
    with pytest.raises(ValueError, match=r"compile_backend \('eager'\) acts with compile_layers=True alone"):
        KernelConfig(compile_backend="eager")
    [fault] = compiler_faults(KernelConfig(compile_layers=True, compile_backend="nothing"), torch.device("cpu"))
    assert "compile_backend ('nothing') must be one of" in fault and "'aot_eager'" in fault
    with pytest.raises(ConfigurationError, match="Small holds neither a model of layers nor a network with a list"):
        trainer_of(kernels=AOT_EAGER).fit(modules.Small(), modules.Data())


def test_what_does_not_go_with_compiled_layers_is_refused() -> None:
    facts = Facts(
        sizes=Sizes(world=2, pp=2),
        num_microbatches=4,
        schedule=PipelineConfig(schedule="zb_h1").schedule_of(pp=2, vp=1, microbatches=4),
        kernels=AOT_EAGER,
    )
    [fault] = faults(facts)
    assert "schedule ('zb_h1') puts off weight gradients" in fault
    assert faults(replace(facts, kernels=KernelConfig())) == []
    overlapped = PipelineConfig(overlap_expert_exchange=True).schedule_of(pp=1, vp=1, microbatches=4)
    facts = Facts(sizes=Sizes(world=1), num_microbatches=4, schedule=overlapped, kernels=AOT_EAGER, fp8=Fp8Config())
    found = faults(facts)
    assert any("compile_layers of KernelConfig and fp8 do not go together" in fault for fault in found)
    assert any("overlap_expert_exchange runs a forward beside a backward" in fault for fault in found)
