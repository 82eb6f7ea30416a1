"""BERT computes what transformers computes, losses and gradients too, and comes back from us as it came."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForMaskedLM, AutoModelForPreTraining, PreTrainedModel

from lightning_megatron import hf
from lightning_megatron.hf import bert
from lightning_megatron.hf.convert import to_checkpoint, to_folder
from lightning_megatron.hf.families import FAMILIES, family_of_config
from lightning_megatron.hf.weights import in_checkpoint, in_folder
from lightning_megatron.mesh import Mesh, Sizes
from lightning_megatron.models import BertConfig, BertModel, GPTConfig
from lightning_megatron.moe.config import MoEConfig, RouterConfig
from tests.harness.threads import new_group, run_on_threads
from tests.hf.tiny import default_dtype, files_of

SMALL = {
    "vocab_size": 131,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 16,
    "type_vocab_size": 3,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "layer_norm_eps": 1e-6,
}
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "pre-training": (AutoModelForPreTraining, SMALL),
    "masked LM": (AutoModelForMaskedLM, SMALL),
    "masked LM, tanh": (AutoModelForMaskedLM, {**SMALL, "hidden_act": "gelu_new"}),
}
each_case = pytest.mark.parametrize("case", CASES)
LENGTHS = torch.tensor([7, 12, 3])
TOLERANCE = 1e-12  # both in float64


def saved(case: str, folder: Path) -> PreTrainedModel:
    """A model of transformers with numbers that make every weight matter, in float64, also saved in the folder."""
    kind, fields = CASES[case]
    model: PreTrainedModel = kind.from_config(transformers.AutoConfig.for_model("bert", **fields)).eval().double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.2)
            if parameter.dim() == 1:
                parameter.add_(1.0)
    model.save_pretrained(folder)
    return model


def ours(folder: Path, mesh: Mesh | None = None) -> BertModel:
    with default_dtype(torch.float64):
        model = hf.from_pretrained(folder, mesh if mesh is not None else Mesh.single())
    assert isinstance(model, BertModel)
    return model.eval()


def batch() -> dict[str, Tensor]:
    """Three padded rows with three targets each."""
    generator = torch.Generator().manual_seed(2)
    # Not 0: the padding of transformers, whose embedding gets no gradient there.
    tokens = torch.randint(1, 131, (3, 12), generator=generator)
    return {
        "tokens": tokens,
        "token_types": torch.randint(3, (3, 12), generator=generator),
        "padding_mask": (torch.arange(12) < LENGTHS.unsqueeze(1)).long(),
        "labels": torch.where(torch.arange(12) < 3, tokens.flip(1), -100),
        "sentence_order_labels": torch.tensor([0, 1, 1]),
    }


def call(model: PreTrainedModel, given: dict[str, Tensor], **more: Tensor) -> Any:
    names = {"tokens": "input_ids", "token_types": "token_type_ids", "padding_mask": "attention_mask"}
    return model(**{theirs: given[name] for name, theirs in names.items()}, **more)


@each_case
def test_logits_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    wanted = call(saved(case, tmp_path), batch())
    given = batch()
    found = ours(tmp_path)(given["tokens"], token_types=given["token_types"], padding_mask=given["padding_mask"])
    is_token = given["padding_mask"] == 1
    of_tokens = wanted["logits"] if "logits" in wanted else wanted["prediction_logits"]
    assert (found.tokens - of_tokens)[is_token].abs().max() < TOLERANCE * of_tokens.abs().max()
    assert of_tokens.std() > 0.1 and found.tokens[~is_token].abs().max() == 0
    if case == "pre-training":
        assert (found.sentence_order - wanted["seq_relationship_logits"]).abs().max() < TOLERANCE
        assert wanted["seq_relationship_logits"].std() > 0.1
    else:
        assert found.sentence_order is None


def test_the_loss_is_that_of_transformers_and_so_is_what_one_step_makes_of_the_weights(tmp_path: Path) -> None:
    theirs, given = saved("pre-training", tmp_path / "theirs"), batch()
    wanted = call(theirs, given, labels=given["labels"], next_sentence_label=given["sentence_order_labels"]).loss
    model = ours(tmp_path / "theirs")
    found = model(**given)
    assert abs(found.item() - wanted.item()) < 1e-11
    for loss, stepped in ((wanted, theirs), (found, model)):
        loss.backward()
        torch.optim.SGD(stepped.parameters(), lr=0.1).step()
    hf.save_pretrained(model, tmp_path / "ours")
    ours_now, theirs_now = AutoModelForPreTraining.from_pretrained(tmp_path / "ours").state_dict(), theirs.state_dict()
    before = ours(tmp_path / "theirs")
    assert all((ours_now[name] - theirs_now[name]).abs().max() < 1e-11 for name in theirs_now)
    assert any((p - q).abs().max() > 1e-3 for p, q in zip(before.parameters(), model.parameters(), strict=True))


@each_case
def test_a_model_comes_back_as_it_came(case: str, tmp_path: Path) -> None:
    model = saved(case, tmp_path / "theirs")
    hf.save_pretrained(ours(tmp_path / "theirs"), tmp_path / "ours")
    again, shown = CASES[case][0].from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(shown.values()), shown
    wanted, found = model.state_dict(), again.state_dict()
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)
    # Ids of special tokens are the tokenizer's.
    unlike = {"_name_or_path", "transformers_version", "pad_token_id"}
    before, after = (
        {key: value for key, value in m.config.to_dict().items() if key not in unlike} for m in (model, again)
    )
    assert before == after
    to_checkpoint(in_folder(tmp_path / "theirs"), tmp_path / "model.ckpt")
    to_folder(in_checkpoint(tmp_path / "model.ckpt"), tmp_path / "again")
    assert files_of(tmp_path / "again") == files_of(tmp_path / "ours")


@pytest.mark.parametrize(
    "sizes", [Sizes(world=4, tp=4, sequence_parallel=True), Sizes(world=2, cp=2)], ids=["tp4 sp", "cp2"]
)
def test_any_mesh_reads_its_slices(sizes: Sizes, tmp_path: Path) -> None:
    saved("pre-training", tmp_path)
    given = batch()
    wanted = ours(tmp_path)(**given).item()

    def step(world: Any) -> float:
        model = hf.from_pretrained(tmp_path, Mesh.build(sizes, world.rank(), new_group))
        return float(model(**given).detach())

    with default_dtype(torch.float64):
        assert all(abs(found - wanted) < 1e-11 for found in run_on_threads(sizes.world, step))


def test_the_first_files_of_bert_are_read_and_heads_that_the_config_does_not_name_passed_over(tmp_path: Path) -> None:
    saved("pre-training", tmp_path)
    wanted = ours(tmp_path)(**batch()).item()
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): value
        for name, value in load_file(tmp_path / "model.safetensors").items()
    }
    assert any(name.endswith("gamma") for name in old)
    save_file({**old, "bert.embeddings.position_ids": torch.arange(16)}, tmp_path / "model.safetensors")
    assert ours(tmp_path)(**batch()).item() == wanted
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["BertForMaskedLM"]}))
    assert not ours(tmp_path).config.add_binary_head


OURS = BertConfig(num_layers=2, hidden_size=32, num_attention_heads=4, vocab_size=131)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"norm_placement": "pre"}, "norm_placement ('pre') must be 'post'"),
        ({"embedding_norm": False}, "embedding_norm (False) must be True"),
        ({"tie_embeddings": False}, "tie_embeddings (False) must be True"),
        ({"num_token_types": 0}, "num_token_types (0) must be at least 1"),
        ({"num_query_groups": 2}, "num_query_groups (2) must be 4"),
    ],
)
def test_a_model_that_transformers_has_no_name_for_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError) as raised:
        family_of_config(replace(OURS, **change), None)
    assert words in str(raised.value)
    assert family_of_config(OURS, None).name == family_of_config(OURS, "bert").name == "bert"


def test_a_bert_is_no_gpt_and_a_gpt_no_bert() -> None:
    gpt = GPTConfig(num_layers=2, hidden_size=32, num_attention_heads=4, vocab_size=131)
    assert family_of_config(gpt, None).name == "gpt2"
    with pytest.raises(ValueError, match=r"'gpt2'.* has no models with a BertConfig"):
        family_of_config(OURS, "gpt2")
    with pytest.raises(ValueError, match=r"'bert'.* has no models with a GPTConfig"):
        family_of_config(gpt, "bert")


def test_a_bert_gets_no_experts(tmp_path: Path) -> None:
    saved("pre-training", tmp_path)
    with pytest.raises(ValueError, match="upcycling takes a model with a GPTConfig"):
        hf.config_from_pretrained(tmp_path, upcycle=MoEConfig(router=RouterConfig(num_experts=4, top_k=2)))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"is_decoder": True}, "is_decoder (True) must be False"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type ('relative_key') must be 'absolute'"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings (False) must be True"),
        ({"hidden_act": "silu"}, "hidden_act ('silu') must be one of 'gelu'"),
    ],
)
def test_a_config_that_asks_for_what_is_not_built_is_refused(
    change: dict[str, Any], words: str, tmp_path: Path
) -> None:
    saved("pre-training", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(ValueError) as raised:
        hf.config_from_pretrained(tmp_path)
    assert words in str(raised.value)


@pytest.mark.parametrize("activation", sorted(set(bert.ACTIVATIONS.values())))
def test_every_activation_that_is_written_is_read_again(activation: Any, tmp_path: Path) -> None:
    config = BertConfig(num_layers=1, hidden_size=8, num_attention_heads=2, vocab_size=9, activation=activation)
    hf.save_pretrained(BertModel(config), tmp_path / "a")
    assert hf.config_from_pretrained(tmp_path / "a") == config


def test_a_dropout_that_their_files_do_not_have_is_reported() -> None:
    config = BertConfig(num_layers=1, hidden_size=8, num_attention_heads=2, vocab_size=9, ffn_dropout=0.2)
    assert any(fault.startswith("ffn_dropout (0.2)") for fault in FAMILIES["bert"].faults(config))
