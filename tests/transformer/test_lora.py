"""Low-rank paths: what is refused, what they start as, and that merging them changes no output."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron.comm import collectives
from lightning_megatron.mesh import Axis, Mesh, Sizes
from lightning_megatron.models import GPTConfig, GPTModel, LlavaConfig, LlavaModel, T5Config, T5Model, VisionConfig
from lightning_megatron.moe.config import MoEConfig, RouterConfig
from lightning_megatron.sharding import sharded_parameters
from lightning_megatron.tensor.linear import ParallelLinear
from lightning_megatron.transformer.layer import TransformerLayer
from lightning_megatron.transformer.lora import LoraConfig, add_lora, merge_lora, merged_lora
from lightning_megatron.transformer.te_layers import TELayer
from tests.harness.threads import run_on_threads
from tests.reference.unsplit import unsplit_gradients, unsplit_weights
from tests.tensor.plain import fill, send_in_chunks, thread_mesh

LLAMA = GPTConfig(
    num_layers=2,
    hidden_size=16,
    num_attention_heads=4,
    num_query_groups=2,
    ffn_hidden_size=24,
    vocab_size=37,
    activation="swiglu",
    normalization="rmsnorm",
    add_bias_linear=False,
    position="rotary",
    tie_embeddings=False,
    init_std=0.2,
)
TOKENS = torch.randint(37, (2, 5), generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def in_float64() -> Any:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def tuned(config: LoraConfig, mesh: Mesh | None = None) -> GPTModel:
    """A model whose paths are as after some training: no B is zero."""
    model = GPTModel(LLAMA, mesh=mesh or Mesh.single(), seed=3)
    add_lora(model, config, seed=4)
    for name, parameter in model.named_parameters():
        if name.endswith(".lora.b"):
            nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(len(name)))
    return model


def test_at_first_the_paths_change_nothing_and_only_they_are_trained() -> None:
    bare = GPTModel(LLAMA, mesh=Mesh.single(), seed=3)
    model = GPTModel(LLAMA, mesh=Mesh.single(), seed=3)
    add_lora(model, LoraConfig(rank=2), seed=4)
    assert torch.equal(model(TOKENS), bare(TOKENS))
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    linears = ("attention.qkv", "attention.projection", "mlp.up", "mlp.down")
    assert trained == {f"layers.{i}.{linear}.lora.{x}" for i in range(2) for linear in linears for x in "ab"}
    model(TOKENS, labels=TOKENS).backward()
    assert all((p.grad is not None) == (name in trained) for name, p in model.named_parameters())


def test_only_the_targets_get_paths() -> None:
    model = GPTModel(LLAMA, mesh=Mesh.single(), seed=3)
    add_lora(model, LoraConfig(rank=2, targets=("mlp.down", "attention.qkv")), seed=4)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad and "layers.1" in name}
    assert shapes == {
        "layers.1.attention.qkv.lora.a": (2, 16),
        "layers.1.attention.qkv.lora.b": (32, 2),
        "layers.1.mlp.down.lora.a": (2, 24),
        "layers.1.mlp.down.lora.b": (16, 2),
    }


@pytest.mark.parametrize("scaling", ["rank", "root_of_rank"])
def test_merging_changes_no_output(scaling: Any) -> None:
    model = tuned(LoraConfig(rank=4, alpha=6.0, scaling=scaling, dropout=0.5)).eval()
    factor = 6 / 4 if scaling == "rank" else 6 / 2
    qkv = model.get_submodule("layers.0.attention.qkv")
    assert isinstance(qkv, ParallelLinear) and isinstance(qkv.lora, nn.Module)
    a, b = (qkv.lora.get_parameter(name).detach() for name in "ab")
    wanted = qkv.weight + factor * b @ a
    before = model(TOKENS)
    bare = GPTModel(LLAMA, mesh=Mesh.single(), seed=3).eval()(TOKENS)
    merge_lora(model)
    assert (qkv.weight - wanted).abs().max() < 1e-15
    assert (model(TOKENS) - before).abs().max() < 1e-12 < 1e-2 < (before - bare).abs().max()
    assert not any("lora" in name for name, _ in model.named_parameters())


def test_what_is_merged_for_a_moment_comes_back_bit_by_bit() -> None:
    model = tuned(LoraConfig(rank=4)).eval()
    names = [name for name, _ in model.named_parameters()]
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    before = model(TOKENS)

    def fail_while_merged() -> None:
        with merged_lora(model):
            assert [name for name, _ in model.named_parameters()] == [name for name in names if "lora" not in name]
            assert (model(TOKENS) - before).abs().max() < 1e-12
            raise RuntimeError("on the way")

    with pytest.raises(RuntimeError, match="on the way"):
        fail_while_merged()
    assert [name for name, _ in model.named_parameters()] == names
    assert all(torch.equal(p, weights[name]) for name, p in model.named_parameters())
    assert torch.equal(model(TOKENS), before)


def merged_on(world: Any, sp: bool) -> dict[str, Tensor]:
    model = GPTModel(LLAMA, mesh=thread_mesh(world, sp), seed=3)
    add_lora(model, LoraConfig(rank=4), seed=4)
    born = unsplit_weights(model)
    for name, parameter, shard in sharded_parameters(model):
        if name.endswith(".lora.b"):
            # A slice of one row of numbers on every mesh.
            full = torch.arange(float(torch.Size(shard.global_shape).numel())).view(shard.global_shape).sin()
            fill(parameter, full)
    merge_lora(model)
    return {f"born {name}": x for name, x in born.items()} | unsplit_weights(model)


@pytest.mark.parametrize("sp", [False, True])
def test_initial_values_and_merged_weights_do_not_depend_on_the_mesh(sp: bool) -> None:
    [wanted] = run_on_threads(1, merged_on, False)
    for found in run_on_threads(2, merged_on, sp):
        assert found.keys() == wanted.keys()
        assert max(float((found[name] - wanted[name]).abs().max()) for name in wanted) < 1e-14
    drawn = [x for name, x in wanted.items() if name.startswith("born") and name.endswith("lora.a")]
    assert len(drawn) == 8 and len({float(x.flatten()[0]) for x in drawn}) == 8
    for x in drawn:
        assert x.std() == pytest.approx((3 * x.shape[1]) ** -0.5, rel=0.3)


def test_another_seed_draws_other_values() -> None:
    def drawn(seed: int | None) -> Tensor:
        model = GPTModel(LLAMA, mesh=Mesh.single(), seed=3)
        add_lora(model, LoraConfig(rank=2), seed=seed)
        return model.get_parameter("layers.0.mlp.up.lora.a").detach()

    torch.manual_seed(11)
    assert torch.equal(drawn(None), drawn(11)) and not torch.equal(drawn(4), drawn(11))


def test_all_faults_are_reported_at_once() -> None:
    with pytest.raises(ValueError) as raised:
        LoraConfig(rank=0, alpha=-1.0, dropout=1.0, scaling="none")  # type: ignore[arg-type]
    lines = str(raised.value).splitlines()
    for line, text in zip(lines, ("scaling ('none')", "rank (0)", "alpha (-1.0)", "dropout (1.0)"), strict=True):
        assert text in line
    with pytest.raises(ValueError) as raised:
        add_lora(GPTModel(LLAMA, mesh=Mesh.single()), LoraConfig(targets=("attention.q", "experts.up")))
    all_targets = (
        "targets may be 'attention.qkv', 'attention.projection', 'mlp.up', 'mlp.down', 'shared.up', 'shared.down', "
        "'cross_attention.query', 'cross_attention.key_value', 'cross_attention.projection', 'attention.query', "
        "'attention.query_down', 'attention.query_up', 'attention.key_value_down', 'attention.key_value_up'"
    )
    assert str(raised.value).splitlines() == [
        f"lora target 'attention.q' is unknown; {all_targets}",
        f"lora target 'experts.up' is one of experts or a router, which stay frozen; {all_targets}",
    ]
    with pytest.raises(ValueError, match=r"write \('mlp\.up',\)"):
        LoraConfig(targets="mlp.up")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="empty"):
        LoraConfig(targets=())


def test_an_error_names_what_a_model_without_a_target_has() -> None:
    model = GPTModel(LLAMA, mesh=Mesh.single(), seed=3)
    del model.get_submodule("layers.0.mlp").up
    del model.get_submodule("layers.1.mlp").up
    with pytest.raises(
        ValueError, match=r"no linear named 'mlp\.up' for lora; its layers have 'attention\.projection'"
    ):
        add_lora(model, LoraConfig())


def test_a_model_of_another_kind_is_refused_and_stays_as_it_is() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    with pytest.raises(ValueError, match=r"the model \(Sequential\) has no linears of this package"):
        add_lora(model, LoraConfig())
    assert all(parameter.requires_grad for parameter in model.parameters())
    # A stage may hold the embedding alone.
    embedding = GPTModel(LLAMA, mesh=Mesh.single()).embedding
    add_lora(embedding, LoraConfig())
    assert not any(parameter.requires_grad for parameter in embedding.parameters())


def test_paths_are_not_added_twice() -> None:
    model = tuned(LoraConfig(rank=2))
    with pytest.raises(ValueError, match="has low-rank paths already"):
        add_lora(model, LoraConfig(rank=2))


def test_a_path_that_drops_must_know_its_tokens() -> None:
    model = tuned(LoraConfig(rank=2, dropout=0.5))
    with pytest.raises(AssertionError, match="got no token keys"):
        model.get_submodule("layers.0.mlp.up")(torch.randn(3, 16))


def test_for_a_column_layer_the_rank_is_sent_and_not_the_input(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[tuple[int, ...]] = []
    original = collectives.all_gather

    def noted(x: Tensor, axis: Axis, *args: Any, **kwargs: Any) -> Any:
        if axis.size > 1:
            shapes.append(tuple(x.shape))
        return original(x, axis, *args, **kwargs)

    monkeypatch.setattr(collectives, "all_gather", noted)

    def forward(world: Any) -> None:
        model = GPTModel(LLAMA, mesh=thread_mesh(world, True), seed=3)
        add_lora(model, LoraConfig(rank=3), seed=4)
        model.get_submodule("layers.0.mlp.up.lora")(torch.randn(4, 16))

    run_on_threads(2, forward)
    assert set(shapes) == {(4, 3)}


def test_transformer_engine_does_not_run_paths() -> None:
    model = tuned(LoraConfig(rank=2, targets=("mlp.down",)))
    layer = model.get_submodule("layers.1")
    assert isinstance(layer, TransformerLayer)
    with pytest.raises(ValueError, match="cannot run the low-rank paths"):
        TELayer(layer, tile=1)


MOE = replace(
    LLAMA,
    moe=MoEConfig(
        router=RouterConfig(num_experts=4), ffn_hidden_size=8, shared_expert_intermediate_size=8, layer_freq=2
    ),
)
ALL_OF_MOE = LoraConfig(
    rank=2,
    dropout=0.3,
    targets=("attention.qkv", "attention.projection", "mlp.up", "mlp.down", "shared.up", "shared.down"),
)


def test_attention_and_the_shared_expert_of_a_layer_of_experts_get_paths_and_its_experts_stay_frozen() -> None:
    bare = GPTModel(MOE, mesh=Mesh.single(), seed=3)
    model = GPTModel(MOE, mesh=Mesh.single(), seed=3)
    add_lora(model, ALL_OF_MOE, seed=4)
    assert torch.equal(model(TOKENS), bare(TOKENS))
    trained = {name.rpartition(".lora.")[0] for name, p in model.named_parameters() if p.requires_grad}
    attention = ("attention.qkv", "attention.projection")
    assert trained == {
        *(f"layers.{i}.{linear}" for i in range(2) for linear in attention),
        *(f"layers.0.moe.shared.{linear}" for linear in ("up", "down")),
        *(f"layers.1.mlp.{linear}" for linear in ("up", "down")),
    }
    model(TOKENS, labels=TOKENS).backward()
    assert all((p.grad is not None) == (".lora." in name) for name, p in model.named_parameters())
    for name, parameter in model.named_parameters():
        if name.endswith(".lora.b"):
            nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(len(name)))
    model.eval()
    before = model(TOKENS)
    merge_lora(model)
    assert (model(TOKENS) - before).abs().max() < 1e-12 < 1e-2 < (before - bare.eval()(TOKENS)).abs().max()


def test_a_target_that_only_layers_of_another_stage_have_is_not_missing() -> None:
    targets = set()
    for rank in range(2):
        model = GPTModel(MOE, mesh=Mesh.imagine(rank, Sizes(world=2, pp=2)), seed=3)
        add_lora(model, ALL_OF_MOE, seed=4)
        targets |= {
            name.rpartition(".lora.")[0].rpartition(".")[0] for name, p in model.named_parameters() if p.requires_grad
        }
    assert targets == {"layers.0.attention", "layers.0.moe.shared", "layers.1.attention", "layers.1.mlp"}


def test_a_target_that_no_layer_of_experts_has_is_reported_with_those_that_there_are() -> None:
    only_experts = replace(MOE, moe=replace(MOE.moe, layer_freq=1, shared_expert_intermediate_size=0))
    for rank, sizes in ((0, Sizes()), (1, Sizes(world=2, pp=2))):
        model = GPTModel(only_experts, mesh=Mesh.imagine(rank, sizes), seed=3)
        with pytest.raises(ValueError) as raised:
            add_lora(model, LoraConfig(rank=2))
        assert str(raised.value) == (
            "the model has no linear named 'mlp.up', 'mlp.down' for lora; its layers have 'attention.projection', "
            "'attention.qkv', and experts that stay frozen; name targets among them"
        )
        add_lora(model, LoraConfig(rank=2, targets=("attention.qkv",)))


# --- models of several stacks -----------------------------------------------------------------------------------------

T5 = T5Config(num_layers=2, hidden_size=16, num_attention_heads=4, ffn_hidden_size=24, vocab_size=37, init_std=0.2)
OF_T5 = LoraConfig(
    rank=2,
    dropout=0.3,
    targets=(
        "attention.qkv",
        "mlp.down",
        "cross_attention.query",
        "cross_attention.key_value",
        "cross_attention.projection",
    ),
)
CROSS = [
    f"decoder.layers.{i}.cross_attention.{linear}" for i in range(2) for linear in ("query", "key_value", "projection")
]


def t5_of(mesh: Mesh | None = None) -> T5Model:
    """A T5 with paths whose B are not zero."""
    model = T5Model(T5, mesh=mesh or Mesh.single(), seed=3)
    add_lora(model, OF_T5, seed=4)
    for name, parameter, shard in sharded_parameters(model):
        if name.endswith(".lora.b"):
            fill(parameter, torch.arange(float(torch.Size(shard.global_shape).numel())).view(shard.global_shape).sin())
    return model


def test_cross_attention_of_a_decoder_gets_paths_where_it_is_named() -> None:
    bare, model = T5Model(T5, mesh=Mesh.single(), seed=3), T5Model(T5, mesh=Mesh.single(), seed=3)
    add_lora(model, LoraConfig(rank=2), seed=4)
    assert not any("cross_attention" in name for name, p in model.named_parameters() if p.requires_grad)
    model = t5_of()
    trained = {name.rpartition(".lora.")[0] for name, p in model.named_parameters() if p.requires_grad}
    assert {name for name in trained if "cross_attention" in name} == set(CROSS)
    model(TOKENS, TOKENS, labels=TOKENS).backward()
    # Each reaches the loss.
    assert all((p.grad is not None) == (".lora." in name) for name, p in model.named_parameters())
    assert min(float(p.grad.abs().max()) for p in model.parameters() if p.grad is not None) > 1e-8
    model.eval()
    before = model(TOKENS, TOKENS)
    merge_lora(model)
    assert (model(TOKENS, TOKENS) - before).abs().max() < 1e-12
    assert (before - bare.eval()(TOKENS, TOKENS)).abs().max() > 1e-2


def gradients_of_t5(world: Any, sp: bool, num_chunks: int) -> dict[str, Tensor]:
    model = t5_of(thread_mesh(world, sp))
    send_in_chunks(model, num_chunks)
    model.draws.step = 5
    model(TOKENS, TOKENS, labels=TOKENS).backward()
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    return {name: grad for name, grad in unsplit_gradients(model).items() if name in trained}


@pytest.mark.parametrize(("sp", "num_chunks"), [(False, 1), (True, 1), (True, 3)])
def test_gradients_of_paths_in_cross_attention_do_not_depend_on_the_mesh(sp: bool, num_chunks: int) -> None:
    [wanted] = run_on_threads(1, gradients_of_t5, False, 1)
    for found in run_on_threads(2, gradients_of_t5, sp, num_chunks):
        assert found.keys() == wanted.keys() >= {f"{name}.lora.a" for name in CROSS}
        for name, grad in wanted.items():
            assert grad.abs().max() > 1e-8
            # Sums of a few hundred float64 numbers of order 1, in another order.
            assert (found[name] - grad).abs().max() < 1e-11, name


def test_a_stage_without_a_decoder_takes_targets_in_cross_attention() -> None:
    found = set()
    for rank in range(2):
        model = T5Model(T5, mesh=Mesh.imagine(rank, Sizes(world=2, pp=2)), seed=3)
        add_lora(model, OF_T5, seed=4)
        found |= {name.rpartition(".lora.")[0] for name, p in model.named_parameters() if p.requires_grad}
    assert found == {name.rpartition(".lora.")[0] for name, p in t5_of().named_parameters() if p.requires_grad}
    with pytest.raises(ValueError, match=r"no linear named 'cross_attention\.query'"):
        add_lora(GPTModel(LLAMA, mesh=Mesh.single()), LoraConfig(targets=("cross_attention.query",)))


TOWER = VisionConfig(num_layers=3, hidden_size=8, num_attention_heads=2, image_size=6, patch_size=3)
LLAVA = LlavaConfig.of(LLAMA, vision=TOWER, image_token=36)


@pytest.mark.parametrize(("feature_layer", "num_used"), [(-2, 2), (-3, 1), (3, 3)])
def test_layers_of_a_tower_that_never_run_get_no_paths(feature_layer: int, num_used: int) -> None:
    model = LlavaModel(replace(LLAVA, feature_layer=feature_layer), mesh=Mesh.single(), seed=3)
    add_lora(model, LoraConfig(rank=2), seed=4)
    trained = {
        name.partition(".attention")[0].partition(".mlp")[0] for name, p in model.named_parameters() if p.requires_grad
    }
    assert trained == {"layers.0", "layers.1", *(f"vision.layers.{i}" for i in range(num_used))}
    tokens = TOKENS.clamp(max=35)
    tokens[0, :4] = 36
    model(tokens, labels=tokens, images=[torch.randn(1, 3, 6, 6), None]).backward()
    # A weight that is trained and gets no gradient would be waited for.
    assert all((p.grad is not None) == p.requires_grad for p in model.parameters())


def test_parts_of_a_llava_are_frozen_with_their_paths() -> None:
    model = LlavaModel(LLAVA, mesh=Mesh.single(), seed=3)
    add_lora(model, LoraConfig(rank=2), seed=4)
    model.freeze("vision")
    assert {name.partition(".")[0] for name, p in model.named_parameters() if p.requires_grad} == {"layers"}


def test_the_dense_layers_of_a_tower_are_no_stage_of_experts() -> None:
    language = replace(MOE, moe=MoEConfig(router=RouterConfig(num_experts=4), ffn_hidden_size=8))
    config = LlavaConfig.of(language, vision=TOWER, image_token=36)
    for rank in range(2):
        model = LlavaModel(config, mesh=Mesh.imagine(rank, Sizes(world=2, pp=2)), seed=3)
        add_lora(model, LoraConfig(rank=2), seed=4)
        found = {name.rpartition(".lora.")[0] for name, p in model.named_parameters() if p.requires_grad}
        assert ("layers.1.attention.qkv" in found) == (rank == 0)
        assert ("vision.layers.0.mlp.up" in found) == (rank == 1)
