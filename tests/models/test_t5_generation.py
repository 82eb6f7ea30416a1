"""Answers of a T5 come out the same on every layout, as from calls on each full prefix.

tests/hf/test_t5.py compares them with those of transformers.
"""

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron.mesh import Mesh, Sizes
from lightning_megatron.models import GenerationConfig, T5Config, T5Model, generate_t5
from lightning_megatron.models.generation import generate_rows
from lightning_megatron.models.t5_generation import T5NextLogits
from lightning_megatron.pipeline.collective import CollectiveCall
from tests.harness.ranks import run_on_ranks
from tests.harness.threads import new_group, run_on_threads
from tests.models.test_t5 import VARIANTS, model_of
from tests.pipeline.meshes import make_mailbox, make_mesh

# Sums of some ten float64 numbers of order 10, in another order.
TOLERANCE = 1e-10
LENGTHS = (13, 1, 6)
NEW = 8
GREEDY = GenerationConfig(max_new_tokens=NEW, temperature=0.0)
LEARNED = "learned positions, layer norms, biases, own embeddings"
LAYOUTS: dict[str, dict[str, Any]] = {
    "one device": {},
    "tp2": {"tp": 2},
    "tp4 sp": {"tp": 4, "sequence_parallel": True},
    "cp2": {"cp": 2},
    "cp4 all-gather": {"cp": 4, "cp_exchange": "all_gather"},
    "cp2 all-to-all": {"cp": 2, "cp_ulysses": 2},
    "cp2 tp2 sp": {"cp": 2, "tp": 2, "sequence_parallel": True},
}


def sizes_of(options: dict[str, Any]) -> Sizes:
    return Sizes(world=options.get("tp", 1) * options.get("cp", 1) * options.get("pp", 1), **options)


def texts() -> tuple[Tensor, Tensor]:
    """What the encoder reads, with tokens after each end that nobody shall see, and what answers begin with."""
    generator = torch.Generator().manual_seed(11)
    read = torch.randint(131, (len(LENGTHS), max(LENGTHS)), generator=generator)
    return read, torch.randint(131, (len(LENGTHS), 2), generator=generator)


def written(model: T5Model, config: GenerationConfig) -> tuple[list[list[int]], list[Tensor]]:
    """The rows, and the logits of each call."""
    read, begun = texts()
    next_logits, logits = T5NextLogits(model.eval(), read, torch.tensor(LENGTHS)), []

    def watched(text: Tensor, lengths: Tensor) -> Tensor:
        with torch.no_grad():
            logits.append(next_logits(text, lengths))
        return logits[-1]

    rows = generate_rows(
        watched,
        begun,
        torch.full((len(begun),), begun.shape[1]),
        config,
        samples_B=torch.arange(len(begun)),
        sharing=(model.mesh.tp, model.mesh.cp),
    )
    return [row.tolist() for row in rows], logits


@functools.cache
def wanted(name: str) -> tuple[list[list[int]], list[Tensor]]:
    """Greedy answers, each token from a call on one row alone and all of its answer so far."""
    model = model_of(VARIANTS[name]).eval()
    read, begun = texts()
    answers, steps = begun.tolist(), []
    with torch.no_grad():
        for _ in range(NEW):
            rows = [
                model(read[i : i + 1, :length], torch.tensor([answers[i]]))[:, -1] for i, length in enumerate(LENGTHS)
            ]
            steps.append(torch.cat(rows))
            for answer, token in zip(answers, steps[-1].argmax(dim=-1).tolist(), strict=True):
                answer.append(token)
    return answers, steps


def require_equal(found: tuple[list[list[int]], list[Tensor]], name: str) -> None:
    answers, steps = wanted(name)
    assert len(found[1]) == len(steps)
    for one, other in zip(found[1], steps, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=TOLERANCE)
    assert found[0] == answers


@pytest.mark.parametrize("name", VARIANTS)
def test_answers_go_their_own_ways(name: str) -> None:
    answers, steps = wanted(name)
    # A text that was read in part, or the text of another row, would show.
    assert len({tuple(answer[-NEW:]) for answer in answers}) == len(answers)
    best = torch.stack(steps).topk(2, dim=-1).values
    assert (best[..., 0] - best[..., 1]).min() > 1000 * TOLERANCE


@pytest.mark.matrix
@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_and_answers_are_those_of_full_prefixes(layout: str, name: str) -> None:
    sizes = sizes_of(LAYOUTS[layout])
    for found in run_on_threads(sizes.world, on_mesh, sizes, VARIANTS[name], GREEDY):
        require_equal(found, name)


def on_mesh(world: Any, sizes: Sizes, config: T5Config, generation: GenerationConfig) -> Any:
    return written(model_of(config, Mesh.build(sizes, world.rank(), new_group)), generation)


def on_stages(sizes: Sizes, num_microbatches: int, name: str, config: GenerationConfig = GREEDY) -> Any:
    model = model_of(VARIANTS[name], make_mesh(sizes))
    model.driver = CollectiveCall(
        model.mesh.pp,
        make_mailbox(model.mesh),
        torch.device("cpu"),
        lambda rows: max(1, min(rows, num_microbatches)),
    )
    return written(model, config)


STAGES: dict[str, tuple[dict[str, Any], int]] = {
    # And the number of microbatches.
    "pp2": ({"pp": 2}, 2),
    "pp4": ({"pp": 4}, 1),
    "pp2 vp2": ({"pp": 2, "vp": 2}, 3),
    "pp2 cp2": ({"pp": 2, "cp": 2}, 3),
    "pp2 tp2": ({"pp": 2, "tp": 2}, 1),
}


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["t5", LEARNED])
@pytest.mark.parametrize("layout", STAGES)
def test_on_stages_and_in_microbatches_the_answers_are_the_same(layout: str, name: str) -> None:
    options, num_microbatches = STAGES[layout]
    sizes = sizes_of(options)
    for found in run_on_ranks(sizes.world, on_stages, sizes, num_microbatches, name):
        require_equal(found, name)


# --- draws and costs --------------------------------------------------------------------------------------------------

DRAWN = GenerationConfig(max_new_tokens=NEW, temperature=3.0, top_k=50, top_p=0.95, seed=5)


@pytest.mark.parametrize(
    ("options", "num_microbatches"), [({"pp": 2}, 3), ({"pp": 2, "cp": 2}, 1)], ids=["pp2", "pp2 cp2"]
)
def test_what_is_drawn_is_the_same_on_stages(options: dict[str, Any], num_microbatches: int) -> None:
    [[answers, _]] = run_on_threads(1, on_mesh, Sizes(), VARIANTS["v1.1"], DRAWN)
    sizes = sizes_of(options)
    for found, _ in run_on_ranks(sizes.world, on_stages, sizes, num_microbatches, "v1.1", DRAWN):
        assert found == answers


@pytest.mark.parametrize("layout", ["tp4 sp", "cp2 tp2 sp"])
def test_what_is_drawn_is_the_same_on_every_layout_and_in_any_batch(layout: str) -> None:
    [[answers, _]] = run_on_threads(1, on_mesh, Sizes(), VARIANTS["v1.1"], DRAWN)
    assert answers != wanted("v1.1")[0]
    sizes = sizes_of(LAYOUTS[layout])
    for found, _ in run_on_threads(sizes.world, on_mesh, sizes, VARIANTS["v1.1"], DRAWN):
        assert found == answers
    model, (read, begun) = model_of(VARIANTS["v1.1"]).eval(), texts()
    for row, length in enumerate(LENGTHS):
        own, sample = slice(row, row + 1), torch.tensor([row])
        [alone] = generate_t5(model, read[own, :length], begun[own], DRAWN, samples=sample)
        assert alone.tolist() == answers[row]


def test_the_encoder_runs_once_and_each_call_has_the_new_tokens_alone() -> None:
    model, (read, begun) = model_of(VARIANTS["t5"]).eval(), texts()
    encoded, decoded = [], []
    model.get_submodule("encoder.layers.0").register_forward_hook(lambda _, args, out: encoded.append(len(out)))
    model.get_submodule("decoder.layers.0").register_forward_hook(lambda _, args, out: decoded.append(len(out)))
    generate_t5(model, read, begun, GREEDY, lengths=torch.tensor(LENGTHS))
    assert encoded == [sum(LENGTHS)]  # and no padding
    assert decoded == [6] + [3] * (NEW - 1)


def test_ranks_of_cp_cache_equal_parts() -> None:
    def on_rank(world: Any) -> list[int]:
        model = model_of(VARIANTS["t5"], Mesh.build(Sizes(world=2, cp=2), world.rank(), new_group)).eval()
        read, begun = texts()
        next_logits: Any = T5NextLogits(model, read, torch.tensor(LENGTHS))
        generate_rows(
            next_logits,
            begun,
            torch.full((3,), 2),
            replace(GREEDY, max_new_tokens=7),
            samples_B=torch.arange(3),
            sharing=(),
        )
        # Columns that hold a token of some row.
        held = next_logits._memory._positions_RC
        return [next_logits._own.num_columns, int((held != -1).sum()), held.shape[1]]

    # 2 tokens and then 6; of 20 tokens of the encoder, with 13 in the longest row.
    one, other = run_on_threads(2, on_rank)
    assert one[0] == other[0] == 4
    assert one[1] + other[1] == sum(LENGTHS) and abs(one[1] - other[1]) <= 1
    assert one[2] == other[2] == 7


def stopped_on(world: Any, sizes: Sizes, config: GenerationConfig) -> list[list[int]]:
    model, (read, begun) = model_of(VARIANTS["v1.1"], Mesh.build(sizes, world.rank(), new_group)).eval(), texts()
    return [row.tolist() for row in generate_t5(model, read, begun, config, lengths=torch.tensor(LENGTHS))]


def stopped_on_stages(sizes: Sizes, config: GenerationConfig) -> list[list[int]]:
    model, (read, begun) = model_of(VARIANTS["v1.1"], make_mesh(sizes)).eval(), texts()
    model.driver = CollectiveCall(model.mesh.pp, make_mailbox(model.mesh), torch.device("cpu"), lambda rows: 1)
    return [row.tolist() for row in generate_t5(model, read, begun, config, lengths=torch.tensor(LENGTHS))]


def test_an_answer_ends_with_its_first_stop_token_and_the_others_go_on_on_every_layout() -> None:
    answers, _ = wanted("v1.1")
    new = [answer[2:] for answer in answers]
    stop = next(token for token in new[1][1:-1] if token not in new[0] + new[1][:1])
    expected = [
        answer[: 3 + tokens.index(stop)] if stop in tokens else answer
        for answer, tokens in zip(answers, new, strict=True)
    ]
    assert len(answers[1]) > len(expected[1]) > 3 and expected[0] == answers[0]
    config = replace(GREEDY, stop_tokens=(stop,))
    for options in LAYOUTS.values():
        sizes = sizes_of(options)
        assert run_on_threads(sizes.world, stopped_on, sizes, config) == [expected] * sizes.world
    assert run_on_ranks(2, stopped_on_stages, Sizes(world=2, pp=2), config) == [expected] * 2


def test_a_token_that_begins_an_answer_ends_nothing() -> None:
    answers, _ = wanted("v1.1")
    begun = texts()[1][0].tolist()
    assert not any(token in answer[2:] for token in begun for answer in answers)
    [found] = run_on_threads(1, stopped_on, Sizes(), replace(GREEDY, stop_tokens=tuple(begun)))
    assert found == answers


# --- what is refused --------------------------------------------------------------------------------------------------


def test_answers_that_would_outgrow_learned_positions_are_refused() -> None:
    model, (read, begun) = model_of(VARIANTS[LEARNED]).eval(), texts()
    rows = generate_t5(model, read, begun, replace(GREEDY, max_new_tokens=11))
    assert [len(row) for row in rows] == [13] * 3
    with pytest.raises(ValueError, match=r"max_new_tokens \(12\) must be at most 11"):
        generate_t5(model, read, begun, replace(GREEDY, max_new_tokens=12))


def test_texts_fill_all_learned_positions_of_the_encoder_and_no_more() -> None:
    model = model_of(VARIANTS[LEARNED]).eval()
    read, begun = torch.randint(131, (2, 17)), texts()[1][:2]
    config = replace(GREEDY, max_new_tokens=2)
    rows = generate_t5(model, read[:, :16], begun, config, lengths=torch.tensor([16, 1]))
    for row, length in zip(rows, (16, 1), strict=True):
        index = int(length == 1)
        for end in (2, 3):
            logits = model(read[index : index + 1, :length], row[None, :end])
            assert row[end] == logits[0, -1].argmax()
    with pytest.raises(
        ValueError, match=r"17 tokens of the encoder must not be longer than max_sequence_length \(16\)"
    ):
        generate_t5(model, read, begun, config)


def test_generation_takes_no_model_that_drops_and_no_text_without_tokens() -> None:
    model, (read, begun) = model_of(VARIANTS["t5"]), texts()
    with pytest.raises(RuntimeError, match="training mode"):
        generate_t5(model, read, begun, GREEDY)
    with pytest.raises(ValueError, match="row 1 has 0 tokens"):
        generate_t5(model.eval(), read, begun, GREEDY, lengths=torch.tensor([13, 0, 6]))
