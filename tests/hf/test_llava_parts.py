"""A LLaVA is put together from the folders of its parts, slice by slice, and what they do not have is drawn."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from lightning_megatron import hf
from lightning_megatron.hf.families import FAMILIES
from lightning_megatron.mesh import Mesh, Sizes
from lightning_megatron.models import LlavaConfig, LlavaModel
from tests.harness.threads import new_group, run_on_threads
from tests.models.small_llava import LLAVA, VISION
from tests.reference.unsplit import unsplit_weights

SEED = 5
# The folder's vocabulary is smaller: the image token is after it.
NUM_ROWS = 128


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama, a CLIP and its vision tower alone, as transformers writes them."""
    path: Path = tmp_path_factory.mktemp("parts")
    torch.manual_seed(SEED)
    raw = FAMILIES["llava"].config_to_hf(LLAVA)
    text = {**raw["text_config"], "vocab_size": NUM_ROWS}
    text.pop("model_type")
    vision = {k: v for k, v in raw["vision_config"].items() if k != "model_type"}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**text)).save_pretrained(path / "llama")
    small = {"num_hidden_layers": 1, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
    clip = transformers.CLIPConfig(vision_config=vision, text_config=small, projection_dim=8)
    transformers.CLIPModel(clip).save_pretrained(path / "clip")
    transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**vision)).save_pretrained(path / "tower")
    return path


def theirs(folder: Path, kind: Any) -> dict[str, Tensor]:
    return dict(kind.from_pretrained(folder).named_parameters())


def joined(folders: Path, mesh: Mesh, tower: str = "clip", config: LlavaConfig = LLAVA) -> dict[str, Tensor]:
    with_seed = torch.random.get_rng_state()
    torch.manual_seed(SEED)
    model = hf.llava_from_folders(config, language=folders / "llama", vision=folders / tower, mesh=mesh)
    torch.random.set_rng_state(with_seed)
    return unsplit_weights(model)


@pytest.mark.parametrize("tower", ["clip", "tower"])
def test_every_part_is_that_of_its_folder(folders: Path, tower: str) -> None:
    found = joined(folders, Mesh.single(), tower)
    llama = unsplit_weights(hf.from_pretrained(folders / "llama", Mesh.single()))
    for name, weight in llama.items():
        rows = slice(NUM_ROWS) if name in ("embedding.tokens.weight", "head.weight") else slice(None)
        assert torch.equal(found[name][rows], weight)
    saved = theirs(folders / tower, transformers.CLIPModel if tower == "clip" else transformers.CLIPVisionModel)
    by_end = {name.removeprefix("vision_model."): weight for name, weight in saved.items()}
    assert torch.equal(found["vision.embedding.patches"], by_end["embeddings.patch_embedding.weight"])
    assert torch.equal(found["vision.layers.1.mlp.up.weight"], by_end["encoder.layers.1.mlp.fc1.weight"])
    assert torch.equal(found["vision.final_norm.bias"], by_end["post_layernorm.bias"])
    heads = [by_end[f"encoder.layers.0.self_attn.{part}_proj.weight"][6:12] for part in "qkv"]
    # Of the second head, of 6 features: queries, keys and values follow each other.
    assert torch.equal(found["vision.layers.0.attention.qkv.weight"][18:36], torch.cat(heads))


def test_what_no_folder_has_is_drawn_as_in_a_new_model(folders: Path) -> None:
    found = joined(folders, Mesh.single())
    new = unsplit_weights(LlavaModel(LLAVA, seed=SEED))
    for name in ("projector.up.weight", "projector.up.bias", "projector.down.weight"):
        assert torch.equal(found[name], new[name])
    for name in ("embedding.tokens.weight", "head.weight"):
        assert torch.equal(found[name][NUM_ROWS:], new[name][NUM_ROWS:]) and found[name][NUM_ROWS:].any()
    alone = unsplit_weights(hf.llava_from_folders(LLAVA, vision=folders / "clip", mesh=Mesh.single()))
    assert torch.equal(alone["vision.embedding.patches"], found["vision.embedding.patches"])
    assert not torch.equal(alone["layers.0.mlp.down.weight"], found["layers.0.mlp.down.weight"])


@pytest.mark.parametrize("options", [{"tp": 2, "sequence_parallel": True}, {"tp": 4, "sequence_parallel": True}])
def test_each_rank_reads_its_slices(folders: Path, options: dict[str, Any]) -> None:
    expected = joined(folders, Mesh.single())
    sizes = Sizes(world=options["tp"], **options)

    def on_rank(world: Any) -> dict[str, Tensor]:
        mesh = Mesh.build(sizes, world.rank(), new_group)
        model = hf.llava_from_folders(LLAVA, language=folders / "llama", vision=folders / "clip", mesh=mesh)
        return unsplit_weights(model)

    drawn = {name for name in expected if name.startswith("projector")}
    for found in run_on_threads(sizes.world, on_rank):
        for name in expected.keys() - drawn:
            rows = slice(NUM_ROWS) if name in ("embedding.tokens.weight", "head.weight") else slice(None)
            assert torch.equal(found[name][rows], expected[name][rows])


def test_a_whole_folder_is_read_into_the_configuration_that_is_asked_for(folders: Path, tmp_path: Path) -> None:
    saved = LlavaModel(LLAVA, seed=3)
    hf.save_pretrained(saved, tmp_path / "llava")
    requested = replace(LLAVA, hidden_dropout=0.1, max_sequence_length=64)
    model = hf.llava_from_folders(requested, whole=tmp_path / "llava", mesh=Mesh.single())
    assert model.config == requested
    weights = dict(saved.named_parameters())
    assert all(torch.equal(p, weights[name]) for name, p in model.named_parameters())
    assert {n for n, p in model.named_parameters() if not p.requires_grad} == {
        n for n, p in saved.named_parameters() if not p.requires_grad
    }


def test_what_does_not_fit_the_configuration_is_reported_at_once(folders: Path) -> None:
    other = replace(
        LLAVA,
        num_query_groups=4,
        vocab_size=120,
        image_token=119,
        vision=replace(VISION, num_layers=4, activation="gelu"),
    )
    with pytest.raises(ValueError) as raised:
        hf.llava_from_folders(other, language=folders / "llama", vision=folders / "tower", mesh=Mesh.single())
    for shown in (
        "num_query_groups (4) is 2 in",
        "vocab_size (120) must be at least that of",
        "vision: num_layers (4) is 3 in",
        "vision: activation ('gelu') is 'quick_gelu' in",
    ):
        assert shown in str(raised.value)
    with pytest.raises(ValueError, match="has no vision tower of a LLaVA: its model_type is 'llama'"):
        hf.llava_from_folders(LLAVA, vision=folders / "llama", mesh=Mesh.single())
    with pytest.raises(ValueError, match="is no LLaVA: its model_type is 'llama'"):
        hf.llava_from_folders(LLAVA, whole=folders / "llama", mesh=Mesh.single())
