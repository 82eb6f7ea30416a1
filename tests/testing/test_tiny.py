"""The small twin of every known configuration is one of its kind."""

import pytest
import torch

from lightning_megatron.planner.presets import PRESETS
from lightning_megatron.testing.tiny import HIDDEN, LAYERS, SEQUENCE, VOCABULARY, clipped, twin_of


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_a_small_twin_of_its_architecture(name: str) -> None:
    model = PRESETS[name].model
    twin = twin_of(model)
    assert type(twin) is type(model)
    assert (twin.hidden_size, twin.num_layers) == (HIDDEN, min(LAYERS, model.num_layers))
    assert (twin.moe is None) == (model.moe is None)
    assert all(getattr(twin, name) == getattr(model, name) for name in ("position", "normalization", "activation"))
    assert (twin.num_query_groups == twin.num_attention_heads) == (model.num_query_groups == model.num_attention_heads)
    # A twin of a twin is the twin.
    assert twin_of(twin) == twin


def test_a_hugging_face_configuration_has_one() -> None:
    transformers = pytest.importorskip("transformers")
    for kind in (transformers.LlamaConfig, transformers.GPT2Config, transformers.T5Config, transformers.MixtralConfig):
        twin = twin_of(kind())
        assert type(twin) is kind
        assert (twin.hidden_size, twin.vocab_size, twin.num_hidden_layers) == (HIDDEN, VOCABULARY, LAYERS)
    assert twin_of(transformers.LlamaConfig(num_key_value_heads=8)).num_key_value_heads == 2


def test_batches_are_cut_along_their_sequences_alone() -> None:
    tokens = torch.arange(200).view(2, 100) * 100
    batch = clipped({"tokens": tokens, "mask": torch.ones(2, 1, 100, 100), "scores": torch.ones(2, 70), "text": "a"})
    assert batch["tokens"].shape == (2, SEQUENCE) and batch["mask"].shape == (2, 1, SEQUENCE, SEQUENCE)
    assert batch["scores"].shape == (2, 70) and batch["text"] == "a"
    assert batch["tokens"].max() < VOCABULARY and batch["tokens"][0, 5] == 500
    labels = torch.full((2, 100), -100)
    assert (clipped((labels,))[0] == -100).all()
