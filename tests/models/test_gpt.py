"""GPTModel equals a GPT in plain torch: loss, logits and every gradient, on one device and on any tp and sp."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron.comm.rng import Draws
from lightning_megatron.mesh import Mesh, Sizes, ambient
from lightning_megatron.models import GPTConfig, GPTModel
from lightning_megatron.sharding import Initial, shard_of, shard_parameter, sharded_parameters
from lightning_megatron.transformer.latent_config import LatentConfig
from lightning_megatron.transformer.rotary import RopeScaling
from tests.harness.threads import new_group, run_on_threads
from tests.reference.gpt import ReferenceGPT
from tests.reference.unsplit import unsplit_gradients, unsplit_weights, whole

# Sums of a few hundred float64 numbers of order 1, in another order.
TOLERANCE = 1e-12
SEED = 7
SMALL: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 8,
    "ffn_hidden_size": 48,
    "vocab_size": 131,
    "max_sequence_length": 16,
    # Large, so that a wrong layer moves the loss by much.
    "init_std": 0.3,
}
GPT2 = GPTConfig(**SMALL)
LLAMA = GPTConfig(
    **SMALL,
    num_query_groups=2,
    head_dim=6,
    activation="swiglu",
    normalization="rmsnorm",
    add_bias_linear=False,
    position="rotary",
    tie_embeddings=False,
)
LATENT = LatentConfig(q_lora_rank=12, kv_lora_rank=9, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5)
VARIANTS = {
    "gpt2": GPT2,
    "gpt2 tanh, untied, smoothed": replace(GPT2, activation="gelu_tanh", tie_embeddings=False, label_smoothing=0.1),
    "gpt2 dropout": replace(GPT2, hidden_dropout=0.1, attention_dropout=0.2),
    "llama": LLAMA,
    "llama tied, half rotary, qkv bias": replace(LLAMA, tie_embeddings=True, rotary_fraction=0.67, add_qkv_bias=True),
    "llama one group, dropout": replace(LLAMA, num_query_groups=1, hidden_dropout=0.3, attention_dropout=0.1),
    "llama plain heads": replace(LLAMA, num_query_groups=8, rotary_base=100.0),
    "head norms, a window in one layer, stretched waves": replace(
        LLAMA,
        qk_norm=True,
        sliding_window=3,
        full_attention_layers=(1,),
        rope_scaling=RopeScaling(kind="linear", factor=2.0),
    ),
    "head norms, one group, dropout, a window": replace(
        LLAMA, num_query_groups=1, qk_norm=True, attention_dropout=0.1, sliding_window=3
    ),
    "a window of more than half the sequence": replace(LLAMA, sliding_window=5),
    "norms around each half, centered on zero": replace(
        LLAMA, norm_placement="sandwich", normalization="zero_centered_rmsnorm", qk_norm=True, hidden_dropout=0.1
    ),
    "norms of outputs, and of all heads at once": replace(
        LLAMA, norm_placement="output", num_query_groups=4, qk_norm=True, qk_norm_across_heads=True
    ),
    "soft caps, scaled embeddings, windows that turn otherwise": replace(
        LLAMA,
        attention_softcap=1.5,
        logit_softcap=2.0,
        score_dim=3,
        scales_embedding=True,
        sliding_window=3,
        full_attention_layers=(1,),
        window_rotary_base=10.0,
        rope_scaling=RopeScaling(kind="linear", factor=2.0),
    ),
    "sinks, a window in one layer": replace(
        LLAMA, attention_sinks=True, sliding_window=3, full_attention_layers=(1,), attention_dropout=0.1
    ),
    "sinks, one group, soft caps": replace(LLAMA, num_query_groups=1, attention_sinks=True, attention_softcap=1.0),
    "latents": replace(LLAMA, num_query_groups=8, head_dim=10, latent=LATENT),
    "latents, queries of none, large values, dropout, a window": replace(
        LLAMA,
        num_query_groups=8,
        head_dim=10,
        latent=replace(LATENT, q_lora_rank=0, v_head_dim=14),
        attention_dropout=0.1,
        sliding_window=3,
    ),
    "no positions, 4 groups, padded rows": replace(LLAMA, num_query_groups=4, position="none", vocab_multiple=16),
}
each_variant = pytest.mark.parametrize("variant", VARIANTS)


def batch_of(batch: int, sequence: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, labels with holes and an uneven mask."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(131, (batch, sequence), generator=generator)
    labels = torch.randint(131, (batch, sequence), generator=generator)
    labels[torch.rand(batch, sequence, generator=generator) < 0.2] = -100
    mask = torch.rand(batch, sequence, generator=generator, dtype=torch.float64)
    mask[0, :4] = 0.0
    return tokens, labels, mask


def model_of(config: GPTConfig, mesh: Mesh | None = None) -> GPTModel:
    """A model in float64 whose biases and norms are not at their initial zeros and ones."""
    model = GPTModel(config, mesh=mesh, seed=SEED).double()
    with torch.no_grad():
        for name, parameter, shard in sharded_parameters(model):
            if shard.initial.std == 0.0:
                generator = torch.Generator().manual_seed(sum(name.encode()))
                values = 0.2 * torch.randn(shard.global_shape, generator=generator, dtype=torch.float64)
                box = shard.box
                for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
                    values = values.narrow(dim, offset, size)
                shard.valid(parameter).add_(values)
    return model


def reference_of(
    config: GPTConfig, weights: dict[str, Tensor], step: int = 0
) -> tuple[ReferenceGPT, dict[str, Tensor]]:
    leaves = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
    return ReferenceGPT(config, leaves, Draws(seed=SEED, step=step)), leaves


def largest_difference(one: dict[str, Tensor], two: dict[str, Tensor]) -> float:
    assert one.keys() == two.keys()
    return max(float((one[name] - two[name]).abs().max() / two[name].abs().max().clamp(min=1)) for name in one)


@each_variant
def test_loss_and_every_gradient_equal_the_reference(variant: str) -> None:
    config = VARIANTS[variant]
    model = model_of(config)
    tokens, labels, mask = batch_of(3, 11)
    reference, leaves = reference_of(config, unsplit_weights(model))
    expected = reference.loss(tokens, labels, mask)
    expected.backward()
    loss = model(tokens, labels=labels, loss_mask=mask)
    loss.backward()
    assert loss.dtype == torch.float64 and loss.shape == ()
    assert abs(loss.item() - expected.item()) < TOLERANCE
    grads = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    assert largest_difference(unsplit_gradients(model), grads) < TOLERANCE
    assert min(float(grad.abs().max()) for grad in grads.values()) > 1e-6  # every weight is seen by the comparison
    assert abs(reference.loss(tokens, labels).item() - loss.item()) > 1e-3  # and so is the mask


@each_variant
def test_logits_and_their_gradients_equal_the_reference(variant: str) -> None:
    config = VARIANTS[variant]
    model = model_of(config)
    tokens, _, _ = batch_of(2, 9)
    reference, leaves = reference_of(config, unsplit_weights(model))
    expected = reference.logits(tokens)
    logits = model(tokens)
    assert logits.shape == (2, 9, 131)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-11)
    expected.pow(2).mean().backward()
    logits.pow(2).mean().backward()
    grads = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    assert largest_difference(unsplit_gradients(model), grads) < 1e-10


def test_dropout_changes_with_the_step_and_stops_in_evaluation() -> None:
    config = VARIANTS["gpt2 dropout"]
    model = model_of(config)
    tokens, labels, mask = batch_of(2, 8)
    weights = unsplit_weights(model)
    losses = [model(tokens, labels, mask).item() for _ in range(2)]
    for step in range(2):
        assert abs(reference_of(config, weights, step)[0].loss(tokens, labels, mask).item() - losses[step]) < TOLERANCE
    assert abs(losses[0] - losses[1]) > 1e-3
    model.eval()
    plain = ReferenceGPT(config, weights).loss(tokens, labels, mask).item()
    assert abs(model(tokens, labels, mask).item() - plain) < TOLERANCE


def test_a_part_of_the_batch_draws_the_masks_that_the_whole_batch_gives_it() -> None:
    model = model_of(VARIANTS["gpt2 dropout"])
    tokens, _, _ = batch_of(4, 8)
    with torch.no_grad():
        together = model(tokens)
        model.draws.first_sample = 2
        second_half = model(tokens[2:])
        model.draws.first_sample = 0
        elsewhere = model(tokens[2:])
    assert (second_half - together[2:]).abs().max() < TOLERANCE
    assert (elsewhere - together[2:]).abs().max() > 1e-3


def test_the_loss_weight_counts_what_the_mean_is_over() -> None:
    model = model_of(GPT2)
    tokens, labels, mask = batch_of(2, 8)
    whole_loss = model(tokens, labels, mask)
    whole_weight = model.loss_weight
    assert whole_weight is not None
    assert whole_weight.item() == pytest.approx(mask[labels != -100].sum().item(), abs=1e-12)
    parts = []
    for row in range(2):
        loss = model(tokens[row : row + 1], labels[row : row + 1], mask[row : row + 1])
        assert model.loss_weight is not None
        parts.append((loss, model.loss_weight))
    mean = sum(loss * weight for loss, weight in parts) / whole_weight
    assert abs(mean.item() - whole_loss.item()) < TOLERANCE
    assert abs((parts[0][0] + parts[1][0]).item() / 2 - whole_loss.item()) > 1e-4
    model(tokens, labels)
    assert model.loss_weight is not None and model.loss_weight.item() == (labels != -100).sum().item()
    model(tokens)
    assert model.loss_weight is None


def test_a_batch_with_no_valid_token_has_loss_zero_and_zero_gradients() -> None:
    model = model_of(GPT2)
    tokens, labels, _ = batch_of(2, 8)
    for batch in ((torch.full_like(labels, -100), None), (labels, torch.zeros(2, 8))):
        model.zero_grad()
        loss = model(tokens, *batch)
        loss.backward()
        assert loss.item() == 0.0 and model.loss_weight is not None and model.loss_weight.item() == 0.0
        assert all(p.grad is not None and p.grad.abs().max() == 0.0 for p in model.parameters())


def test_a_mask_may_hold_anything_where_there_is_no_label() -> None:
    model = model_of(GPT2)
    tokens, labels, mask = batch_of(2, 8)
    poisoned = torch.where(labels == -100, torch.nan, mask)
    assert model(tokens, labels, poisoned).item() == model(tokens, labels, mask).item()


# Layouts


def on_mesh(world: Any, sizes: Sizes, config: GPTConfig, batch: int, sequence: int) -> dict[str, Any]:
    model = model_of(config, Mesh.build(sizes, world.rank(), new_group))
    model.draws.step = 5
    tokens, labels, mask = batch_of(batch, sequence)
    loss = model(tokens, labels, mask)
    loss.backward()
    grads = unsplit_gradients(model)
    padding = max(
        (float((p.grad - _with_zero_padding(p)).abs().max()) for _, p, _ in sharded_parameters(model)), default=0.0
    )
    model.draws.step = 5
    logits = model(tokens)
    model.zero_grad()
    logits.pow(2).mean().backward()
    return {
        "loss": loss.item(),
        "grads": grads,
        "weights": unsplit_weights(model),
        "padding": padding,
        "logits": logits.detach(),
        "logit_grads": unsplit_gradients(model),
    }


def _with_zero_padding(parameter: Tensor) -> Tensor:
    shard = shard_of(parameter)
    assert parameter.grad is not None
    cleared = torch.zeros_like(parameter.grad)
    shard.valid(cleared).copy_(shard.valid(parameter.grad))
    return cleared


@pytest.mark.matrix
@each_variant
@pytest.mark.parametrize(
    "sizes",
    [Sizes(world=2, tp=2), Sizes(world=4, tp=4, sequence_parallel=True), Sizes(world=2, tp=2, sequence_parallel=True)],
    ids=["tp2", "tp4 sp", "tp2 sp"],
)
def test_any_tensor_parallel_layout_equals_the_reference(variant: str, sizes: Sizes) -> None:
    config = VARIANTS[variant]
    batch, sequence = 3, 7  # 21 tokens: neither 2 nor 4 divides them
    weights = unsplit_weights(model_of(config))
    tokens, labels, mask = batch_of(batch, sequence)
    reference, leaves = reference_of(config, weights, step=5)
    loss = reference.loss(tokens, labels, mask)
    grads = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
    logits = reference.logits(tokens)
    logit_grads = dict(zip(leaves, torch.autograd.grad(logits.pow(2).mean(), list(leaves.values())), strict=True))
    for result in run_on_threads(sizes.world, on_mesh, sizes, config, batch, sequence):
        assert largest_difference(result["weights"], weights) == 0.0
        assert abs(result["loss"] - loss.item()) < TOLERANCE
        assert largest_difference(result["grads"], grads) < TOLERANCE
        assert result["padding"] == 0.0
        assert (result["logits"] - logits).abs().max() < 1e-11
        assert largest_difference(result["logit_grads"], logit_grads) < 1e-10


@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["tied", "untied"])
@pytest.mark.parametrize("pp", [2, 3])
def test_every_stage_is_born_with_its_part_of_the_unsplit_model(config: GPTConfig, pp: int) -> None:
    config = replace(config, num_layers=3)
    unsplit = dict(GPTModel(config, seed=SEED).named_parameters())
    seen: set[str] = set()
    for rank in range(2 * pp):
        mesh = Mesh.imagine(rank, Sizes(world=2 * pp, pp=pp, tp=2))
        model = GPTModel(config, mesh=mesh, seed=SEED)
        names = {name for name, _ in model.named_parameters()}
        has_token_embedding = mesh.pp.is_first or (mesh.pp.is_last and config.tie_embeddings)
        assert ("embedding.tokens.weight" in names) == has_token_embedding
        assert ("embedding.positions.weight" in names) == (mesh.pp.is_first and config.position == "learned")
        for name, parameter, shard in sharded_parameters(model):
            expected = unsplit[name]
            for dim, (offset, size) in enumerate(zip(shard.box.offsets, shard.box.sizes, strict=True)):
                expected = expected.narrow(dim, offset, size)
            assert torch.equal(shard.valid(parameter), expected), name
        seen |= names
    assert seen == set(unsplit)


def test_the_mesh_that_is_ambient_is_taken() -> None:
    with ambient(Mesh.imagine(0, Sizes(world=2, tp=2))):
        assert GPTModel(GPT2, seed=1).get_parameter("layers.0.mlp.up.weight").shape == (24, 32)
    assert GPTModel(GPT2, seed=1).get_parameter("layers.0.mlp.up.weight").shape == (48, 32)


def test_names_of_the_parameters_are_those_of_checkpoints() -> None:
    model = GPTModel(replace(LLAMA, num_layers=1), seed=1)
    shapes = {name: tuple(shard.global_shape) for name, _, shard in sharded_parameters(model)}
    assert shapes == {
        "embedding.tokens.weight": (131, 32),
        "layers.0.attention_norm.weight": (32,),
        "layers.0.attention.qkv.weight": (2 * (4 + 2) * 6, 32),
        "layers.0.attention.projection.weight": (32, 48),
        "layers.0.mlp_norm.weight": (32,),
        "layers.0.mlp.up.weight": (2, 48, 32),
        "layers.0.mlp.down.weight": (32, 48),
        "final_norm.weight": (32,),
        "head.weight": (131, 32),
    }
    assert set(model.state_dict()) == set(shapes)
    tied = GPTModel(replace(GPT2, num_layers=1), seed=1)
    assert "head.weight" not in tied.state_dict() and "embedding.positions.weight" in tied.state_dict()


def test_output_projections_start_smaller_by_the_root_of_twice_the_layers() -> None:
    model = GPTModel(replace(GPT2, num_layers=8, hidden_size=64, ffn_hidden_size=256), seed=1)
    for name, parameter, _ in sharded_parameters(model):
        if name.endswith(("projection.weight", "down.weight")):
            assert parameter.std().item() == pytest.approx(0.3 / 4, rel=0.05)
        elif name.endswith(("qkv.weight", "up.weight", "tokens.weight")):
            assert parameter.std().item() == pytest.approx(0.3, rel=0.05)


# Faults


def test_every_fault_of_a_layout_is_reported_at_once() -> None:
    config = GPTConfig(num_layers=2, hidden_size=48, num_attention_heads=6, ffn_hidden_size=50, vocab_size=9)
    with pytest.raises(ValueError) as raised:
        GPTModel(config, mesh=Mesh.imagine(0, Sizes(world=12, tp=4, pp=3)))
    text = str(raised.value)
    assert "num_attention_heads (6)" in text and "tensor_model_parallel_size may be 1, 2, 3, 6" in text
    assert "ffn_hidden_size (50)" in text and "layers (2)" in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": torch.zeros(2, 7, dtype=torch.long)}, "labels .* shape of tokens"),
        ({"labels": torch.zeros(2, 8, dtype=torch.long), "loss_mask": torch.ones(2)}, "loss_mask .* shape of tokens"),
        ({"loss_mask": torch.ones(2, 8)}, "loss_mask needs labels"),
        ({"tokens": torch.zeros(8, dtype=torch.long)}, "integers of shape"),
        ({"tokens": torch.zeros(2, 8)}, "integers of shape"),
        ({"tokens": torch.zeros(2, 17, dtype=torch.long)}, "max_sequence_length"),
    ],
)
def test_wrong_inputs_are_reported(change: dict[str, Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GPTModel(GPT2, seed=1)(**{"tokens": torch.zeros(2, 8, dtype=torch.long), **change})


def test_rotary_positions_may_go_past_the_trained_length() -> None:
    model = model_of(LLAMA)
    tokens = torch.arange(40).view(1, 40)
    expected = reference_of(LLAMA, unsplit_weights(model))[0].logits(tokens)
    assert (model(tokens) - expected).abs().max() < 1e-11


def test_half_precision_stays_close_to_double() -> None:
    tokens, labels, mask = batch_of(2, 8)
    for config in (replace(GPT2, init_std=0.02), replace(LLAMA, init_std=0.02)):
        model = model_of(config)
        exact = model(tokens, labels, mask).item()
        with torch.autocast("cpu", torch.bfloat16):
            mixed = model.float()(tokens, labels, mask)
        mixed.backward()
        half = model.bfloat16()(tokens, labels, mask)
        half.backward()
        for loss in (mixed, half):
            assert loss.dtype == torch.float32
            assert abs(loss.item() - exact) < 0.02  # bfloat16 keeps 8 bits


def test_unsplit_weights_join_what_the_mesh_cut() -> None:
    """The comparison itself bites: swapped shards would be seen."""
    joined = run_on_threads(2, _joined_rows)
    assert all(torch.equal(rows, torch.arange(5.0)) for rows in joined)


def _joined_rows(world: Any) -> Tensor:
    mesh = Mesh.build(Sizes(world=2, tp=2), world.rank(), new_group)
    parameter = shard_parameter((5,), initial=Initial(), dim=0, axis=mesh.tp)
    return whole(torch.arange(3.0) + 3 * mesh.tp.rank, shard_of(parameter))
