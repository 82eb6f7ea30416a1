"""T5Model on any layout equals T5Model on one device, which equals transformers (tests/hf/test_t5.py)."""

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron.comm import collectives
from lightning_megatron.context import attention
from lightning_megatron.context.attention_step import AttentionStep, Kernel
from lightning_megatron.context.flex import FlexAttention
from lightning_megatron.mesh import AttentionKernel, Mesh, Sizes, StageLayout
from lightning_megatron.models import GPTConfig, T5Config, T5Model
from lightning_megatron.pipeline.collective import CollectiveCall
from lightning_megatron.pipeline.registry import placement_of
from lightning_megatron.pipeline.schedule_spec import Schedule
from lightning_megatron.sharding import sharded_parameters
from tests.context.plain_flex import plain_flex
from tests.harness.threads import new_group, run_on_threads
from tests.models.scheduled import mailbox_of, run_step, summed
from tests.models.test_gpt import largest_difference
from tests.reference.unsplit import unsplit_gradients

# Sums of a few hundred float64 numbers of order 1, in another order.
TOLERANCE = 1e-11
SEED = 7
T5 = T5Config(
    num_layers=2,
    num_decoder_layers=3,
    hidden_size=32,
    num_attention_heads=4,
    head_dim=6,
    ffn_hidden_size=48,
    vocab_size=131,
    relative_buckets=8,
    relative_max_distance=10,
    # Large, so that a wrong layer moves the loss by much.
    init_std=0.3,
)
V1_1 = replace(T5, activation="geglu_tanh", tie_embeddings=False, scales_head=False)
VARIANTS = {
    "t5": T5,
    "v1.1": V1_1,
    "t5 dropout": replace(T5, hidden_dropout=0.1, attention_dropout=0.2, ffn_dropout=0.3),
    "learned positions, layer norms, biases, own embeddings": replace(
        T5,
        position="learned",
        normalization="layernorm",
        add_bias_linear=True,
        share_embeddings=False,
        max_sequence_length=16,
        max_decoder_sequence_length=12,
    ),
    "v1.1 one key head, no positions, dropout": replace(
        V1_1, num_query_groups=1, position="none", hidden_dropout=0.1, ffn_dropout=0.2, label_smoothing=0.1
    ),
}
each_variant = pytest.mark.parametrize("variant", VARIANTS)
# None of these divides by the ranks.
BATCH, LENGTH, DECODER_LENGTH = 3, 13, 9
Batch = dict[str, Tensor]


def batch_of(kind: str, rows: int = BATCH) -> Batch:
    """Whole rows; rows with padding at either end, one of nothing else; or packed documents of both stacks."""
    generator = torch.Generator().manual_seed(3)
    batch = {
        "encoder_tokens": torch.randint(131, (rows, LENGTH), generator=generator),
        "decoder_tokens": torch.randint(131, (rows, DECODER_LENGTH), generator=generator),
        "labels": torch.randint(131, (rows, DECODER_LENGTH), generator=generator),
        "loss_mask": torch.rand(rows, DECODER_LENGTH, generator=generator, dtype=torch.float64),
    }
    batch["labels"][torch.rand(rows, DECODER_LENGTH, generator=generator) < 0.2] = -100
    if kind == "padded":
        mask = torch.ones(rows, LENGTH, dtype=torch.bool)
        mask[0, 7:] = mask[1, :2] = mask[2] = False
        batch["encoder_padding_mask"] = mask
    if kind == "packed":
        # Of row 0 the encoder lacks document 1, of row 1 the decoder lacks document 0.
        batch["encoder_segments"] = torch.tensor(
            [[0] * 5 + [2] * 8, [0] * 3 + [1] * 9 + [-1]] + [[0] * 13] * (rows - 2)
        )
        batch["decoder_segments"] = torch.tensor(
            [[0] * 3 + [1] * 2 + [2] * 4, [1] * 7 + [-1] * 2] + [[0] * 9] * (rows - 2)
        )
    return batch


def model_of(config: T5Config, mesh: Mesh | None = None) -> T5Model:
    """A model in float64 whose biases and norms are not at their initial zeros and ones."""
    model = T5Model(config, mesh=mesh, seed=SEED).double()
    with torch.no_grad():
        for name, parameter, shard in sharded_parameters(model):
            if shard.initial.std == 0.0:
                generator = torch.Generator().manual_seed(sum(name.encode()))
                values = 0.2 * torch.randn(shard.global_shape, generator=generator, dtype=torch.float64)
                for dim, (offset, size) in enumerate(zip(shard.box.offsets, shard.box.sizes, strict=True)):
                    values = values.narrow(dim, offset, size)
                shard.valid(parameter).add_(values)
    return model


def logits_of(model: T5Model, batch: Batch) -> Tensor:
    logits: Tensor = model(**{name: value for name, value in batch.items() if name not in ("labels", "loss_mask")})
    return logits


def results_of(model: T5Model, batch: Batch) -> dict[str, Any]:
    """Loss, logits and the gradients of either; gradients over cp are averaged as over dp."""
    cp = model.mesh.cp
    found: dict[str, Any] = {}
    model.draws.step = 5
    loss = model(**batch)
    loss.backward()
    found["loss"] = loss.item()
    found["grads"] = {name: collectives.all_reduce(g, cp) / cp.size for name, g in unsplit_gradients(model).items()}
    model.zero_grad()
    model.draws.step = 5
    logits = logits_of(model, batch)
    logits.pow(2).mean().backward()
    found["logits"] = logits.detach()
    found["of logits"] = {n: collectives.all_reduce(g, cp) / cp.size for n, g in unsplit_gradients(model).items()}
    return found


def on_mesh(world: Any, sizes: Sizes, config: T5Config, kind: str) -> dict[str, Any]:
    return results_of(model_of(config, Mesh.build(sizes, world.rank(), new_group)), batch_of(kind))


@functools.cache
def on_one_device(variant: str, kind: str) -> dict[str, Any]:
    return results_of(model_of(VARIANTS[variant]), batch_of(kind))


LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2},
    "tp2 sp": {"tp": 2, "sequence_parallel": True},
    "tp4 sp": {"tp": 4, "sequence_parallel": True},
    "cp2": {"cp": 2},
    "cp2 all-gather": {"cp": 2, "cp_exchange": "all_gather"},
    "cp2 all-to-all": {"cp": 2, "cp_ulysses": 2},
    "cp2 tp2 sp": {"cp": 2, "tp": 2, "sequence_parallel": True},
}


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["whole", "padded", "packed"])
@each_variant
@pytest.mark.parametrize("layout", LAYOUTS)
def test_loss_logits_and_gradients_of_a_cut_layer_are_those_of_one_device(layout: str, variant: str, kind: str) -> None:
    config, options = VARIANTS[variant], LAYOUTS[layout]
    sizes = Sizes(world=options.get("cp", 1) * options.get("tp", 1), pads_uneven=True, **options)
    expected = on_one_device(variant, kind)
    assert min(float(grad.abs().max()) for grad in expected["grads"].values()) > 1e-6  # all weights are compared
    for found in run_on_threads(sizes.world, on_mesh, sizes, config, kind):
        assert abs(found["loss"] - expected["loss"]) < TOLERANCE
        assert (found["logits"] - expected["logits"]).abs().max() < TOLERANCE
        assert largest_difference(found["grads"], expected["grads"]) < TOLERANCE
        assert largest_difference(found["of logits"], expected["of logits"]) < TOLERANCE


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["whole", "padded", "packed"])
@pytest.mark.parametrize("layout", ["cp2", "cp2 all-to-all", "cp2 tp2 sp"])
def test_flex_attention_adds_relative_biases_as_other_kernels_do(
    layout: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = []

    def chosen(queries: Tensor, pairing: AttentionStep, kernel: AttentionKernel) -> Kernel:
        kernels.append(kernel)
        return FlexAttention(plain_flex)  # its own kernels are CUDA's

    expected = on_one_device("t5", kind)
    monkeypatch.setattr(attention, "kernel_for", chosen)
    options = LAYOUTS[layout]
    world = options["cp"] * options.get("tp", 1)
    sizes = Sizes(world=world, attention_kernel="flex", **options)
    for found in run_on_threads(world, on_mesh, sizes, T5, kind):
        assert (found["logits"] - expected["logits"]).abs().max() < TOLERANCE
        assert largest_difference(found["grads"], expected["grads"]) < TOLERANCE
        assert largest_difference(found["of logits"], expected["of logits"]) < TOLERANCE
    assert set(kernels) == {"flex"}


@pytest.mark.parametrize("variant", ["t5", "learned positions, layer norms, biases, own embeddings"])
def test_a_packed_document_is_as_it_is_alone(variant: str) -> None:
    model, batch = model_of(VARIANTS[variant]), batch_of("packed")
    packed = logits_of(model, batch)
    for row, number in ((0, 0), (0, 2), (1, 1), (2, 0)):
        own = [batch[f"{stack}_segments"][row] == number for stack in ("encoder", "decoder")]
        alone = model(batch["encoder_tokens"][row, own[0]][None], batch["decoder_tokens"][row, own[1]][None])
        assert (packed[row, own[1]] - alone[0]).abs().max() < TOLERANCE
    assert packed[1, 7:].abs().max() == 0.0  # of no document


def test_who_has_nothing_to_look_at_looks_at_nothing() -> None:
    model, batch = model_of(T5), batch_of("packed")
    before = logits_of(model, batch)
    batch["encoder_tokens"] = (batch["encoder_tokens"] + 1) % 131
    moved = (logits_of(model, batch) - before).abs().amax(-1) > 1e-6
    assert moved.tolist() == [[True] * 3 + [False] * 2 + [True] * 4, [True] * 7 + [False] * 2, [True] * 9]


# Stages


def scheduled(world: Any, sizes: Sizes, config: T5Config, schedule: Schedule, kind: str) -> dict[str, Any]:
    mesh = Mesh.build(sizes, world.rank(), new_group)
    model = model_of(config, mesh)
    model.draws.step = 5
    num = schedule.microbatches
    batch = batch_of(kind, 2 * num)
    total = torch.where(batch["labels"] != -100, batch["loss_mask"], 0.0).sum()
    mailbox = mailbox_of(mesh)
    loss = run_step(model, schedule, batch, total, mailbox)
    model.driver = CollectiveCall(mesh.pp, mailbox, torch.device("cpu"), lambda rows: 2)
    model.eval()
    with torch.no_grad():
        logits = logits_of(model, batch)
    return {"loss": loss, "grads": unsplit_gradients(model), "logits": logits, "stages": model.stages}


SCHEDULES = {
    "pp2": (Schedule(name="1f1b", pp=2, chunks=1, microbatches=3), {}),
    "pp5, a layer each": (Schedule(name="1f1b", pp=5, chunks=1, microbatches=3), {}),
    "pp2 vp2": (Schedule(name="interleaved", pp=2, chunks=2, microbatches=4), {}),
    "pp2 zb_v": (Schedule(name="zb_v", pp=2, chunks=2, microbatches=3), {}),
    "pp3 by cost": (Schedule(name="1f1b", pp=3, chunks=1, microbatches=2), {"balance": "cost"}),
    "pp4, a cut within either stack and an empty stage": (
        Schedule(name="1f1b", pp=4, chunks=1, microbatches=2),
        {"text": "Et|tt||ttL"},
    ),
    "pp3, both stacks on the second": (Schedule(name="1f1b", pp=3, chunks=1, microbatches=2), {"text": "Et|tttt|L"}),
}


@pytest.mark.matrix
@pytest.mark.parametrize("variant", ["t5 dropout", "learned positions, layer norms, biases, own embeddings"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_stages_over_both_stacks_make_the_gradients_of_one_device(name: str, variant: str) -> None:
    check_stages(name, variant, "padded", tp=1)


@pytest.mark.parametrize("kind", ["whole", "padded", "packed"])
def test_stages_under_tensor_parallelism_make_the_gradients_of_one_device(kind: str) -> None:
    check_stages("pp2 vp2", "t5 dropout", kind, tp=2)


def check_stages(name: str, variant: str, kind: str, tp: int) -> None:
    schedule, layout = SCHEDULES[name]
    config = VARIANTS[variant]
    sizes = Sizes(
        world=schedule.pp * tp,
        pp=schedule.pp,
        vp=schedule.chunks,
        tp=tp,
        sequence_parallel=tp > 1,
        placement=placement_of(schedule.name),
        stage_layout=StageLayout(**layout),
    )
    alone, batch = model_of(config), batch_of(kind, 2 * schedule.microbatches)
    alone.draws.step = 5
    loss = alone(**batch)
    loss.backward()
    expected = unsplit_gradients(alone)
    alone.eval()
    logits = logits_of(alone, batch).detach()
    found = run_on_threads(sizes.world, scheduled, sizes, config, schedule, kind)
    assert sum(result["loss"] for result in found[::tp]) == pytest.approx(loss.item(), abs=TOLERANCE)
    assert largest_difference(summed([result["grads"] for result in found[::tp]]), expected) < TOLERANCE
    for result in found:
        assert (result["logits"] - logits).abs().max() < TOLERANCE


def test_stages_by_cost_give_long_encoders_more_ranks() -> None:
    config = replace(T5, num_layers=8, num_decoder_layers=8, max_sequence_length=512, max_decoder_sequence_length=32)

    def first_of_decoder(balance: Any) -> int:
        sizes = Sizes(world=4, pp=4, stage_layout=StageLayout(balance=balance))
        model = T5Model(config, mesh=Mesh.imagine(0, sizes))
        return next(stage for stage in range(4) if "decoder.layers.0" in model.parts_of(stage))

    assert (first_of_decoder("layers"), first_of_decoder("cost")) == (2, 3)


def test_every_stage_is_born_with_its_part_of_the_unsplit_model() -> None:
    unsplit = dict(T5Model(T5, seed=SEED).named_parameters())
    seen: set[str] = set()
    for rank in range(5):
        model = T5Model(T5, mesh=Mesh.imagine(rank, Sizes(world=5, pp=5)), seed=SEED)
        own = dict(model.named_parameters())
        assert all(torch.equal(parameter, unsplit[name]) for name, parameter in own.items())
        stage = model.mesh.own_stages[0]
        stack = "encoder" if stage < 2 else "decoder"
        assert f"{stack}.layers.0.relative_bias.weight" in own
        assert ("embedding.tokens.weight" in own) == (stage in (0, 1, 4))
        seen |= own.keys()
    assert seen == unsplit.keys()


# Faults


@pytest.fixture
def small() -> tuple[T5Model, Batch]:
    return T5Model(T5, seed=1), batch_of("packed")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": torch.zeros(3, 13, dtype=torch.long)}, "labels .* shape of decoder_tokens"),
        ({"labels": None}, "loss_mask needs labels"),
        ({"decoder_segments": None}, "go together"),
        ({"encoder_padding_mask": torch.zeros(3, 13)}, "says nothing beside segments"),
        ({"encoder_segments": torch.zeros(3, 9, dtype=torch.long)}, "shape of encoder_tokens"),
    ],
)
def test_inputs_that_do_not_fit_are_reported(
    small: tuple[T5Model, Batch], change: dict[str, Any], message: str
) -> None:
    model, batch = small
    with pytest.raises(ValueError, match=message):
        model(**{**batch, **change})


def test_every_fault_of_a_configuration_is_reported_at_once() -> None:
    with pytest.raises(ValueError) as raised:
        replace(T5, position="rotary", qk_norm=True, relative_buckets=8, num_decoder_layers=-1, ffn_dropout=1.0)
    for name in ("position ('rotary')", "qk_norm", "num_decoder_layers (-1)", "ffn_dropout"):
        assert name in str(raised.value)
    with pytest.raises(ValueError, match=r"relative_max_distance \(4\) must be above half"):
        replace(T5, relative_max_distance=4)
    with pytest.raises(ValueError, match=r"position \('relative'\) must be one of 'learned', 'rotary', 'none'"):
        GPTConfig(num_layers=1, hidden_size=8, num_attention_heads=1, vocab_size=9, position="relative")


def test_a_sequence_that_context_ranks_do_not_divide_is_reported_by_the_cut_of_its_stack() -> None:
    model = T5Model(T5, mesh=Mesh.imagine(0, Sizes(world=2, cp=2, pads_uneven=False)), seed=1)
    tokens = torch.zeros(1, 6, dtype=torch.long)
    with pytest.raises(ValueError, match="of 6 tokens, are no multiples of 4"):
        model.prepare(tokens, tokens)
    model.prepare(tokens, tokens[:, :4])
