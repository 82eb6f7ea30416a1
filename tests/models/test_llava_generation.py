"""A LLaVA answers prompts with images token by token as transformers does, on any layout."""

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron.mesh import Mesh, Sizes
from lightning_megatron.models import GenerationConfig, GPTModel, LlavaConfig, LlavaModel, generate
from lightning_megatron.moe.capacity import ExpertCapacity
from lightning_megatron.moe.config import MoEConfig, RouterConfig
from lightning_megatron.pipeline.collective import CollectiveCall
from tests.harness.ranks import run_on_ranks
from tests.harness.threads import new_group, run_on_threads
from tests.models.small_llava import IMAGE, LLAMA, LLAVA, batch_of, model_of
from tests.models.test_llava import theirs_of
from tests.pipeline.meshes import make_mailbox, make_mesh

NEW = 6
GREEDY = GenerationConfig(max_new_tokens=NEW, temperature=0.0)
COUNTS, LENGTHS = (1, 0, 2), (9, 4, 13)
LAYOUTS: dict[str, dict[str, Any]] = {
    "one device": {},
    "tp 2, sp": {"tp": 2, "sequence_parallel": True},
    "cp 2": {"cp": 2},
    "cp 4, all-gather": {"cp": 4, "cp_exchange": "all_gather"},
    "cp 2, all-to-all": {"cp": 2, "cp_ulysses": 2},
    "cp 2, tp 2, sp": {"cp": 2, "tp": 2, "sequence_parallel": True},
}


def prompts(config: LlavaConfig = LLAVA) -> tuple[Tensor, list[Tensor | None]]:
    """Rows of LENGTHS tokens with the images of COUNTS, followed by image tokens that nobody shall see."""
    batch = batch_of(config, COUNTS)
    tokens = batch["tokens"][:, : max(LENGTHS)].clone()
    for row, length in enumerate(LENGTHS):
        tokens[row, length:] = config.image_token
    return tokens, batch["images"]


def written(model: LlavaModel, config: GenerationConfig = GREEDY) -> list[list[int]]:
    tokens, images = prompts()
    rows = generate(model.eval(), tokens, config, lengths=torch.tensor(LENGTHS), images=images)
    return [row.tolist() for row in rows]


@functools.cache
def wanted(sees: bool = True, stop: int | None = None) -> list[list[int]]:
    """What transformers writes, each row alone, up to that token; or what it writes of grey images."""
    model, _ = theirs_of(LLAVA)
    tokens, images = prompts()
    texts = []
    for row, length, pixels in zip(tokens, LENGTHS, images, strict=True):
        given = {} if pixels is None else {"pixel_values": pixels if sees else torch.zeros_like(pixels)}
        text = model.generate(
            input_ids=row[None, :length],
            attention_mask=torch.ones(1, length, dtype=torch.int64),
            max_new_tokens=NEW,
            do_sample=False,
            suppress_tokens=[IMAGE],
            eos_token_id=stop,
            pad_token_id=0,
            **given,
        )
        texts.append(text[0].tolist())
    return texts


def on_stages(sizes: Sizes, config: GenerationConfig = GREEDY) -> list[list[int]]:
    model = model_of(LLAVA, make_mesh(sizes))
    mesh = model.mesh
    model.driver = CollectiveCall(mesh.pp, make_mailbox(mesh), torch.device("cpu"), lambda rows: rows)
    return written(model, config)


def on_mesh(world: Any, sizes: Sizes, config: GenerationConfig) -> list[list[int]]:
    return written(model_of(LLAVA, Mesh.build(sizes, world.rank(), new_group)), config)


def sizes_of(layout: str) -> Sizes:
    options = LAYOUTS[layout]
    return Sizes(world=options.get("tp", 1) * options.get("cp", 1), **options)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_writes_what_transformers_writes(layout: str) -> None:
    sizes = sizes_of(layout)
    assert all(texts == wanted() for texts in run_on_threads(sizes.world, on_mesh, sizes, GREEDY))
    # The rows with images would go on otherwise if these were others.
    assert [one == other for one, other in zip(wanted(), wanted(sees=False), strict=True)] == [False, True, False]


@pytest.mark.parametrize("sizes", [Sizes(world=2, pp=2), Sizes(world=4, pp=2, tp=2, sequence_parallel=True)])
def test_stages_write_what_transformers_writes(sizes: Sizes) -> None:
    assert all(texts == wanted() for texts in run_on_ranks(sizes.world, on_stages, sizes))


def test_a_row_ends_with_a_stop_token_where_that_of_transformers_does_and_the_others_go_on() -> None:
    new = [text[length:] for text, length in zip(wanted(), LENGTHS, strict=True)]
    stop = next(token for token in new[2][1:-1] if token not in new[0] + new[1])
    config = replace(GREEDY, stop_tokens=(stop,))
    expected = wanted(stop=stop)
    assert [len(text) - length for text, length in zip(expected, LENGTHS, strict=True)] == [
        NEW,
        NEW,
        1 + new[2].index(stop),
    ]
    for layout in LAYOUTS:
        sizes = sizes_of(layout)
        assert all(texts == expected for texts in run_on_threads(sizes.world, on_mesh, sizes, config))
    assert all(texts == expected for texts in run_on_ranks(2, on_stages, Sizes(world=2, pp=2), config))


DRAWN = GenerationConfig(max_new_tokens=NEW, temperature=3.0, top_k=50, top_p=0.95, seed=5)


def test_what_is_drawn_is_the_same_on_every_layout() -> None:
    expected = written(model_of(LLAVA), DRAWN)
    assert expected != wanted() and expected != written(model_of(LLAVA), replace(DRAWN, seed=6))
    for layout in LAYOUTS:
        sizes = sizes_of(layout)
        assert all(texts == expected for texts in run_on_threads(sizes.world, on_mesh, sizes, DRAWN))
    assert all(texts == expected for texts in run_on_ranks(2, on_stages, Sizes(world=2, pp=2), DRAWN))


def test_an_image_token_is_never_generated() -> None:
    # Logits are products of the states and the head's rows: so large a row wins in half of the cases.
    model = model_of(LLAVA)
    with torch.no_grad():
        head = model.get_parameter("head.weight")
        head[IMAGE] = 100.0 * head[wanted()[0][LENGTHS[0]]]
    assert all(IMAGE not in text[length:] for text, length in zip(written(model), LENGTHS, strict=True))


def test_a_model_without_a_cache_sees_the_images_in_every_call() -> None:
    router = RouterConfig(num_experts=2, top_k=2)
    experts = MoEConfig(router=router, ffn_hidden_size=16, capacity=ExpertCapacity(factor=1.0))
    capped = model_of(replace(LLAVA, moe=experts))
    free = model_of(replace(LLAVA, moe=replace(experts, capacity=None)))
    assert not capped.is_extendable and free.is_extendable
    # All tokens go to both experts, which have room for all: no choice is left that a capacity could change.
    assert written(capped) == written(free)


def test_what_cannot_be_generated_is_reported() -> None:
    tokens, images = prompts()
    with pytest.raises(ValueError, match="images are for a LlavaModel, and this is a GPTModel"):
        generate(GPTModel(LLAMA).eval(), tokens, GREEDY, images=images)
    with pytest.raises(ValueError, match="image tokens"):
        generate(model_of(LLAVA).eval(), tokens, GREEDY, lengths=torch.tensor(LENGTHS))
    short = model_of(replace(LLAVA, position="learned", max_sequence_length=15))
    with pytest.raises(ValueError, match="a row has come to 16 tokens, and images cannot be left behind"):
        generate(short.eval(), tokens, GREEDY, lengths=torch.tensor(LENGTHS), images=images)
