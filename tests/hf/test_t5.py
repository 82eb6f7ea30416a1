"""T5 and T5 v1.1 are those of transformers: logits, loss and every gradient; folders go both ways, on any layout."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.activations import ACT2FN
from transformers.models.t5 import modeling_t5

from lightning_megatron import hf
from lightning_megatron.hf.blocks import fill_theirs
from lightning_megatron.hf.families import FAMILIES
from lightning_megatron.hf.family import Table
from lightning_megatron.hf.t5 import GATES, PLAIN
from lightning_megatron.mesh import Mesh, Sizes
from lightning_megatron.models import GenerationConfig, T5Config, T5Model, generate_t5
from lightning_megatron.sharding import sharded_parameters
from lightning_megatron.tensor.activation import activate
from lightning_megatron.transformer.relative_position_embedding import relative_position_bucket

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

# Sums of a few hundred float64 numbers of order 1, in another order.
TOLERANCE = 1e-10
SMALL: dict[str, Any] = {
    "vocab_size": 131,
    "d_model": 32,
    "d_kv": 6,
    "d_ff": 48,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 10,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}
CASES: dict[str, dict[str, Any]] = {
    "t5": {},
    "t5, as many layers, the first buckets": {
        "num_decoder_layers": None,
        "relative_attention_num_buckets": 32,
        "relative_attention_max_distance": 128,
    },
    # Newer versions of transformers tie what they make, and say that it is not scaled.
    "v1.1 tied": {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    "v1.1": {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    "gated by SiLU": {"feed_forward_proj": "gated-silu", "tie_word_embeddings": False},
    "gelu": {"feed_forward_proj": "gelu"},
    "gelu by tanh": {"feed_forward_proj": "gelu_new"},
    "gelu by a sigmoid": {"feed_forward_proj": "quick_gelu"},
}
each_case = pytest.mark.parametrize("case", CASES)


@pytest.fixture(autouse=True)
def _in_float64(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Their norms round to float32, whatever they get."""

    def norm(self: Any, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))

    monkeypatch.setattr(modeling_t5.T5LayerNorm, "forward", norm)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def theirs_of(case: str, folder: Path) -> transformers.T5ForConditionalGeneration:
    """A random model in a folder, as transformers reads it."""
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**{**SMALL, **CASES[case]})).double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
            elif "relative" in name:
                parameter.mul_(5)
    model.save_pretrained(folder)
    if case == "v1.1":
        # As published: a head of its own, and no word of scaling.
        weights = load_file(folder / "model.safetensors")
        weights["lm_head.weight"] = torch.randn(131, 32)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        raw = json.loads((folder / "config.json").read_text())
        raw.pop("scale_decoder_outputs", None)
        (folder / "config.json").write_text(json.dumps({**raw, "tie_word_embeddings": False}))
    return read_by_them(folder)


def read_by_them(folder: Path) -> transformers.T5ForConditionalGeneration:
    return transformers.T5ForConditionalGeneration.from_pretrained(folder, dtype=torch.float64).eval()


def batch_of() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens, padding of either end, tokens of the decoder, labels with holes."""
    generator = torch.Generator().manual_seed(3)
    tokens, decoder_tokens, labels = (torch.randint(131, (3, n), generator=generator) for n in (21, 17, 17))
    padding = torch.zeros(3, 21, dtype=torch.bool)
    padding[1, 6:] = padding[2, :3] = True
    labels[torch.rand(3, 17, generator=generator) < 0.3] = -100
    return tokens, padding, decoder_tokens, labels


def their_gradients(model: T5Model) -> dict[str, Tensor]:
    """The gradients of ours by their names."""
    table, found = Table(FAMILIES["t5"], model.config), {}
    for name, link in table.links.items():
        grad = model.get_parameter(name).grad
        assert grad is not None
        for index, source in enumerate(link.sources):
            found[source] = torch.empty(table.theirs[source])
            fill_theirs(found[source], index, link.blocks, grad)
    return found


@each_case
def test_logits_loss_and_every_gradient_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    theirs = theirs_of(case, tmp_path)
    model = hf.from_pretrained(tmp_path)
    tokens, padding, decoder_tokens, labels = batch_of()
    expected = theirs(
        input_ids=tokens, attention_mask=(~padding).long(), decoder_input_ids=decoder_tokens, labels=labels
    )
    logits = model(tokens, decoder_tokens, encoder_padding_mask=~padding)
    assert (logits - expected.logits).abs().max() < TOLERANCE * expected.logits.abs().max()
    assert (model(tokens, decoder_tokens) - expected.logits)[1:].abs().max() > 1e-3  # the mask is seen
    loss = model(tokens, decoder_tokens, labels, encoder_padding_mask=~padding)
    assert abs(loss.item() - expected.loss.item()) < TOLERANCE * loss.item()
    expected.loss.backward()
    loss.backward()
    found = their_gradients(model)
    wanted = {name: parameter.grad for name, parameter in theirs.named_parameters() if parameter.grad is not None}
    assert found.keys() == wanted.keys()
    for name, grad in found.items():
        assert (grad - wanted[name]).abs().max() < TOLERANCE * max(1.0, wanted[name].abs().max()), name
        assert wanted[name].abs().max() > 1e-8, name


@each_case
def test_a_folder_that_is_written_is_what_was_read(case: str, tmp_path: Path) -> None:
    theirs = theirs_of(case, tmp_path / "a")
    hf.save_pretrained(hf.from_pretrained(tmp_path / "a"), tmp_path / "b")
    written, read = (load_file(tmp_path / name / "model.safetensors") for name in ("b", "a"))
    assert written.keys() == read.keys()
    assert all(torch.equal(written[name], read[name]) for name in read)
    tokens, _, decoder_tokens, _ = batch_of()
    again = read_by_them(tmp_path / "b")
    with torch.no_grad():
        logits = (m(input_ids=tokens, decoder_input_ids=decoder_tokens).logits for m in (theirs, again))
        assert (next(logits) - next(logits)).abs().max() < TOLERANCE
    assert hf.config_from_pretrained(tmp_path / "b") == hf.config_from_pretrained(tmp_path / "a")


def test_a_folder_of_a_new_model_trains_and_generates_in_transformers(tmp_path: Path) -> None:
    model = T5Model(T5Config(num_layers=1, hidden_size=8, num_attention_heads=2, vocab_size=9), seed=1)
    hf.save_pretrained(model, tmp_path / "a")
    theirs = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path / "a")
    tokens = torch.tensor([[3, 4, 5, 1]])
    loss = theirs(input_ids=tokens, labels=torch.tensor([[6, 7]])).loss
    # Theirs begins the decoder's text with its padding token.
    assert abs(model(tokens, torch.tensor([[0, 6]]), labels=torch.tensor([[6, 7]])).item() - loss.item()) < 1e-5
    assert theirs.generate(tokens, max_new_tokens=2, do_sample=False)[0, 0] == 0


@pytest.mark.parametrize("case", ["t5", "v1.1"])
def test_greedy_answers_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    theirs = theirs_of(case, tmp_path)
    tokens, _, _, _ = batch_of()
    lengths = torch.tensor([21, 6, 1])
    mask = torch.arange(tokens.shape[1]) < lengths.unsqueeze(1)
    # Their cache has room for as many decoder layers as there are in the encoder.
    options: dict[str, Any] = {"do_sample": False, "decoder_start_token_id": 0, "pad_token_id": 0, "use_cache": False}

    def their_answers(end: int | None) -> list[list[int]]:
        found: Tensor = theirs.generate(
            input_ids=tokens, attention_mask=mask.long(), max_new_tokens=12, eos_token_id=end, **options
        )
        return found.tolist()

    # The first row ends with a token that others may not have.
    end = their_answers(None)[0][6]
    start = torch.zeros(len(tokens), 1, dtype=torch.int64)
    config = GenerationConfig(max_new_tokens=12, temperature=0.0, stop_tokens=(end,))
    rows = generate_t5(hf.from_pretrained(tmp_path).eval(), tokens, start, config, lengths=lengths)
    assert len(rows[0]) <= 7 and len({tuple(row.tolist()) for row in rows}) == 3
    for row, full in zip(rows, their_answers(end), strict=True):
        assert row.tolist() == full[: len(row)] and set(full[len(row) :]) <= {0}


LAYOUTS = {
    "tp2": Sizes(world=2, tp=2),
    "tp4 sp": Sizes(world=4, tp=4, sequence_parallel=True),
    "pp2 vp2": Sizes(world=2, pp=2, vp=2),
    "pp5": Sizes(world=5, pp=5),
    "tp2 pp2 dp2": Sizes(world=8, tp=2, pp=2),
}


@pytest.mark.parametrize("case", ["t5", "v1.1"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_rank_reads_its_slices(layout: str, case: str, tmp_path: Path) -> None:
    theirs_of(case, tmp_path / "a")
    full = dict(hf.from_pretrained(tmp_path / "a").named_parameters())

    for rank in range(LAYOUTS[layout].world):
        model = hf.from_pretrained(tmp_path / "a", Mesh.imagine(rank, LAYOUTS[layout]))
        for name, parameter, shard in sharded_parameters(model):
            wanted = full[name]
            for dim, (start, size) in enumerate(zip(shard.box.offsets, shard.box.sizes, strict=True)):
                wanted = wanted.narrow(dim, start, size)
            assert torch.equal(shard.valid(parameter), wanted), name


@pytest.mark.parametrize("is_gated", [False, True])
def test_functions_of_the_feed_forward_network_are_those_of_transformers(is_gated: bool) -> None:
    x = torch.linspace(-6, 6, 200)
    for name, ours in (GATES if is_gated else PLAIN).items():
        theirs = ACT2FN[name](x)
        found = activate(torch.stack((x, 2 * torch.ones_like(x)), dim=1), ours) / 2 if is_gated else activate(x, ours)
        # One of them has a constant of ten digits.
        assert (found - theirs).abs().max() < 1e-8, name


@pytest.mark.parametrize(
    ("fields", "activation"),
    [
        ({"feed_forward_proj": "gated-gelu"}, "geglu_tanh"),
        ({"feed_forward_proj": "gated-gelu_pytorch_tanh"}, "geglu_tanh"),
        ({"feed_forward_proj": "gated-swish", "dense_act_fn": "swish", "is_gated_act": True}, "swiglu"),
        ({"feed_forward_proj": "relu", "dense_act_fn": "gelu"}, "gelu"),
        ({"feed_forward_proj": "relu", "dense_act_fn": "gelu_new", "is_gated_act": True}, "geglu_tanh"),
    ],
)
def test_what_follows_from_the_feed_forward_network_counts_where_a_file_has_it(
    fields: dict[str, Any], activation: str
) -> None:
    config = FAMILIES["t5"].config({"model_type": "t5", **SMALL, **fields})
    theirs = transformers.T5Config(**SMALL, **fields)
    assert config.activation == activation
    assert {True: GATES, False: PLAIN}[theirs.is_gated_act][theirs.dense_act_fn] == activation


@pytest.mark.parametrize("name", ["gated-relu", "silu", "gated-gelu-new", "linear-relu", "gated"])
def test_functions_that_are_not_built_are_reported_with_those_that_are(name: str) -> None:
    with pytest.raises(ValueError) as raised:
        FAMILIES["t5"].config({"model_type": "t5", **SMALL, "feed_forward_proj": name})
    assert f"feed_forward_proj ({name!r}, with" in str(raised.value)
    assert "'gelu_new'" in str(raised.value) and "'gated-silu'" in str(raised.value)


def test_what_transformers_cannot_say_is_reported(tmp_path: Path) -> None:
    fields: dict[str, Any] = {
        "num_layers": 1,
        "hidden_size": 8,
        "num_attention_heads": 2,
        "vocab_size": 9,
    }
    model = T5Model(T5Config(**fields, position="learned", ffn_dropout=0.1, share_embeddings=False))
    with pytest.raises(ValueError) as raised:
        hf.save_pretrained(model, tmp_path / "a")
    for name in ("position ('learned')", "ffn_dropout (0.1)", "share_embeddings (False)"):
        assert name in str(raised.value)
    assert "gpt2" not in str(raised.value)
    untied = T5Model(T5Config(**fields, tie_embeddings=False))
    with pytest.raises(ValueError, match="scales_head"):
        hf.save_pretrained(untied, tmp_path / "a")
    with pytest.raises(ValueError, match=r"'gpt2'\) has no models with a T5Config"):
        hf.save_pretrained(model, tmp_path / "a", family="gpt2")


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (8, 10), (4, 3), (20, 1000)])
def test_buckets_are_those_of_transformers(is_causal: bool, num_buckets: int, max_distance: int) -> None:
    distance = torch.arange(-1500, 1501)
    expected = modeling_t5.T5Attention._relative_position_bucket(distance, not is_causal, num_buckets, max_distance)
    buckets = relative_position_bucket(
        distance, num_buckets=num_buckets, max_distance=max_distance, is_causal=is_causal
    )
    assert torch.equal(buckets, expected)
    # Behind the query no key is at distance 0.
    assert len(buckets.unique()) == num_buckets - (not is_causal)
