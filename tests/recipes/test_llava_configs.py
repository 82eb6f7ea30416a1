"""The shipped configurations of LLaVA parse, fit their ranks, and are the models that they are named after."""

from pathlib import Path

import pytest
import torch

from lightning_megatron.lightning_modules import LlavaDataModule, LlavaModule
from lightning_megatron.mesh import Mesh
from lightning_megatron.models.llava import LlavaModel
from lightning_megatron.rules import cross_config
from lightning_megatron.trainer.callbacks import ThroughputMonitor
from tests.recipes.test_configs import CONFIGS, Parsed, own_environment, sizes_of

__all__ = ["own_environment"]
LINKS = {
    "model.config.vocab_size": "data.vocab_size",
    "model.config.image_token": "data.image_token",
    "model.config.keeps_class_token": "data.keeps_class_token",
    "model.config.vision.image_size": "data.image_size",
    "model.config.vision.patch_size": "data.patch_size",
}
NAMES = sorted(path.name for path in CONFIGS.glob("llava_*.yaml"))


def parse(name: str, *options: str) -> Parsed:
    args = ["fit", "--config", str(CONFIGS / name), *options]
    return Parsed(LlavaModule, LlavaDataModule, links=LINKS, callbacks={"throughput": ThroughputMonitor}, args=args)


def test_the_links_are_those_of_the_recipe() -> None:
    text = (Path(__file__).parents[2] / "recipes" / "pretrain_llava.py").read_text()
    assert all(f'"{source}": "{target}"' in text for source, target in LINKS.items())
    assert text.count('": "data.') == len(LINKS)


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_configuration_has_no_fault(name: str) -> None:
    parsed = parse(name)
    config, data, sizes = parsed.model.config, parsed.datamodule, sizes_of(parsed)
    facts = cross_config.Facts(
        sizes=sizes,
        num_microbatches=parsed.config["fit"]["trainer"]["strategy"]["init_args"]["num_microbatches"],
        model=config,
        global_batch_size=data.global_batch_size,
        sequence_length=data.sequence_length,
    )
    assert cross_config.faults(facts) == []
    # What else is wrong is that this machine has not the files.
    absent = ("tokenizer (", "path (", "image_folder (")
    assert [fault for fault in data.faults() if not fault.startswith(absent)] == []
    assert data.features_per_image == config.features_per_image
    assert (data.config.image_token, data.config.vocab_size) == (config.image_token, config.vocab_size)
    assert data.sequence_length <= config.max_sequence_length


@pytest.mark.parametrize(
    ("name", "parameters", "frozen", "world", "dp"),
    [
        ("llava_toy.yaml", 1_205_344, [], 2, 2),
        # Tower, projector and language model summed by hand.
        ("llava_1_5_7b_pretrain.yaml", 7_063_427_072, ["vision", "language"], 8, 4),
        ("llava_1_5_7b.yaml", 7_063_427_072, ["vision"], 8, 2),
        ("llava_1_5_13b.yaml", 13_351_494_656, ["vision"], 16, 4),
    ],
)
def test_a_model_has_the_size_of_its_name(name: str, parameters: int, frozen: list[str], world: int, dp: int) -> None:

    parsed = parse(name)
    with torch.device("meta"):
        model = LlavaModel(parsed.model.config, mesh=Mesh.single())
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert parsed.model.frozen == frozen
    sizes = sizes_of(parsed)
    assert (sizes.world, sizes.dp) == (world, dp)
