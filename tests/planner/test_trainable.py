"""What is frozen costs no more than it must: FLOPs, states, activations and time, against what is built and counted."""

from dataclasses import replace
from itertools import combinations

import pytest
import torch
from torch import Tensor

from lightning_megatron.hf.family import model_of
from lightning_megatron.mesh import Mesh, Sizes
from lightning_megatron.models import GPTConfig, GPTModel, LlavaConfig, T5Config
from lightning_megatron.models.llava import PARTS, LlavaModel
from lightning_megatron.models.llava_cost import training_flops
from lightning_megatron.models.vision import VisionConfig
from lightning_megatron.moe.config import MoEConfig, RouterConfig
from lightning_megatron.optim.config import OptimizerConfig
from lightning_megatron.planner.constants import Constants
from lightning_megatron.planner.flops import MODEL, step_flops
from lightning_megatron.planner.hardware import gpu_of
from lightning_megatron.planner.layer_work import layer_work_of
from lightning_megatron.planner.measured import measured_rank
from lightning_megatron.planner.memory import parameters_of_rank, rank_memory, trained_of_rank
from lightning_megatron.planner.model_parts import SequenceLengths
from lightning_megatron.planner.presets import PRESETS
from lightning_megatron.planner.run import Run
from lightning_megatron.planner.step_time import StepTime, step_time
from lightning_megatron.planner.trainable import Trainable, trainable_parts_of, trained_parameters
from lightning_megatron.transformer.lora import LoraConfig, add_lora

H100 = gpu_of("h100")
_LLAMA = {
    "num_layers": 4,
    "hidden_size": 48,
    "num_attention_heads": 6,
    "num_query_groups": 2,
    "vocab_size": 100,
    "max_sequence_length": 64,
    "tie_embeddings": False,
    "activation": "swiglu",
    "normalization": "rmsnorm",
    "add_bias_linear": False,
    "position": "rotary",
}
LLAMA = GPTConfig(**_LLAMA)  # type: ignore[arg-type]
_VISION = VisionConfig(num_layers=3, hidden_size=24, num_attention_heads=2, image_size=16, patch_size=4)
LLAVA = LlavaConfig(**_LLAMA, vision=_VISION, image_token=7)  # type: ignore[arg-type]
MOE = MoEConfig(router=RouterConfig(num_experts=4), layer_freq=2, shared_expert_intermediate_size=96)
SUBSETS = [subset for number in range(len(PARTS)) for subset in combinations(PARTS, number)]
EVERYWHERE = ("attention.qkv", "attention.projection", "mlp.up", "mlp.down", "shared.up", "shared.down")


def run_of(model: GPTConfig = LLAVA, **changes: object) -> Run:
    fields = {
        "model": model,
        "lengths": SequenceLengths(sequence=64, images=int(isinstance(model, LlavaConfig))),
        "sizes": Sizes(),
        "global_batch_size": 8,
    }
    return Run(**(fields | changes))  # type: ignore[arg-type]


def large_run(**changes: object) -> Run:
    preset = PRESETS["llava_7b"]
    sizes = Sizes(world=8, tp=4, sequence_parallel=True)
    return run_of(preset.model, lengths=preset.lengths, sizes=sizes, global_batch_size=16, **changes)  # type: ignore[arg-type]


def time_of(run: Run) -> StepTime:
    return step_time(run, H100, Constants())


@pytest.mark.parametrize("frozen", SUBSETS, ids="-".join)
@pytest.mark.parametrize("keeps_class_token", [False, True])
def test_flops_of_a_step_are_those_that_the_module_reports(frozen: tuple[str, ...], keeps_class_token: bool) -> None:
    model = replace(LLAVA, keeps_class_token=keeps_class_token)
    run = run_of(model, trained=Trainable(frozen=frozen))
    reported = training_flops(model, lengths={64: 8}, num_images=8, frozen=frozen)
    assert step_flops(run, MODEL) == pytest.approx(reported, rel=1e-12)


@pytest.mark.parametrize("frozen", SUBSETS, ids="-".join)
@pytest.mark.parametrize("sizes", [Sizes(), Sizes(world=2, tp=2, sequence_parallel=True), Sizes(world=2, pp=2)])
def test_a_rank_trains_the_parameters_that_the_model_trains(frozen: tuple[str, ...], sizes: Sizes) -> None:
    run = run_of(sizes=sizes, trained=Trainable(frozen=frozen))
    for rank in range(sizes.world):
        mesh = Mesh.imagine(rank, sizes)
        with torch.device("meta"):
            model = model_of(LLAVA, mesh)
        assert isinstance(model, LlavaModel)
        model.freeze(*frozen)
        built = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        assert sum(trained_of_rank(run, mesh.pp.rank)) == built
        assert sum(parameters_of_rank(run, mesh.pp.rank)) == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("targets", [EVERYWHERE, EVERYWHERE[:1], ("mlp.down", "shared.up")])
@pytest.mark.parametrize("sizes", [Sizes(), Sizes(world=2, tp=2, sequence_parallel=True), Sizes(world=2, ep=2)])
def test_a_rank_holds_the_paths_that_are_added(targets: tuple[str, ...], sizes: Sizes) -> None:
    lora, model = LoraConfig(rank=3, targets=targets), replace(LLAMA, moe=MOE)  # type: ignore[arg-type]
    run = run_of(model, sizes=sizes, trained=Trainable(lora=lora))
    with torch.device("meta"):
        built = GPTModel(model, mesh=Mesh.imagine(0, sizes))
        add_lora(built, lora, seed=0)
    numbers = [(parameter.numel(), parameter.requires_grad) for parameter in built.parameters()]
    assert trained_of_rank(run, 0) == (
        sum(n for n, is_trained in numbers if is_trained),
        0,
    )
    assert sum(parameters_of_rank(run, 0)) == sum(n for n, _ in numbers)


def test_what_is_trained_of_the_unsplit_model_is_reported_without_padding() -> None:
    model = replace(LLAVA, vocab_multiple=64)
    built = model_of(replace(model, vocab_multiple=1), Mesh.single())
    assert isinstance(built, LlavaModel)
    built.freeze("vision")
    run = run_of(model, trained=Trainable(frozen=("vision",)))
    assert trained_parameters(run.model_parts) == sum(p.numel() for p in built.parameters() if p.requires_grad)


def test_frozen_weights_cost_four_bytes_and_nothing_else() -> None:
    full = large_run()
    frozen = large_run(trained=Trainable(frozen=("vision", "language")))
    trained = sum(trained_of_rank(frozen, 0))
    every = sum(parameters_of_rank(full, 0))
    memory = rank_memory(frozen, 0)
    assert trained < 0.01 * every
    assert memory.weights == 2 * trained + 4 * (every - trained)
    assert (memory.gradients, memory.master_weights, memory.moments) == (4 * trained, 4 * trained, 8 * trained)
    distributed = large_run(trained=frozen.trained, optimizer=OptimizerConfig(kind="distributed"))
    assert rank_memory(distributed, 0).moments == 8 * trained / 2


def test_a_tower_without_a_gradient_has_no_backward() -> None:
    sighted, blind = large_run(), large_run(trained=Trainable(frozen=("vision", "projector")))
    unseeing = replace(sighted, lengths=replace(sighted.lengths, images=0))
    assert time_of(blind).backwards == pytest.approx(time_of(unseeing).backwards)
    # What is frozen stays wide, and is cast.
    assert time_of(blind).forwards[0] == pytest.approx(time_of(sighted).forwards[0], rel=0.02)


def test_a_tower_without_a_gradient_saves_nothing_but_its_images() -> None:
    sighted = run_of(micro_batch_size=8, precision="32-true")
    blind = replace(sighted, trained=Trainable(frozen=("vision", "projector")))
    unseeing = replace(sighted, lengths=replace(sighted.lengths, images=0))
    saved, left, none = (measured_rank(run, 0).activations for run in (sighted, blind, unseeing))
    pixels = 8 * 3 * 16**2 * 4
    assert left < none + pixels and saved - left > 10 * pixels


def test_a_backward_through_frozen_weights_does_their_products_once() -> None:
    trained = time_of(large_run())
    frozen = time_of(large_run(trained=Trainable(frozen=("vision", "language"))))
    assert 0.5 < frozen.backwards[0] / trained.backwards[0] < 0.7


def test_before_the_first_path_nobody_needs_a_gradient() -> None:
    config = T5Config(num_layers=2, num_decoder_layers=2, hidden_size=48, num_attention_heads=6, vocab_size=100)
    lengths = SequenceLengths(sequence=32, decoder_sequence=16)
    for target, passing in (("cross_attention.query", [False, False, True, True]), ("attention.qkv", [True] * 4)):
        trained = Trainable(lora=LoraConfig(rank=2, targets=(target,)))  # type: ignore[arg-type]
        parts = trainable_parts_of(config, lengths, trained).parts
        assert [part.passes_gradient for part in parts if part.layer is not None] == passing
        # What embeds has no input to differentiate.
        assert not any(part.passes_gradient for part in parts if part.embedded_tokens)


def test_lora_adapters_cost_their_own_products_and_spare_gradients_of_weights() -> None:
    preset = PRESETS["llama3_8b"]
    fields = {"lengths": preset.lengths, "sizes": Sizes(world=8, tp=2, sequence_parallel=True), "global_batch_size": 16}
    full = run_of(preset.model, **fields)  # type: ignore[arg-type]
    small, large = (replace(full, trained=Trainable(lora=LoraConfig(rank=rank))) for rank in (8, 64))
    assert time_of(small).total < time_of(large).total < time_of(full).total
    adapters = 3 * 2 * full.num_tokens * trained_parameters(large.model_parts)
    weights = step_flops(full) - step_flops(large)
    linears = sum(p.numel() for p in _layer_matrices(preset.model)) * preset.model.num_layers
    head = preset.model.hidden_size * preset.model.vocab_size
    assert weights == pytest.approx(2 * full.num_tokens * (linears + head) - adapters, rel=1e-9)


def test_an_adapter_of_keys_of_an_encoder_reads_its_output() -> None:
    config = T5Config(
        num_layers=2, num_decoder_layers=3, hidden_size=48, num_attention_heads=6, vocab_size=100, position="learned"
    )
    lora = LoraConfig(rank=4, targets=("cross_attention.query", "cross_attention.key_value"), dropout=0.1)
    lengths, sizes = (
        SequenceLengths(sequence=64, decoder_sequence=16),
        Sizes(world=4, tp=2, cp=2, sequence_parallel=True),
    )
    run = run_of(config, lengths=lengths, sizes=sizes, micro_batch_size=2, trained=Trainable(lora=lora))
    double = replace(run, trained=Trainable(lora=replace(lora, rank=8)))
    # Of eight samples; a query's path reads 16 tokens, that of keys and values 64.
    forward = 2 * 8 * 3 * 4 * (16 * (48 + 48) + 64 * (48 + 96))
    assert step_flops(double) - step_flops(run) == 3 * forward
    [decoder] = {part for part in run.model_parts.parts if part.layer is not None and part.layer.memory}
    work = layer_work_of(decoder, run.model_parts, sizes, 2, 2)
    assert work.adapter_flops == 2 * 2 * 4 * (8 * (48 + 24) + 32 * (48 + 48))
    # What goes in is read, and what is left of it written, with a mask of one byte.
    assert work.adapter_bytes == 2 * (8 + 32) * 48 * 5


def _layer_matrices(model: GPTConfig) -> list[Tensor]:
    with torch.device("meta"):
        built = GPTModel(replace(model, num_layers=1), mesh=Mesh.single())
    return [p for name, p in built.named_parameters() if name.startswith("layers") and p.dim() > 1]


@pytest.mark.parametrize(
    ("trained", "words"),
    [
        (Trainable(frozen=("tower",)), "must be of 'vision', 'projector', 'language'"),
        (Trainable(frozen=PARTS), "nothing is left to train"),
        (Trainable(lora=LoraConfig(targets=("shared.up",))), "lora targets (shared.up)"),
    ],
)
def test_what_cannot_be_trained_is_reported(trained: Trainable, words: str) -> None:
    assert any(words in fault for fault in trained.faults(LLAVA))


def test_a_model_that_is_no_llava_has_no_parts() -> None:
    assert "names parts of a LLaVA" in Trainable(frozen=("vision",)).faults(LLAMA)[0]
    assert Trainable(lora=LoraConfig(rank=2)).faults(LLAMA) == Trainable(frozen=("vision",)).faults(LLAVA) == []
