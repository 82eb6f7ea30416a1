"""LlavaModel equals transformers' LlavaForConditionalGeneration: loss, logits and every gradient, on any layout."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from lightning_megatron import hf
from lightning_megatron.comm import collectives
from lightning_megatron.hf.blocks import fill_ours, part
from lightning_megatron.hf.families import FAMILIES, family_of_config
from lightning_megatron.hf.family import Table
from lightning_megatron.mesh import Mesh, Sizes
from lightning_megatron.models import GPTModel, LlavaConfig, LlavaModel
from lightning_megatron.pipeline.microbatches import split
from lightning_megatron.pipeline.ragged import Ragged
from lightning_megatron.sharding import Box
from lightning_megatron.transformer.recompute import RecomputeConfig, RecomputeRunner
from tests.harness.threads import new_group, run_on_threads
from tests.models.small_llava import COUNTS, IMAGE, LLAMA, LLAVA, VISION, batch_of, model_of
from tests.reference.unsplit import unsplit_gradients, unsplit_weights

# Sums of a few hundred float64 numbers of order 1, in another order.
TOLERANCE = 1e-12
VARIANTS = {
    "as llava 1.5": LLAVA,
    "the last layer, the class token too": replace(LLAVA, feature_layer=3, keeps_class_token=True),
    "one layer, tied, no biases in the projector": replace(
        LLAVA, feature_layer=-3, tie_embeddings=True, projector_bias=False, projector_activation="gelu_tanh"
    ),
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2},
    "tp2 with sequence parallelism": {"tp": 2, "sequence_parallel": True},
    "tp4 with sequence parallelism": {"tp": 4, "sequence_parallel": True},
    "cp2": {"cp": 2},
    "cp2 all-to-all": {"cp": 2, "cp_ulysses": 2},
    "cp4, tp2 with sequence parallelism": {"cp": 4, "tp": 2, "sequence_parallel": True},
}


def make_exact(model: transformers.PreTrainedModel) -> None:
    """Has norms and rotations, which they compute in float32 whatever the weights are, computed in float64."""
    rotary = model.model.language_model.rotary_emb
    half = torch.arange(0, LLAMA.head_dim, 2, dtype=torch.float64) / LLAMA.head_dim

    def rotate(x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = position_ids.unsqueeze(-1).double() * 10000.0**-half
        return torch.cat((angles, angles), dim=-1).cos(), torch.cat((angles, angles), dim=-1).sin()

    rotary.forward = rotate
    for module in model.modules():
        if type(module) is LlamaRMSNorm:
            module.forward = partial(exact_norm, module)


def exact_norm(module: LlamaRMSNorm, x: Tensor) -> Tensor:
    return torch.nn.functional.rms_norm(x, module.weight.shape, module.weight, module.variance_epsilon)


def theirs_of(config: LlavaConfig) -> tuple[transformers.PreTrainedModel, Table]:
    """The model of transformers with the weights of `model_of`, and where they lie."""
    raw = FAMILIES["llava"].config_to_hf(config)
    vision, text = (transformers.AutoConfig.for_model(**raw.pop(key)) for key in ("vision_config", "text_config"))
    their_config = transformers.LlavaConfig(vision_config=vision, text_config=text, **raw)
    model = transformers.LlavaForConditionalGeneration(their_config).double().eval()
    make_exact(model)
    parameters = dict(model.named_parameters())
    table = Table(FAMILIES["llava"], config, parameters.keys())
    weights = unsplit_weights(model_of(config))
    with torch.no_grad():
        for name, link in table.links.items():
            for block in link.blocks:
                target = part(parameters[link.sources[block.source]], block.theirs)
                target.copy_(block.to_theirs(part(weights[name], block.ours)))
    return model, table


@cache
def expected_of(variant: str, case: str) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Their loss, logits and gradients."""
    config = VARIANTS[variant]
    model, table = theirs_of(config)
    batch = batch_of(config, COUNTS[case])
    given = [rows for rows in batch["images"] if rows is not None]
    pixels = torch.cat(given) if given else None
    logits = model(input_ids=batch["tokens"], pixel_values=pixels).logits
    # An image token is no target.
    labels = batch["labels"].masked_fill(batch["labels"] == IMAGE, -100)
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    weights = (batch["loss_mask"] * (labels != -100)).flatten()
    loss = (losses * weights).sum() / weights.sum()
    loss.backward()
    found = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}
    grads = {}
    for name, link in table.links.items():
        grads[name] = torch.empty(link.shape, dtype=torch.float64)
        box = Box((0,) * len(link.shape), link.shape)
        sources = link.sources

        def read(source: int, theirs: Box, sources: tuple[str, ...] = sources) -> Tensor:
            return part(found[sources[source]], theirs)

        fill_ours(grads[name], box, link.blocks, read)
    return loss.detach(), logits.detach(), grads


def largest_difference(one: dict[str, Tensor], two: dict[str, Tensor]) -> float:
    assert one.keys() == two.keys()
    return max(float((one[name] - two[name]).abs().max() / two[name].abs().max().clamp(min=1)) for name in one)


def check(variant: str, case: str, result: dict[str, Any]) -> None:
    loss, logits, grads = expected_of(variant, case)
    assert abs(result["loss"] - loss.item()) < TOLERANCE
    torch.testing.assert_close(result["logits"], logits, rtol=0, atol=1e-11)
    assert largest_difference(result["grads"], grads) < TOLERANCE


def run(model: LlavaModel, batch: dict[str, Any]) -> dict[str, Any]:
    loss = model(**batch)
    loss.backward()
    cp = model.mesh.cp
    # Losses of the ranks of cp are averaged as over data-parallel ranks.
    grads = {name: collectives.all_reduce(g, cp) / cp.size for name, g in unsplit_gradients(model).items()}
    without = {name for name, p in model.named_parameters() if p.requires_grad and p.grad is None}
    with torch.no_grad():
        logits = model(batch["tokens"], images=batch["images"])
    return {"loss": loss.item(), "grads": grads, "logits": logits, "without": without}


@pytest.mark.parametrize("case", ["some", "one", "none"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_loss_logits_and_gradients_equal_those_of_transformers(variant: str, case: str) -> None:
    config = VARIANTS[variant]
    result = run(model_of(config), batch_of(config, COUNTS[case]))
    check(variant, case, result)
    trained = {name: grad for name, grad in result["grads"].items() if not is_unused(config, name)}
    sees = {name for name in trained if name.startswith(("vision", "projector"))}
    # Every weight is seen by the comparison; without an image the tower has gradients, and they are zeros.
    assert result["without"] == set()
    assert all((name in sees and case == "none") != bool(grad.abs().max() > 1e-6) for name, grad in trained.items())


def is_unused(config: LlavaConfig, name: str) -> bool:
    """Whether a weight of the tower comes after the layer whose output is used."""
    after = range(config.num_vision_layers, config.vision.num_layers)
    return name.startswith(("vision.final_norm", *(f"vision.layers.{i}." for i in after)))


@pytest.mark.matrix
@pytest.mark.parametrize("case", COUNTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_equals_transformers(layout: str, case: str) -> None:
    sizes = Sizes(world=LAYOUTS[layout].get("tp", 1) * LAYOUTS[layout].get("cp", 1), **LAYOUTS[layout])

    def on_rank(world: Any) -> dict[str, Any]:
        return run(model_of(LLAVA, Mesh.build(sizes, world.rank(), new_group)), batch_of(LLAVA, COUNTS[case]))

    for result in run_on_threads(sizes.world, on_rank):
        assert result["without"] == set()
        check("as llava 1.5", case, result)


def test_dropout_in_the_tower_is_the_same_on_every_layout() -> None:
    config = replace(LLAVA, vision=replace(VISION, attention_dropout=0.2, hidden_dropout=0.1), hidden_dropout=0.1)
    batch = batch_of(config, COUNTS["some"])
    alone = model_of(config)
    expected = alone(**batch)
    expected.backward()
    assert abs(expected.item() - model_of(LLAVA)(**batch).item()) > 1e-3

    def on_rank(world: Any, sizes: Sizes) -> tuple[float, dict[str, Tensor]]:
        model = model_of(config, Mesh.build(sizes, world.rank(), new_group))
        loss = model(**batch)
        loss.backward()
        cp = model.mesh.cp
        return loss.item(), {n: collectives.all_reduce(g, cp) / cp.size for n, g in unsplit_gradients(model).items()}

    for options in ({"tp": 2, "sequence_parallel": True}, {"cp": 2}):
        for loss, grads in run_on_threads(2, on_rank, Sizes(world=2, **options)):
            assert abs(loss - expected.item()) < TOLERANCE
            assert largest_difference(grads, unsplit_gradients(alone)) < TOLERANCE


@pytest.mark.parametrize("options", [{}, {"cp": 2}, {"cp": 2, "tp": 2, "sequence_parallel": True}])
def test_packed_documents_see_their_own_images(options: dict[str, Any]) -> None:
    batch = batch_of(LLAVA, (1, 2), sequence=12)
    tokens, images = batch["tokens"], batch["images"]
    packed = torch.cat((tokens[0], tokens[1])).unsqueeze(0)
    segments = torch.arange(2).repeat_interleave(12).unsqueeze(0)
    with torch.no_grad():
        apart = model_of(LLAVA)(tokens, images=images)
    sizes = Sizes(world=options.get("cp", 1) * options.get("tp", 1), **options)

    def on_rank(world: Any) -> Tensor:
        model = model_of(LLAVA, Mesh.build(sizes, world.rank(), new_group))
        with torch.no_grad():
            logits: Tensor = model(packed, segments=segments, images=[torch.cat(images)])
        return logits

    for logits in run_on_threads(sizes.world, on_rank):
        torch.testing.assert_close(logits.view_as(apart), apart, rtol=0, atol=1e-11)


def test_without_images_it_is_a_gpt_with_the_same_weights() -> None:
    model, gpt = LlavaModel(LLAVA, seed=5), GPTModel(LLAMA, seed=5)
    batch = batch_of(LLAVA, COUNTS["none"])
    assert torch.equal(model(batch["tokens"]), gpt(batch["tokens"]))
    assert LLAVA.language == LLAMA


def test_learned_positions_are_added_to_features_too() -> None:
    config = replace(LLAVA, position="learned")
    model = model_of(config)
    batch = batch_of(config, COUNTS["one"])
    at = batch["tokens"][1] == IMAGE
    seen: list[Tensor] = []
    model.get_submodule("layers.0").register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    model(batch["tokens"], images=batch["images"])
    with torch.no_grad():
        model.get_parameter("embedding.positions.weight").add_(1.0)
    model(batch["tokens"], images=batch["images"])
    moved = (seen[1] - seen[0]).view(3, 19, 32)
    torch.testing.assert_close(moved[1, at], torch.ones_like(moved[1, at]))


FORMS: dict[str, Callable[[list[Tensor]], dict[str, Any]]] = {
    "a ragged": lambda rows: {"images": Ragged.of(rows)},
    "image_rows, in any order": lambda rows: {
        "images": torch.cat((rows[2][:1], rows[0], rows[2][1:])),
        "image_rows": torch.tensor([2, 0, 2]),
    },
}


@pytest.mark.parametrize("form", FORMS)
def test_images_mean_the_same_in_every_form(form: str) -> None:
    batch = batch_of(LLAVA, COUNTS["some"])
    model = model_of(LLAVA)
    rows = [torch.zeros(0, 3, 6, 6, dtype=torch.float64) if row is None else row for row in batch["images"]]
    expected = model(batch["tokens"], images=batch["images"])
    assert torch.equal(model(batch["tokens"], **FORMS[form](rows)), expected)
    swapped = [rows[0], rows[1], rows[2].flip(0)]
    assert (model(batch["tokens"], images=swapped) - expected).abs().max() > 1e-3


def test_as_many_images_for_each_row_may_be_one_tensor() -> None:
    batch = batch_of(LLAVA, (2, 2))
    model = model_of(LLAVA)
    expected = model(batch["tokens"], images=batch["images"])
    assert torch.equal(model(batch["tokens"], images=torch.stack(batch["images"])), expected)


def test_microbatches_are_cut_with_their_images() -> None:
    batch = batch_of(LLAVA, COUNTS["many"])
    model = model_of(LLAVA).eval()
    full_batch = {"tokens": batch["tokens"], "images": Ragged.of(batch["images"])}
    parts = split(full_batch, 2)
    assert [part["images"].counts for part in parts] == [(2, 3), (2,)]
    logits = torch.cat([model(**part) for part in parts])
    torch.testing.assert_close(logits, model(**full_batch), rtol=0, atol=1e-11)
    with pytest.raises(ValueError, match=r"have \[2, 3\] rows"):
        split({**full_batch, "tokens": batch["tokens"][:2]}, 2)


@pytest.mark.parametrize("names", [("vision",), ("vision", "projector"), ("language",), ("projector",)])
@pytest.mark.parametrize("case", ["some", "none"])
def test_frozen_parts_get_no_gradient_and_the_others_get_theirs(names: tuple[str, ...], case: str) -> None:
    batch = batch_of(LLAVA, COUNTS[case])
    free, frozen = model_of(LLAVA), model_of(LLAVA)
    frozen.freeze(*names)
    for model in (free, frozen):
        model(**batch).backward()
    expected = dict(free.named_parameters())
    for name, parameter in frozen.named_parameters():
        owner = name.partition(".")[0]
        is_frozen = (owner if owner in ("vision", "projector") else "language") in names
        if is_frozen or is_unused(LLAVA, name):
            assert parameter.grad is None and not parameter.requires_grad
        else:
            assert torch.equal(parameter.grad, expected[name].grad)


def test_each_image_drops_features_of_its_own_in_each_step() -> None:
    config = replace(LLAVA, vision=replace(VISION, hidden_dropout=0.2))
    batch, model = batch_of(config, (1, 2)), model_of(config)
    pixels = torch.randn(1, 3, 6, 6, dtype=torch.float64)
    # One picture three times.
    batch["images"] = [pixels, pixels.expand(2, -1, -1, -1)]
    seen: list[Tensor] = []
    model.get_submodule("vision.layers.1").register_forward_hook(lambda _, args, output: seen.append(output))
    for step, is_training in ((0, True), (1, True), (1, False)):
        model.draws.step = step
        model.train(is_training)(**batch)
    first, second, without = (output.detach().view(3, -1) for output in seen)
    dropped = torch.cat((first, second))
    assert all((one - other).abs().max() > 1e-3 for i, one in enumerate(dropped) for other in dropped[:i])
    assert (without - without[0]).abs().max() < TOLERANCE


def test_a_frozen_tower_drops_as_one_that_is_trained() -> None:
    config = replace(LLAVA, vision=replace(VISION, attention_dropout=0.2, hidden_dropout=0.1))
    batch = batch_of(config, COUNTS["some"])
    free, frozen = model_of(config), model_of(config)
    frozen.freeze("vision")
    losses = [model(**batch) for model in (free, frozen)]
    assert torch.equal(*losses)
    assert abs(losses[0].item() - free.eval()(**batch).item()) > 1e-3
    for loss in losses:
        loss.backward()
    wanted = dict(free.named_parameters())
    for name, parameter in frozen.named_parameters():
        if parameter.requires_grad:
            assert torch.equal(parameter.grad, wanted[name].grad)


def test_layers_of_the_tower_are_recomputed_with_the_others() -> None:
    batch = batch_of(LLAVA, COUNTS["some"])
    plain, recomputing = model_of(LLAVA), model_of(LLAVA)
    calls: list[str] = []
    recomputing.get_submodule("vision.layers.0").register_forward_pre_hook(lambda *_: calls.append("vision"))
    recomputing.get_submodule("layers.0").register_forward_pre_hook(lambda *_: calls.append("language"))
    recomputing.runner = RecomputeRunner(
        RecomputeConfig(granularity="full"), tp=recomputing.mesh.tp, sp=recomputing.mesh.sp
    )
    for model in (plain, recomputing):
        model(**batch).backward()
    assert sorted(calls) == ["language", "language", "vision", "vision"]
    assert largest_difference(unsplit_gradients(recomputing), unsplit_gradients(plain)) == 0.0


def test_what_does_not_fit_is_reported() -> None:
    model = model_of(LLAVA)
    batch = batch_of(LLAVA, COUNTS["some"])
    tokens, images = batch["tokens"], batch["images"]
    for changed, message in (
        ({"images": None}, r"row 0 has 4, and its images \(0\) take 0; row 2 has 8, and its images \(0\) take 0"),
        ({"images": [images[2], None, images[0]]}, r"row 0 has 4, and its images \(2\) take 8; row 2 has 8"),
        ({"images": images[:2]}, "images are of 2 rows and tokens of 3"),
        ({"images": images[0]}, "do not tell which row each belongs to"),
        (
            {"images": [images[0], None, images[2].long()]},
            r"images are \(3, 6, 6\) of torch.float64 and \(3, 6, 6\) of torch.int64",
        ),
        ({"images": [images[0][..., :5], None, images[2][..., :5]]}, r"must be floating-point numbers .* 3, 6, 6\]"),
        ({"images": [images[0][..., :5], None, images[2]]}, r"images are \(3, 6, 5\) of torch.float64 and \(3, 6, 6\)"),
        ({"images": [images[0][0], None, images[2]]}, "the images of row 0 must be a tensor"),
        ({"images": images[0], "image_rows": torch.tensor([3])}, r"image_rows \(\[3\]\) must be whole numbers from 0"),
        ({"images": images, "image_rows": torch.tensor([0])}, "must have the row of each of images"),
    ):
        with pytest.raises(ValueError, match=message):
            model(tokens, **changed)
    with pytest.raises(ValueError, match="'tower' is no part of a LLaVA"):
        model.freeze("tower")
    with pytest.raises(ValueError, match=r"counts .* must each be at least 0"):
        Ragged(torch.zeros(3), [1, 1])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"feature_layer": -5}, r"feature_layer \(-5\) must be from -4 to 3"),
        ({"projector_activation": "swiglu"}, "projector_activation"),
        ({"image_token": -100}, "image_token"),
    ],
)
def test_faults_of_a_configuration_are_reported(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(LLAVA, **changed)


def test_faults_of_a_tower_are_reported() -> None:
    with pytest.raises(ValueError, match=r"image_size \(7\) must be a multiple of patch_size \(3\); it may be 6 or 9"):
        replace(VISION, image_size=7, max_sequence_length=0)
    with pytest.raises(ValueError, match=r"position .* must be 'learned' in a vision tower"):
        replace(VISION, position="rotary")
    wide = replace(LLAVA, vision=replace(VISION, num_attention_heads=3, num_query_groups=3, head_dim=8))
    with pytest.raises(ValueError, match=r"vision: num_attention_heads \(3\) must be a multiple"):
        LlavaModel(wide, mesh=Mesh.imagine(0, Sizes(world=2, tp=2)))


def test_the_tower_is_on_the_first_stage_and_its_cost_counts() -> None:
    sizes = Sizes(world=2, pp=2)
    stages = [LlavaModel(LLAVA, mesh=Mesh.imagine(rank, sizes)) for rank in (1, 0)]
    owned = [{name.partition(".")[0] for name, _ in model.named_parameters()} for model in stages]
    assert owned == [{"vision", "projector", "embedding", "layers"}, {"layers", "final_norm", "head"}]


@pytest.mark.parametrize("is_inner", [True, False])
def test_a_folder_of_transformers_and_ours_are_one(is_inner: bool, tmp_path: Path) -> None:
    model, _ = theirs_of(LLAVA)
    model.save_pretrained(tmp_path / "theirs", save_original_format=not is_inner)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        ours = hf.from_pretrained(tmp_path / "theirs", Mesh.single())
    finally:
        torch.set_default_dtype(before)
    weights = unsplit_weights(model_of(LLAVA))
    assert all(torch.equal(value, weights[name]) for name, value in unsplit_weights(ours).items())
    assert ours.config == LLAVA
    # Those after the last layer in use are not trained, read or not.
    assert {name for name, p in ours.named_parameters() if not p.requires_grad} == {
        name for name in weights if is_unused(LLAVA, name)
    }
    hf.save_pretrained(ours, tmp_path / "ours")
    reloaded, info = transformers.LlavaForConditionalGeneration.from_pretrained(
        tmp_path / "ours", output_loading_info=True, dtype=torch.float64
    )
    assert not any(info.values())
    theirs = dict(model.named_parameters())
    assert all(torch.equal(value, theirs[name]) for name, value in reloaded.named_parameters())
    preserved = ("vision_feature_layer", "image_token_index", "projector_hidden_act", "vision_feature_select_strategy")
    assert all(getattr(reloaded.config, name) == getattr(model.config, name) for name in preserved)


def test_what_a_folder_asks_for_and_is_not_built_is_reported_at_once() -> None:
    family = FAMILIES["llava"]
    raw = family.config_to_hf(LLAVA)
    raw["text_config"] = {**raw["text_config"], "model_type": "mistral"}
    raw["vision_config"] = {**raw["vision_config"], "hidden_act": "relu", "model_type": "siglip_vision_model"}
    raw["vision_feature_layer"] = [-2, -1]
    with pytest.raises(ValueError) as raised:
        family.config(raw)
    for fault in (
        "text_config: model_type ('mistral') must be 'llama'",
        "vision_config: hidden_act ('relu')",
        "vision_config: model_type ('siglip_vision_model') must be 'clip_vision_model'",
        "vision_feature_layer ([-2, -1]) must be one layer",
    ):
        assert fault in str(raised.value)


def test_a_llama_is_no_llava_and_a_llava_no_llama() -> None:
    assert family_of_config(LLAVA, None).name == "llava"
    assert family_of_config(LLAMA, "llama").name == "llama"
    with pytest.raises(ValueError, match=r"family \('llava'\) has no models with a GPTConfig"):
        family_of_config(LLAMA, "llava")
    with pytest.raises(ValueError, match=r"family \('llama'\) has no models with a LlavaConfig"):
        family_of_config(LLAVA, "llama")
