"""The parts of a model add up to the parameters of the built model on every rank, and to its FLOPs."""

import pytest
import torch

from lightning_megatron.hf.family import model_of
from lightning_megatron.mesh import Mesh, Sizes, StageLayout
from lightning_megatron.models import BertConfig, GPTConfig, LlavaConfig, T5Config
from lightning_megatron.models.vision import VisionConfig
from lightning_megatron.moe.config import MoEConfig, RouterConfig
from lightning_megatron.planner.memory import parameters_of_rank
from lightning_megatron.planner.model_parts import Model, SequenceLengths, model_parts_of
from lightning_megatron.planner.requires_grad import stages_of
from lightning_megatron.planner.run import Run
from lightning_megatron.transformer import cost

_BASE = {
    "num_layers": 4,
    "hidden_size": 48,
    "num_attention_heads": 6,
    "vocab_size": 100,
    "max_sequence_length": 64,
}
_MOE = MoEConfig(
    router=RouterConfig(num_experts=4), layer_freq=2, shared_expert_intermediate_size=96, shared_expert_gate=True
)
_LLAMA = {
    "tie_embeddings": False,
    "activation": "swiglu",
    "normalization": "rmsnorm",
    "add_bias_linear": False,
    "position": "rotary",
    "num_query_groups": 2,
    "moe": _MOE,
}
_V11 = {"activation": "geglu_tanh", "tie_embeddings": False, "share_embeddings": False, "position": "learned"}
_VISION = VisionConfig(num_layers=3, hidden_size=24, num_attention_heads=2, image_size=16, patch_size=4)
MODELS: dict[str, Model] = {
    "gpt": GPTConfig(**_BASE),  # type: ignore[arg-type]
    "llama with experts": GPTConfig(**_BASE, **_LLAMA),  # type: ignore[arg-type]
    "llama that predicts further": GPTConfig(**_BASE, **_LLAMA, num_mtp_layers=2),  # type: ignore[arg-type]
    "bert": BertConfig(**_BASE),  # type: ignore[arg-type]
    "megatron's bert": BertConfig(**_BASE, norm_placement="pre", embedding_norm=False),  # type: ignore[arg-type]
    "t5": T5Config(**_BASE),  # type: ignore[arg-type]
    "t5 v1.1": T5Config(**_BASE, **_V11),  # type: ignore[arg-type]
    "llava": LlavaConfig(**_BASE, vision=_VISION, image_token=7),  # type: ignore[arg-type]
}
LAYOUTS = {
    "one": Sizes(),
    "tp 2": Sizes(world=2, tp=2, sequence_parallel=True),
    "tp 2, pp 2": Sizes(world=4, tp=2, pp=2, sequence_parallel=True),
    "pp 2, vp 2": Sizes(world=2, pp=2, vp=2),
    "ep 2": Sizes(world=2, ep=2),
}


def texts_of(model: Model) -> SequenceLengths:
    return SequenceLengths(sequence=64, decoder_sequence=32 if isinstance(model, T5Config) else 0, images=1)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MODELS)
def test_a_rank_holds_the_parameters_that_are_built_on_it(name: str, layout: str) -> None:
    model, sizes = MODELS[name], LAYOUTS[layout]
    if sizes.ep > 1 and model.moe is None:
        pytest.skip("no experts")
    run = Run(model=model, lengths=texts_of(model), sizes=sizes, global_batch_size=8)
    for rank in range(sizes.world):
        mesh = Mesh.imagine(rank, sizes)
        with torch.device("meta"):
            built = sum(parameter.numel() for parameter in model_of(model, mesh).parameters())
        dense, experts = parameters_of_rank(run, mesh.pp.rank)
        # Further stages of a stack have a copy of its small table of relative positions.
        copies = 2 * 32 * 6 if name == "t5" else 0
        assert dense + experts <= built <= dense + experts + copies


@pytest.mark.parametrize("name", MODELS)
def test_the_parameters_of_all_parts_are_those_of_the_unsplit_model(name: str) -> None:
    model = MODELS[name]
    with torch.device("meta"):
        built = sum(parameter.numel() for parameter in model_of(model, Mesh.single()).parameters())
    assert model_parts_of(model, texts_of(model)).parameters() == built


def test_padded_rows_of_the_vocabulary_are_no_parameters_of_the_model() -> None:
    model = GPTConfig(**_BASE, vocab_multiple=64)  # type: ignore[arg-type]
    assert model_parts_of(model, SequenceLengths(sequence=64)).parameters() == cost.model_parameters(model)


def test_layers_of_a_kind_are_one_piece_and_stages_that_are_alike_one_object() -> None:
    model_parts = model_parts_of(MODELS["llama with experts"], SequenceLengths(sequence=64))
    layers = [part for part in model_parts.parts if part.layer is not None]
    assert len(layers) == 4 and len(set(layers)) == 2
    deep = model_parts_of(GPTConfig(**_BASE | {"num_layers": 12}), SequenceLengths(sequence=64))  # type: ignore[arg-type]
    stages = stages_of(deep, 6, StageLayout())
    assert stages[1] is stages[4] and stages[0] is not stages[1]
