"""Greedy texts are those of transformers' own `generate`, token for token, on every layout."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_megatron import hf
from lightning_megatron.mesh import Mesh, Sizes
from lightning_megatron.models import GenerationConfig, GPTModel, generate
from lightning_megatron.pipeline.collective import CollectiveCall
from tests.harness.ranks import run_on_ranks
from tests.harness.threads import new_group, run_on_threads
from tests.hf.tiny import default_dtype, theirs, tokens
from tests.pipeline.meshes import make_mailbox, make_mesh

NEW = 10
# Of the window of Mistral, 5, one prompt is longer than two, and one is shorter.
LENGTHS = (13, 3)
MODELS = ["gpt2", "llama", "mistral", "qwen3", "mixtral"]
LAYOUTS: dict[str, dict[str, Any]] = {
    "one device": {},
    "tp2": {"tp": 2},
    "cp2": {"cp": 2},
    "tp2 sp, cp2": {"tp": 2, "cp": 2, "sequence_parallel": True},
}


def dtype_of(model: str) -> torch.dtype:
    # The experts of transformers know no float64.
    return torch.float32 if model == "mixtral" else torch.float64


def made_by_transformers(model: str) -> Any:
    """The tiny model, with what makes its greedy texts go on in turns: no constant, large positions."""
    made: Any = theirs(model)
    if model == "gpt2":
        with torch.no_grad():
            for name, parameter in made.named_parameters():
                if name.endswith(".bias") and ".ln_" in name:
                    parameter.sub_(1.0)
            made.transformer.wpe.weight.mul_(10.0)
    return made


@functools.cache
def wanted(model: str, stop: int | None) -> list[list[int]]:
    """What transformers writes, each row alone: rows of different lengths need no padding then."""
    texts = []
    for row, length in zip(tokens(), LENGTHS, strict=True):
        prompt = row[:length].unsqueeze(0)
        made: Any = made_by_transformers(model).to(dtype_of(model))
        text = made.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=NEW,
            do_sample=False,
            eos_token_id=stop,
            pad_token_id=0,
        )
        texts.append(text[0].tolist())
    return texts


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("models")
    for model in MODELS:
        made_by_transformers(model).save_pretrained(path / model)
    return path


def written(model: GPTModel, stops: tuple[int, ...]) -> list[list[int]]:
    config = GenerationConfig(max_new_tokens=NEW, temperature=0.0, stop_tokens=stops)
    rows = generate(model.eval(), tokens()[:, : max(LENGTHS)], config, lengths=torch.tensor(LENGTHS))
    return [row.tolist() for row in rows]


def on_mesh(world: Any, sizes: Sizes, path: Path, stops: tuple[int, ...]) -> list[list[int]]:
    return written(hf.from_pretrained(path, Mesh.build(sizes, world.rank(), new_group)), stops)


def on_stages(sizes: Sizes, path: Path, stops: tuple[int, ...]) -> list[list[int]]:
    with default_dtype(dtype_of(path.name)):
        model = hf.from_pretrained(path, make_mesh(sizes))
    model.driver = CollectiveCall(
        model.mesh.pp, make_mailbox(model.mesh), torch.device("cpu"), lambda rows: min(rows, 2)
    )
    return written(model, stops)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_texts_are_those_of_transformers(layout: str, name: str, folder: Path) -> None:
    options = LAYOUTS[layout]
    if name == "mixtral" and "tp" in options:
        options = {**options, "sequence_parallel": True}
    sizes = Sizes(world=options.get("tp", 1) * options.get("cp", 1), **options)
    with default_dtype(dtype_of(name)):
        found = run_on_threads(sizes.world, on_mesh, sizes, folder / name, ())
    assert found == [wanted(name, None)] * sizes.world
    new = [text[length:] for text, length in zip(found[0], LENGTHS, strict=True)]
    assert new[0] != new[1] and [len(text) for text in new] == [NEW, NEW]


@pytest.mark.parametrize("name", MODELS)
def test_on_two_stages_they_end_where_transformers_ends_them(name: str, folder: Path) -> None:
    # In the middle of the first text.
    stop = wanted(name, None)[0][LENGTHS[0] + NEW // 2]
    texts = wanted(name, stop)
    assert len(texts[0]) < LENGTHS[0] + NEW
    assert run_on_ranks(2, on_stages, Sizes(world=2, pp=2), folder / name, (stop,)) == [texts] * 2
