"""Text comes out the same on every layout, and as from a model that is called on each full prefix."""

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron.mesh import Mesh, Sizes
from lightning_megatron.models import GenerationConfig, GPTConfig, GPTModel, generate
from lightning_megatron.models.generation import GPTNextLogits, generate_rows
from lightning_megatron.moe.capacity import ExpertCapacity
from lightning_megatron.moe.config import MoEConfig, RouterConfig
from lightning_megatron.pipeline.collective import CollectiveCall
from tests.harness.ranks import run_on_ranks
from tests.harness.threads import new_group, run_on_threads
from tests.models.test_gpt import VARIANTS as DENSE
from tests.models.test_gpt import model_of, reference_of
from tests.pipeline.meshes import make_mailbox, make_mesh
from tests.reference.unsplit import unsplit_weights

# Sums of some ten float64 numbers of order 10, in another order.
TOLERANCE = 1e-10
LENGTHS = (7, 1, 4)
NEW = 8
GREEDY = GenerationConfig(max_new_tokens=NEW, temperature=0.0)
TOP_2 = MoEConfig(
    router=RouterConfig(num_experts=4, top_k=2),
    ffn_hidden_size=24,
    shared_expert_intermediate_size=16,
    shared_expert_gate=True,
)
LLAMA = DENSE["llama"]
EXPERTS = {
    "experts": replace(LLAMA, moe=TOP_2),
    "experts with a capacity": replace(LLAMA, moe=replace(TOP_2, capacity=ExpertCapacity(factor=0.75))),
}
VARIANTS = {
    name: DENSE[name]
    for name in (
        "gpt2",
        "llama",
        "llama one group, dropout",
        "head norms, a window in one layer, stretched waves",
        "soft caps, scaled embeddings, windows that turn otherwise",
        "sinks, one group, soft caps",
        "latents",
        "latents, queries of none, large values, dropout, a window",
        "no positions, 4 groups, padded rows",
    )
} | EXPERTS
LAYOUTS: dict[str, dict[str, Any]] = {
    "one device": {},
    "tp 2": {"tp": 2},
    "tp 4, sp": {"tp": 4, "sequence_parallel": True},
    "cp 2": {"cp": 2},
    "cp 4, all-gather": {"cp": 4, "cp_exchange": "all_gather"},
    "cp 2, all-to-all": {"cp": 2, "cp_ulysses": 2},
    "cp 2, tp 2, sp": {"cp": 2, "tp": 2, "sequence_parallel": True},
}
OF_EXPERTS: dict[str, dict[str, Any]] = {
    "tp 2, sp, ep 2": {"tp": 2, "sequence_parallel": True, "ep": 2},
    "cp 2, ep 2": {"cp": 2, "ep": 2},
    "cp 2, etp 2": {"cp": 2, "etp": 2},
}


def sizes_of(options: dict[str, Any]) -> Sizes:
    return Sizes(world=options.get("tp", 1) * options.get("cp", 1) * options.get("pp", 1), **options)


def prompts() -> Tensor:
    """Rows of LENGTHS tokens, followed by others that nobody shall see."""
    return torch.randint(131, (len(LENGTHS), max(LENGTHS)), generator=torch.Generator().manual_seed(11))


def written(model: GPTModel, config: GenerationConfig) -> tuple[list[list[int]], list[Tensor]]:
    """The rows, and the logits of each call."""
    next_logits, logits = GPTNextLogits(model.eval(), len(LENGTHS)), []

    def watched(text: Tensor, lengths: Tensor) -> Tensor:
        logits.append(next_logits(text, lengths))
        return logits[-1]

    mesh = model.mesh
    with torch.no_grad():
        rows = generate_rows(
            watched,
            prompts(),
            torch.tensor(LENGTHS),
            config,
            samples_B=torch.arange(len(LENGTHS)),
            sharing=(mesh.tp, mesh.cp),
        )
    return [row.tolist() for row in rows], logits


@functools.cache
def wanted(name: str) -> tuple[list[list[int]], list[Tensor]]:
    """Greedy texts, each token from a call on one full row, and the logits of these calls."""
    config = VARIANTS[name]
    plain = model_of(config).eval()
    if config.moe is None:
        quiet = replace(config, hidden_dropout=0.0, attention_dropout=0.0)
        of_row = reference_of(quiet, unsplit_weights(plain))[0].logits
    else:
        of_row = plain
    texts = [row[:length].tolist() for row, length in zip(prompts(), LENGTHS, strict=True)]
    steps = []
    with torch.no_grad():
        for _ in range(NEW):
            logits = torch.cat([of_row(torch.tensor([text]))[:, -1] for text in texts])
            for text, token in zip(texts, logits.argmax(dim=-1).tolist(), strict=True):
                text.append(token)
            steps.append(logits)
    return texts, steps


def require_equal(found: tuple[list[list[int]], list[Tensor]], name: str) -> None:
    texts, steps = wanted(name)
    assert len(found[1]) == len(steps)
    for one, other in zip(found[1], steps, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=TOLERANCE)
    assert found[0] == texts


@pytest.mark.parametrize("name", VARIANTS)
def test_rows_go_on_in_their_own_ways(name: str) -> None:
    texts, steps = wanted(name)
    # A token that was left out, or one of padding that was seen, would show.
    assert len({tuple(text[-NEW:]) for text in texts}) == len(texts)
    best = torch.stack(steps).topk(2, dim=-1).values
    assert (best[..., 0] - best[..., 1]).min() > 1000 * TOLERANCE


@pytest.mark.matrix
@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_and_texts_are_those_of_full_prefixes(layout: str, name: str) -> None:
    sizes = sizes_of(LAYOUTS[layout])
    for found in run_on_threads(sizes.world, on_mesh, sizes, VARIANTS[name], GREEDY):
        require_equal(found, name)


@pytest.mark.parametrize("name", EXPERTS)
@pytest.mark.parametrize("layout", OF_EXPERTS)
def test_texts_of_experts_are_those_of_full_prefixes(layout: str, name: str) -> None:
    sizes = sizes_of(OF_EXPERTS[layout])
    for found in run_on_threads(sizes.world, on_mesh, sizes, VARIANTS[name], GREEDY):
        require_equal(found, name)


def on_mesh(world: Any, sizes: Sizes, config: GPTConfig, generation: GenerationConfig) -> Any:
    return written(model_of(config, Mesh.build(sizes, world.rank(), new_group)), generation)


# --- stages -----------------------------------------------------------------------------------------------------------


def on_stages(sizes: Sizes, num_microbatches: int, name: str, config: GenerationConfig) -> Any:
    model = model_of(VARIANTS[name], make_mesh(sizes))
    mailbox = make_mailbox(model.mesh)
    model.driver = CollectiveCall(
        model.mesh.pp, mailbox, torch.device("cpu"), lambda rows: max(1, min(rows, num_microbatches))
    )
    return written(model, config)


@pytest.mark.parametrize("name", ["gpt2", "experts"])
@pytest.mark.parametrize(
    ("options", "num_microbatches"), [({"pp": 2}, 2), ({"pp": 2, "cp": 2}, 3), ({"pp": 2, "tp": 2}, 1)]
)
def test_on_stages_and_in_microbatches_the_texts_are_the_same(
    options: dict[str, Any], num_microbatches: int, name: str
) -> None:
    if VARIANTS[name].moe is not None and options.get("tp"):
        options = {**options, "sequence_parallel": True}
    sizes = sizes_of(options)
    for found in run_on_ranks(sizes.world, on_stages, sizes, num_microbatches, name, GREEDY):
        require_equal(found, name)


# --- draws ------------------------------------------------------------------------------------------------------------

DRAWN = GenerationConfig(max_new_tokens=NEW, temperature=3.0, top_k=50, top_p=0.95, seed=5)


@pytest.mark.parametrize("layout", ["tp 4, sp", "cp 2, tp 2, sp"])
def test_what_is_drawn_is_the_same_on_every_layout(layout: str) -> None:
    [[texts, _]] = run_on_threads(1, on_mesh, Sizes(), LLAMA, DRAWN)
    assert texts != wanted("llama")[0]
    sizes = sizes_of(LAYOUTS[layout])
    for found, _ in run_on_threads(sizes.world, on_mesh, sizes, LLAMA, DRAWN):
        assert found == texts


@pytest.mark.parametrize(
    ("options", "num_microbatches"),
    [({"pp": 2}, 3), ({"pp": 2, "tp": 2, "sequence_parallel": True}, 2), ({"pp": 2, "cp": 2}, 1)],
    ids=["pp2", "pp2 tp2 sp", "pp2 cp2"],
)
def test_what_is_drawn_is_the_same_on_stages(options: dict[str, Any], num_microbatches: int) -> None:
    [[texts, _]] = run_on_threads(1, on_mesh, Sizes(), LLAMA, DRAWN)
    sizes = sizes_of(options)
    for found, _ in run_on_ranks(sizes.world, on_stages, sizes, num_microbatches, "llama", DRAWN):
        assert found == texts


def test_a_sample_draws_the_same_in_any_batch() -> None:
    model, tokens = model_of(LLAMA).eval(), prompts()
    together = generate(model, tokens, DRAWN, lengths=torch.tensor(LENGTHS))
    for row, length in enumerate(LENGTHS):
        prompt, sample = tokens[row : row + 1, :length], torch.tensor([row])
        [alone] = generate(model, prompt, DRAWN, samples=sample)
        assert alone.tolist() == together[row].tolist()
        [other] = generate(model, prompt, DRAWN, samples=sample + 1)
        assert other.tolist() != alone.tolist()
    [seeded] = generate(model, tokens[:1], replace(DRAWN, seed=6))
    assert seeded.tolist() != together[0].tolist()


def test_ranks_whose_logits_differ_in_the_last_bits_write_the_same() -> None:
    def on_rank(world: Any) -> list[int]:
        mesh = Mesh.build(Sizes(world=2, cp=2), world.rank(), new_group)

        def next_logits(text: Tensor, lengths: Tensor) -> Tensor:
            logits = torch.zeros(1, 4, dtype=torch.float64)
            logits[0, 1 + mesh.cp.rank] = 1e-15  # a tie, but for the last bits
            return logits

        [row] = generate_rows(
            next_logits,
            torch.zeros(1, 1, dtype=torch.int64),
            torch.tensor([1]),
            GREEDY,
            samples_B=torch.arange(1),
            sharing=(mesh.tp, mesh.cp),
        )
        return row.tolist()

    assert run_on_threads(2, on_rank) == [[0] + [1] * NEW] * 2


# --- ends -------------------------------------------------------------------------------------------------------------


def test_a_row_ends_with_its_first_stop_token_and_others_go_on() -> None:
    texts, _ = wanted("llama")
    others = [token for text, length in zip(texts[1:], LENGTHS[1:], strict=True) for token in text[length:]]
    stop = next(token for token in texts[0][LENGTHS[0] + 1 :] if token not in others)
    config = replace(GREEDY, stop_tokens=(stop, 131))
    rows = generate(model_of(LLAMA).eval(), prompts(), config, lengths=torch.tensor(LENGTHS))
    for row, text, length in zip(rows, texts, LENGTHS, strict=True):
        new = text[length:]
        ends = [i for i, token in enumerate(new) if token in config.stop_tokens]
        assert row.tolist() == text[:length] + new[: ends[0] + 1 if ends else NEW]
    assert len(rows[0]) < len(texts[0]) and any(len(row) == len(text) for row, text in zip(rows, texts, strict=True))


def test_no_call_is_made_once_all_rows_are_over() -> None:
    calls = []

    def next_logits(text: Tensor, lengths: Tensor) -> Tensor:
        calls.append(lengths.tolist())
        logits = torch.zeros(2, 8)
        logits[torch.arange(2), torch.tensor([3, len(calls)])] = 1.0
        return logits

    rows = generate_rows(
        next_logits,
        torch.zeros(2, 2, dtype=torch.int64),
        torch.tensor([2, 1]),
        replace(GREEDY, stop_tokens=(3,)),
        samples_B=torch.arange(2),
        sharing=(),
    )
    assert [row.tolist() for row in rows] == [[0, 0, 3], [0, 1, 2, 3]]
    assert calls == [[2, 1], [3, 2], [3, 3]]


def test_ranks_that_share_experts_end_together() -> None:
    def on_rank(world: Any) -> int:
        mesh, calls = Mesh.build(Sizes(world=2, ep=2), world.rank(), new_group), []

        def next_logits(text: Tensor, lengths: Tensor) -> Tensor:
            calls.append(1)
            logits = torch.zeros(1, 4)
            logits[0, 3 if len(calls) > 3 * mesh.dp.rank else 1] = 1.0
            return logits

        generate_rows(
            next_logits,
            torch.zeros(1, 1, dtype=torch.int64),
            torch.tensor([1]),
            replace(GREEDY, stop_tokens=(3,)),
            samples_B=torch.arange(1),
            sharing=(),
            together=(mesh.axis("ep"), mesh.axis("etp")),
        )
        return len(calls)

    assert run_on_threads(2, on_rank) == [4, 4]


def test_data_parallel_ranks_that_share_experts_generate_rows_of_their_own() -> None:
    """One data-parallel rank's text is over long before the other's."""
    texts, _ = wanted("experts")
    stop = texts[0][LENGTHS[0]]
    config = replace(GREEDY, stop_tokens=(stop,))
    assert stop not in texts[1]

    def on_rank(world: Any) -> list[int]:
        mesh = Mesh.build(Sizes(world=2, ep=2), world.rank(), new_group)
        row = mesh.dp.rank
        [found] = generate(model_of(VARIANTS["experts"], mesh).eval(), prompts()[row : row + 1, : LENGTHS[row]], config)
        return found.tolist()

    assert run_on_threads(2, on_rank) == [texts[0][: LENGTHS[0] + 1], texts[1]]


# --- what a call costs ------------------------------------------------------------------------------------------------


def shapes_of_calls(model: GPTModel, num_new: int = NEW) -> list[tuple[int, ...]]:
    shapes: list[tuple[int, ...]] = []
    hook = model.register_forward_pre_hook(lambda _, args: shapes.append(tuple(args[0].shape)))
    generate(model, prompts(), replace(GREEDY, max_new_tokens=num_new), lengths=torch.tensor(LENGTHS))
    hook.remove()
    return shapes


def test_after_the_prompts_each_call_has_the_new_tokens_alone() -> None:
    assert shapes_of_calls(model_of(LLAMA).eval()) == [(3, 7)] + [(3, 1)] * (NEW - 1)


def test_experts_that_look_at_whole_sequences_get_them() -> None:
    model = model_of(VARIANTS["experts with a capacity"]).eval()
    assert shapes_of_calls(model, 3) == [(3, 7), (3, 8), (3, 9)]


def test_ranks_of_cp_cache_equal_parts_of_what_is_generated() -> None:
    def on_rank(world: Any) -> int:
        model = model_of(LLAMA, Mesh.build(Sizes(world=2, cp=2), world.rank(), new_group)).eval()
        next_logits: Any = GPTNextLogits(model, 3)
        generate_rows(
            next_logits,
            prompts(),
            torch.tensor(LENGTHS),
            replace(GREEDY, max_new_tokens=7),
            samples_B=torch.arange(3),
            sharing=(),
        )
        return int(next_logits._cache.num_columns)

    # Of 7 tokens of the prompts 4 and 3, filled up, and of the 6 after them 3 each.
    assert run_on_threads(2, on_rank) == [7, 7]


# Learned positions are 16: one prompt has as many tokens, one has one less, and one has more.
LONG = (15, 16, 20, 1)


def written_long(model: GPTModel, lengths: tuple[int, ...]) -> list[list[int]]:
    tokens = torch.randint(131, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(12))
    config = replace(GREEDY, max_new_tokens=5)
    return [row.tolist() for row in generate(model.eval(), tokens, config, lengths=torch.tensor(lengths))]


def long_on_stages(sizes: Sizes, lengths: tuple[int, ...]) -> list[list[int]]:
    model = model_of(VARIANTS["gpt2"], make_mesh(sizes))
    model.driver = CollectiveCall(model.mesh.pp, make_mailbox(model.mesh), torch.device("cpu"), lambda rows: 1)
    return written_long(model, lengths)


@pytest.mark.parametrize("lengths", [LONG, LONG[:2], LONG[1:2], LONG[3:]], ids=str)
def test_a_text_longer_than_learned_positions_goes_on_from_its_last_tokens(lengths: tuple[int, ...]) -> None:
    model = model_of(VARIANTS["gpt2"])
    rows = written_long(model, lengths)
    for row, length in zip(rows, lengths, strict=True):
        for end in range(length, length + 5):
            seen = torch.tensor([row[max(0, end - 16) : end]])
            assert row[end] == model(seen)[0, -1].argmax()
    assert [len(row) for row in rows] == [length + 5 for length in lengths]


@pytest.mark.parametrize("layout", ["tp 4, sp", "cp 2", "cp 4, all-gather"])
def test_texts_longer_than_learned_positions_are_the_same_on_every_layout(layout: str) -> None:
    expected, sizes = written_long(model_of(VARIANTS["gpt2"]), LONG), sizes_of(LAYOUTS[layout])

    def on_rank(world: Any) -> list[list[int]]:
        return written_long(model_of(VARIANTS["gpt2"], Mesh.build(sizes, world.rank(), new_group)), LONG)

    assert run_on_threads(sizes.world, on_rank) == [expected] * sizes.world


def test_texts_longer_than_learned_positions_are_the_same_on_stages() -> None:
    expected = written_long(model_of(VARIANTS["gpt2"]), LONG)
    assert run_on_ranks(2, long_on_stages, Sizes(world=2, pp=2), LONG) == [expected] * 2


def test_no_new_token_is_no_call_and_the_prompts_come_back() -> None:
    rows = generate(model_of(LLAMA).eval(), prompts(), replace(GREEDY, max_new_tokens=0), lengths=torch.tensor(LENGTHS))
    assert [row.tolist() for row in rows] == [
        row[:length].tolist() for row, length in zip(prompts(), LENGTHS, strict=True)
    ]
    assert shapes_of_calls(model_of(LLAMA).eval(), 0) == []


def test_a_stop_token_in_a_prompt_ends_nothing() -> None:
    texts, _ = wanted("llama")
    stop = int(prompts()[0, 2])
    assert all(stop not in text[length:] for text, length in zip(texts, LENGTHS, strict=True))
    config = replace(GREEDY, stop_tokens=(stop,))
    rows = generate(model_of(LLAMA).eval(), prompts(), config, lengths=torch.tensor(LENGTHS))
    assert [row.tolist() for row in rows] == texts


# --- what is refused --------------------------------------------------------------------------------------------------


def test_generation_builds_no_graph_and_takes_no_model_that_drops() -> None:
    model = model_of(LLAMA)
    with pytest.raises(RuntimeError, match="training mode"):
        generate(model, prompts(), GREEDY)
    seen = []
    model.eval().register_forward_hook(lambda _, args, output: seen.append(output.requires_grad))
    generate(model, prompts(), replace(GREEDY, max_new_tokens=2))
    assert seen == [False, False]


@pytest.mark.parametrize(
    ("lengths", "message"),
    [([7, 0, 4], "row 1 has 0 tokens; it must have 1 to 7"), ([7, 8, 4], "row 1"), ([7], r"\[3\]")],
)
def test_lengths_that_tokens_do_not_have_are_refused(lengths: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generate(model_of(LLAMA).eval(), prompts(), GREEDY, lengths=torch.tensor(lengths))
