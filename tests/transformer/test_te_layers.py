"""Twins run by Transformer Engine (a stand-in here) train the same parameters to the same numbers, and give way."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron import Fp8Config
from lightning_megatron.mesh import Mesh, Sizes
from lightning_megatron.models import GPTConfig, GPTModel, T5Config, T5Model
from lightning_megatron.moe.config import AuxLoss, MoEConfig, RouterConfig
from lightning_megatron.moe.experts import DispatchedTokens, ExpertAxes, Experts
from lightning_megatron.moe.grouped_gemm import ExpertGroups
from lightning_megatron.sharding import Initial, shard_of
from lightning_megatron.tensor.linear import ParallelLinear
from lightning_megatron.transformer.fp8_layers import EngineFp8Layers, tile_faults, use_transformer_engine
from lightning_megatron.transformer.fp8_rules import fp8_faults
from lightning_megatron.transformer.recompute import RecomputeConfig, RecomputeRunner, set_recomputed
from lightning_megatron.transformer.te_experts import TEExperts
from tests.harness.threads import new_group, run_on_threads
from tests.precision import engine_stub
from tests.reference.unsplit import unsplit_gradients
from tests.tensor.plain import on_every_layout, thread_mesh

GPT2 = GPTConfig(
    num_layers=2, hidden_size=64, num_attention_heads=4, vocab_size=64, max_sequence_length=16, init_std=0.2
)
LLAMA = replace(GPT2, activation="swiglu", normalization="rmsnorm", add_bias_linear=False, position="rotary")
CONFIG = Fp8Config(engine="transformer_engine")
# Sums of a few hundred float32 numbers of order 1, in another order.
TOLERANCE = 2e-5


def twin(model: GPTModel | T5Model, config: Fp8Config = CONFIG) -> EngineFp8Layers:
    return use_transformer_engine({"model": (model, model.part_names)}, config, stage=None)


def loss_of(model: GPTModel) -> Tensor:
    tokens = torch.randint(64, (2, 13), generator=torch.Generator().manual_seed(1))
    loss: Tensor = model(tokens[:, :-1], labels=tokens[:, 1:])
    return loss


@on_every_layout
@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_twins_give_the_loss_and_gradients_of_the_linears(
    config: GPTConfig, num_ranks: int, is_sequence_parallel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = engine_stub.install(monkeypatch)
    plain = GPTModel(config, mesh=Mesh.single(), seed=3)
    wanted = loss_of(plain)
    wanted.backward()
    gradients = unsplit_gradients(plain)

    def on_rank(world: Any) -> None:
        model = GPTModel(config, mesh=thread_mesh(world, is_sequence_parallel), seed=3)
        twin(model)
        loss = loss_of(model)
        loss.backward()
        assert loss.item() == pytest.approx(wanted.item(), abs=TOLERANCE)
        found = unsplit_gradients(model)
        assert found.keys() == gradients.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(found[name], gradient, rtol=0, atol=TOLERANCE)
            assert gradient.abs().max() > 10 * TOLERANCE

    log.is_open = True
    run_on_threads(num_ranks, on_rank)
    assert len(log.first_microbatch) == 8 * num_ranks
    # Of 24 tokens, or what a rank has of them.
    assert all(rows % 16 == 0 for rows in log.rows)
    kinds = [kind for kind, _, _ in log.built]
    assert kinds.count("LayerNormLinear") == kinds.count("Linear") == 4 * num_ranks


def test_parameters_stay_the_same_objects_under_the_same_names(monkeypatch: pytest.MonkeyPatch) -> None:
    engine_stub.install(monkeypatch)
    model = GPTModel(LLAMA, mesh=Mesh.single(), seed=3)
    before, modules = dict(model.named_parameters()), dict(model.named_modules())
    layers = twin(model)
    assert {name: id(p) for name, p in model.named_parameters()} == {name: id(p) for name, p in before.items()}
    assert list(model.state_dict()) == list(before)
    assert modules["layers.0.mlp.up"] is not model.get_submodule("layers.0.mlp.up")
    layers.release()
    assert dict(model.named_modules()) == modules


def test_weights_are_cast_for_the_first_microbatch_of_a_step_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    log = engine_stub.install(monkeypatch)
    model = GPTModel(GPT2, mesh=Mesh.single(), seed=3)
    layers = twin(model, replace(CONFIG, num_last_layers_bf16=1))
    for _ in range(2):
        for _ in range(2):
            with layers.context():
                loss_of(model)
        layers.end_step()
    with torch.no_grad(), layers.context():
        loss_of(model)
    # Four linears of one layer; outside of training nothing is cached.
    assert log.first_microbatch == ([True] * 4 + [False] * 4) * 2 + [None] * 4
    assert len(log.autocasts) == 5 and log.autocasts[0] == (engine_stub.Float8CurrentScaling(), None)


MOE = MoEConfig(
    router=RouterConfig(num_experts=4, top_k=2, aux_losses=(AuxLoss(coefficient=0.1),)),
    ffn_hidden_size=32,
    shared_expert_intermediate_size=32,
)
EXPERTS = {
    "biases": replace(GPT2, hidden_size=32, moe=MOE),
    "gated": replace(LLAMA, hidden_size=32, moe=MOE),
}
EXPERT_LAYOUTS = {
    "one device": Sizes(),
    "ep 2": Sizes(world=2, ep=2),
    "tp 2 sp, ep 2": Sizes(world=2, tp=2, sequence_parallel=True, ep=2),
    "tp 2 sp cp 2, ep 2 etp 2": Sizes(world=4, tp=2, sequence_parallel=True, cp=2, ep=2, etp=2),
}


@torch.no_grad()
def fill_with_waves(parameter: nn.Parameter) -> None:
    """The same numbers in every call, on every thread; of the kind that initial values are not."""
    parameter.copy_(torch.arange(parameter.numel()).sin().view(parameter.shape))


@pytest.mark.parametrize("config", EXPERTS.values(), ids=EXPERTS)
@pytest.mark.parametrize("sizes", EXPERT_LAYOUTS.values(), ids=EXPERT_LAYOUTS)
def test_experts_have_a_twin_with_the_same_loss_and_gradients(
    sizes: Sizes, config: GPTConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = engine_stub.install(monkeypatch)
    log.is_open, log.recipe = True, engine_stub.Float8CurrentScaling()

    def on_rank(world: Any) -> None:
        models = []
        for has_twins in (False, True):
            model = GPTModel(config, mesh=Mesh.build(sizes, world.rank(), new_group), seed=5)
            for name, parameter in model.named_parameters():
                if "bias" in name:
                    fill_with_waves(parameter)
            if has_twins:
                twin(model)
            tokens = torch.randint(64, (2, 17), generator=torch.Generator().manual_seed(1))
            losses = [model(tokens[:, :-1], labels=tokens[:, 1:]) for _ in range(2)]
            sum(losses).backward()
            models.append((losses[0].item(), dict(model.named_parameters())))
        (wanted, parameters), (found, twins) = models
        assert found == pytest.approx(wanted, abs=TOLERANCE)
        assert twins.keys() == parameters.keys()
        for name, parameter in parameters.items():
            gradient, of_twin = parameter.grad, twins[name].grad
            assert gradient is not None and of_twin is not None, name
            torch.testing.assert_close(of_twin, gradient, rtol=0, atol=5 * TOLERANCE)
            assert gradient.abs().max() > 0.002, name

    run_on_threads(sizes.world, on_rank)
    built = [of_engine for kind, of_engine, _ in log.built if kind == "GroupedLinear"]
    own = 32 // sizes.etp
    width = (2 if config.activation == "swiglu" else 1) * own
    num_own = 4 // sizes.ep
    assert sorted(built) == sorted([(num_own, 32, width), (num_own, own, 32)] * 2 * sizes.world)
    # Attention's two linears, the shared expert's and the experts', in two layers and two microbatches.
    assert sorted(log.first_microbatch) == [False] * 12 * sizes.world + [True] * 12 * sizes.world


@pytest.mark.parametrize("sizes", [(3, 0, 17, 16), (0, 0, 0, 0)], ids=["one without rows", "no rows"])
def test_experts_without_rows_get_gradients_of_zero(sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    engine_stub.install(monkeypatch).is_open = True
    normal = Initial(std=0.2)
    options: dict[str, Any] = {"activation": "swiglu", "initial": normal, "output_initial": normal, "has_bias": True}
    experts = Experts(4, 16, 16, axes=ExpertAxes.of(Mesh.single()), **options)
    for parameter in experts.parameters():
        fill_with_waves(parameter)
    rows = torch.randn(sum(sizes), 16, generator=torch.Generator().manual_seed(0))
    weights = torch.linspace(0.1, 0.9, sum(sizes))
    found = []
    for module in (experts, TEExperts(experts, 16)):
        experts.zero_grad()
        x, w = rows.clone().requires_grad_(), weights.clone().requires_grad_()
        output = module(DispatchedTokens(x, w, ExpertGroups.known(sizes, torch.tensor(sizes))))
        output.square().sum().backward()
        found.append([output, x.grad, w.grad, *(parameter.grad for parameter in experts.parameters())])
    for plain, of_twin in zip(*found, strict=True):
        assert plain is not None and of_twin is not None
        torch.testing.assert_close(of_twin, plain, rtol=1e-4, atol=TOLERANCE)
    assert all(not gradient[1].any() for gradient in found[1][3:])


@pytest.mark.gpu
@pytest.mark.parametrize("granularity", ["none", "full"])
def test_transformer_engine_itself_trains_as_torchs_engine_does(granularity: Any) -> None:
    pytest.importorskip("transformer_engine.pytorch", exc_type=ImportError)
    config = replace(GPT2, hidden_size=64, num_attention_heads=4)
    losses = []
    for uses_engine in (False, True):
        model = GPTModel(config, mesh=Mesh.single(), seed=3).cuda().bfloat16()
        layers = twin(model) if uses_engine else None
        runner(granularity, model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        tokens = torch.randint(64, (4, 17), generator=torch.Generator().manual_seed(1)).cuda()
        for _ in range(5):
            with layers.context() if layers is not None else torch.enable_grad():
                loss = model(tokens[:, :-1], labels=tokens[:, 1:])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if layers is not None:
                layers.end_step()
        losses.append(loss.item())
    # An e4m3 number keeps 4 bits; errors of many average out.
    assert losses[1] == pytest.approx(losses[0], rel=0.05)


def test_in_a_t5_cross_attention_stays_as_it_is_and_the_rest_has_twins(monkeypatch: pytest.MonkeyPatch) -> None:
    engine_stub.install(monkeypatch)
    config = T5Config(num_layers=2, hidden_size=32, num_attention_heads=4, vocab_size=64, init_std=0.2)
    tokens = torch.randint(64, (2, 13), generator=torch.Generator().manual_seed(1))
    gradients = []
    for has_twins in (False, True):
        model = T5Model(config, mesh=Mesh.single(), seed=3)
        context: AbstractContextManager[None] = nullcontext()
        if has_twins:
            context = twin(model).context()
            names = {name for name, module in model.named_modules() if isinstance(module, ParallelLinear)}
            assert names == {
                f"decoder.layers.{i}.cross_attention.{part}"
                for i in range(2)
                for part in ("query", "key_value", "projection")
            }
        with context:
            model(tokens, tokens, labels=tokens).backward()
        gradients.append(unsplit_gradients(model))
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=0, atol=TOLERANCE)
        assert gradient.abs().max() > 10 * TOLERANCE


def runner(granularity: Any, model: GPTModel) -> None:
    """Recomputes the layers of the model, or their feed-forward halves."""
    config = RecomputeConfig(
        granularity=granularity, parts=("mlp",) if granularity == "selective" else ("core_attention",)
    )
    model.runner = RecomputeRunner(config, tp=model.mesh.tp, sp=model.mesh.sp)
    set_recomputed(model, config)


@pytest.mark.parametrize("version", [engine_stub.OLDEST, engine_stub.NEWEST])
@pytest.mark.parametrize("granularity", ["full", "selective"])
@pytest.mark.parametrize("scaling", ["current", "delayed", "mxfp8"])
def test_what_is_recomputed_multiplies_in_fp8_again_and_amaxes_are_reduced_once(
    scaling: Any, granularity: Any, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = engine_stub.install(monkeypatch, version=version)
    fp8 = Fp8Config(engine="transformer_engine", scaling=scaling)
    found = []
    for recomputes in (False, True):
        model = GPTModel(GPT2, mesh=Mesh.single(), seed=3)
        layers = twin(model, fp8)
        if recomputes:
            runner(granularity, model)
        with layers.context():
            loss = loss_of(model)
        # A backward is outside.
        assert not log.is_open
        loss.backward()
        layers.end_step()
        found.append((loss.item(), unsplit_gradients(model)))
    (loss, gradients), (loss_again, gradients_again) = found
    assert loss == loss_again
    assert all(torch.equal(gradient, gradients_again[name]) for name, gradient in gradients.items())
    num_again = 8 if granularity == "full" else 4
    assert log.in_fp8 == [True] * (8 + 8 + num_again)
    assert log.first_microbatch == [True] * 16 + [False] * num_again
    assert log.num_reductions == 2
    layers.release()
    loss_of(model).backward()
    assert len(log.in_fp8) == 8 + 8 + num_again


@pytest.mark.parametrize(("scaling", "tile"), [("current", 16), ("delayed", 16), ("mxfp8", 32), ("none", 1)])
@pytest.mark.parametrize("is_sequence_parallel", [False, True])
def test_tokens_of_each_rank_are_padded_to_the_tiles_of_a_scaling(
    scaling: Any, tile: int, is_sequence_parallel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = engine_stub.install(monkeypatch)
    plain = GPTModel(GPT2, mesh=Mesh.single(), seed=3)
    for name, parameter in plain.named_parameters():
        if "bias" in name:
            fill_with_waves(parameter)
    wanted = loss_of(plain)
    wanted.backward()
    gradients = unsplit_gradients(plain)

    def on_rank(world: Any) -> None:
        model = GPTModel(GPT2, mesh=thread_mesh(world, is_sequence_parallel), seed=3)
        whole = dict(plain.named_parameters())
        for name, parameter in model.named_parameters():
            box = shard_of(parameter).box
            ends = [start + size for start, size in zip(box.offsets, box.sizes, strict=True)]
            parameter.data.copy_(whole[name].detach()[tuple(map(slice, box.offsets, ends))].view(parameter.shape))
        fp8 = Fp8Config(engine="transformer_engine", scaling=scaling)
        twin(model, fp8)
        loss = loss_of(model)
        loss.backward()
        assert loss.item() == pytest.approx(wanted.item(), abs=TOLERANCE)
        for name, gradient in unsplit_gradients(model).items():
            torch.testing.assert_close(gradient, gradients[name], rtol=0, atol=TOLERANCE)

    log.is_open = scaling != "none"
    log.recipe = engine_stub.MXFP8BlockScaling() if scaling == "mxfp8" else None
    run_on_threads(2, on_rank)
    # 24 tokens, of which a rank has 12 outside of the tensor-parallel region under sequence parallelism.
    own = -(-(12 if is_sequence_parallel else 24) // tile) * tile
    gathered = 2 * own if is_sequence_parallel else own
    assert sorted(log.rows) == sorted([own, gathered] * 2 * 2 * 2)


def test_without_float8_the_engines_layers_multiply_in_the_precision_around_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log = engine_stub.install(monkeypatch)
    config = Fp8Config(engine="transformer_engine", scaling="none")
    # No tile divides its heads.
    odd = replace(GPT2, hidden_size=20, num_attention_heads=5, num_query_groups=5, ffn_hidden_size=30)
    assert tile_faults(GPTModel(odd, mesh=Mesh.single()).modules(), config) == fp8_faults(config, odd, Sizes()) == []
    found = []
    for has_twins in (False, True):
        model = GPTModel(odd, mesh=Mesh.single(), seed=3)
        context: AbstractContextManager[None] = nullcontext()
        if has_twins:
            context = twin(model, config).context()
        with context:
            loss = loss_of(model)
        loss.backward()
        found.append((loss.item(), unsplit_gradients(model)))
    assert log.in_fp8 == [False] * 8 and log.autocasts == []
    (loss_of_plain, gradients), (loss_of_twin, gradients_of_twin) = found
    assert loss_of_twin == pytest.approx(loss_of_plain, abs=TOLERANCE)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradients_of_twin[name], gradient, rtol=0, atol=TOLERANCE)
