"""A model whose logits are there for a few tokens at a time has the loss, gradients and tallies of the whole logits."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from lightning_megatron.mesh import Mesh, Sizes
from lightning_megatron.models.heads import LanguageModelHead
from tests.harness.threads import new_group, run_on_threads
from tests.models.test_tallies import LAYOUTS, inputs_of, model_of, tallies_of

KINDS = ("gpt", "soft caps", "packed llama", "experts", "bert", "t5", "llava")
CHUNK_TOKENS = 7


def outcome(model: Any, batch: dict[str, Any]) -> dict[str, Tensor]:
    """Tallies in evaluation, the loss, and every gradient."""
    found = {name: torch.tensor(value) for name, value in tallies_of(model, batch).items()}
    loss = model(**batch)
    loss.backward()
    grads = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    return found | {"loss": loss.detach()} | grads


def compare(world: Any, sizes: Sizes, name: str, batch: dict[str, Any]) -> None:
    mesh = Mesh.build(sizes, world.rank(), new_group)
    wanted = outcome(model_of(name, mesh), batch)
    model = model_of(name, mesh)
    [head] = [module for module in model.modules() if isinstance(module, LanguageModelHead)]
    head.chunk_tokens = CHUNK_TOKENS
    found = outcome(model, batch)
    assert found.keys() == wanted.keys() and len(found) > 5
    for key, one in wanted.items():
        assert_close(found[key], one, rtol=0, atol=1e-12, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("layout", ["one device", "tp 4, sp", "cp 2"])
def test_nothing_but_memory_is_different(layout: str, name: str) -> None:
    options = LAYOUTS[layout]
    sizes = Sizes(world=options.get("tp", 1) * options.get("cp", 1), **options)
    run_on_threads(sizes.world, compare, sizes, name, inputs_of(name))
