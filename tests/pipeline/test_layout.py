"""Stage layouts: what they mean, as text and back, and errors of one that cannot be."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_megatron.mesh import StageLayout
from lightning_megatron.pipeline.layout import LONGEST, STAGES, assign, layout_faults, layout_text, parse
from lightning_megatron.pipeline.partition import partition

PLAIN = StageLayout()


def gpt(num_layers: int) -> list[str]:
    return ["E", *["t"] * num_layers, "", "L"]


def text_of(symbols: Sequence[str], stages: int, layout: StageLayout = PLAIN) -> str:
    """The layout that comes out, written back."""
    return layout_text(symbols, assign(symbols, [1.0] * len(symbols), stages, layout))


def with_silent_parts(draw: st.DrawFn, order: str) -> list[str]:
    """The parts of a model of these symbols, with parts of no symbol anywhere."""
    silent = [draw(st.sampled_from([0, 0, 1, 2])) for _ in range(len(order) + 1)]
    parts = [""] * silent[0]
    for symbol, num in zip(order, silent[1:], strict=True):
        parts += [symbol, *[""] * num]
    return parts


@st.composite
def models(draw: st.DrawFn) -> list[str]:
    order = "E" * draw(st.booleans()) + "t" * draw(st.integers(1, 14)) + "L" * draw(st.booleans())
    return with_silent_parts(draw, order)


@st.composite
def texts(draw: st.DrawFn) -> tuple[list[str], list[str]]:
    """A model, and the symbols of each of its stages: runs of like stages, in between some empty."""
    runs = draw(st.lists(st.tuples(st.integers(0, 12), st.integers(1, 12)), max_size=3))
    first = draw(st.sampled_from(["E", "t", "Et", "Ettt"]))
    last = draw(st.sampled_from(["L", "t", "tL", "tttL"]))
    written = [first, *("t" * num for num, times in runs for _ in range(times)), last]
    return with_silent_parts(draw, "".join(written)), written


# What a layout means


@given(symbols=models(), stages=st.integers(1, 14))
def test_with_nothing_set_layers_spread_as_parts_of_cost_1_between_free_ends(symbols: list[str], stages: int) -> None:
    stages = min(stages, symbols.count("t"))
    costs = [float(symbol == "t") for symbol in symbols]
    assert assign(symbols, [7.0] * len(symbols), stages, PLAIN) == partition(costs, stages)


@given(model=texts())
def test_stages_are_contiguous_cover_all_parts_and_have_the_symbols_of_the_text(
    model: tuple[list[str], list[str]],
) -> None:
    symbols, written = model
    ranges = assign(symbols, [1.0] * len(symbols), len(written), StageLayout(text="|".join(written)))
    assert [part for parts in ranges for part in parts] == list(range(len(symbols)))
    assert all(first.stop == second.start for first, second in pairwise(ranges))
    assert ["".join(symbols[part] for part in parts) for parts in ranges] == written
    assert all(len(parts) == 0 for parts, stage in zip(ranges, written, strict=True) if not stage)
    # A part of no symbol begins a stage only where no symbol is before it.
    assert all(symbols[parts[0]] or parts[0] == 0 for parts in ranges if parts)


@given(model=texts())
def test_a_layout_written_back_is_the_same_layout(model: tuple[list[str], list[str]]) -> None:
    symbols, written = model
    costs = [1.0] * len(symbols)
    ranges = assign(symbols, costs, len(written), StageLayout(text="|".join(written)))
    text = layout_text(symbols, ranges)
    assert parse(text) == tuple(written)
    assert assign(symbols, costs, len(written), StageLayout(text=text)) == ranges
    assert len(text) <= len("|".join(written))


@given(
    symbols=models(),
    stages=st.integers(1, 6),
    costs=st.lists(st.sampled_from([0.25, 0.5, 1.0, 3.0, 8.0]), min_size=100, max_size=100),
)
def test_balance_by_cost_makes_the_slowest_stage_as_fast_as_any_split_does(
    symbols: list[str], stages: int, costs: list[float]
) -> None:
    stages, costs = min(stages, symbols.count("t")), costs[: len(symbols)]
    ranges = assign(symbols, costs, stages, StageLayout(balance="cost"))
    assert [part for parts in ranges for part in parts] == list(range(len(symbols)))
    starts = [place for place, symbol in enumerate(symbols) if symbol][1:]
    splits = ([0, *cuts, len(symbols)] for cuts in combinations(starts, stages - 1))
    best = min(max(sum(costs[a:b]) for a, b in pairwise(cuts)) for cuts in splits)
    assert max(sum(costs[part] for part in parts) for parts in ranges) == best


def test_costs_move_layers_away_from_a_costly_head_and_counts_of_layers_do_not() -> None:
    costs = [0.0, *[1.0] * 8, 0.0, 2.0]
    by_cost = assign(gpt(8), costs, 5, StageLayout(balance="cost"))
    assert layout_text(gpt(8), by_cost) == "Ett|(tt|)*3L"
    assert layout_text(gpt(8), assign(gpt(8), costs, 5, PLAIN)) == "Et|t|tt|tt|ttL"


@pytest.mark.parametrize(
    ("num_layers", "stages", "layout", "expected"),
    [
        (6, 4, PLAIN, "Et|t|tt|ttL"),
        (6, 4, StageLayout(counts_embedding=True, counts_head=True), "Et|tt|tt|tL"),
        (7, 4, StageLayout(counts_embedding=True), "Et|tt|tt|ttL"),
        (7, 4, StageLayout(counts_head=True), "Ett|tt|tt|tL"),
        (3, 5, StageLayout(counts_embedding=True, counts_head=True), "E|t|t|t|L"),
        (126, 64, StageLayout(counts_embedding=True, counts_head=True), "Et|(tt|)*62tL"),
        (8, 4, StageLayout(num_layers_in_first_stage=1), "Et|tt|tt|t*3L"),
        (8, 4, StageLayout(num_layers_in_last_stage=3), "Et|tt|tt|t*3L"),
        (8, 4, StageLayout(num_layers_in_first_stage=1, num_layers_in_last_stage=2), "Et|tt|t*3|ttL"),
        (8, 4, StageLayout(num_layers_in_first_stage=3, counts_head=True), "Et*3|tt|tt|tL"),
        (8, 2, StageLayout(num_layers_in_first_stage=3, num_layers_in_last_stage=5), "Et*3|t*5L"),
        (8, 1, StageLayout(num_layers_in_first_stage=8, num_layers_in_last_stage=8), "Et*8L"),
        (8, 3, StageLayout(balance="cost", num_layers_in_last_stage=1), "Et*3|t*4|tL"),
    ],
)
def test_a_setting_gives_the_layout_it_is_for(num_layers: int, stages: int, layout: StageLayout, expected: str) -> None:
    assert text_of(gpt(num_layers), stages, layout) == expected


def test_a_chain_has_layers_alone() -> None:
    assert text_of(["t"] * 5, 3) == "t|tt|tt"
    assert text_of(["t"] * 5, 4, StageLayout(text="tt||t|tt")) == "tt||t|tt"


def test_the_final_norm_stays_with_the_last_layer_where_the_head_is_alone() -> None:
    assert assign(gpt(2), [1.0] * 5, 3, StageLayout(text="Et|t|L")) == (range(2), range(2, 4), range(4, 5))


def test_an_empty_stage_is_an_empty_range_at_its_index() -> None:
    ranges = assign(gpt(2), [1.0] * 5, 5, StageLayout(text="Et||t||L"))
    assert ranges == (range(2), range(2, 2), range(2, 4), range(4, 4), range(4, 5))


# The writing


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Et*3|t*4|t*4|tL", ("Ettt", "tttt", "tttt", "tL")),
        ("Ett|(tt|)*3,|L", ("Ett", "tt", "tt", "tt", "", "L")),
        ("E t , t | t * 2 L", ("Ett", "ttL")),
        ("E|*2(t*2|)*2L", ("E", "", "tt", "tt", "L")),
        ("E((t|)*2t|)*2L", ("Et", "t", "t", "t", "t", "t", "L")),
        ("(Et)|(tt|t)*2L", ("Et", "tt", "ttt", "tL")),
        ("Et*0|tL", ("E", "tL")),
        ("", ("",)),
    ],
)
def test_a_text_is_read(text: str, expected: tuple[str, ...]) -> None:
    assert parse(text) == expected


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("Et|(t|tL", r"opens '\(' at character 4 and never closes it"),
        ("Et|t)*2|tL", r"closes '\)' at character 5, but no '\(' is open"),
        ("Et|m|tL", r"has 'm' at character 4; it may have E \(embedding\), t \(layer\), L \(head\), \| "),
        ("Et*|tL", r"has '\*' at character 3, which must stand between what it repeats and a number, as in 't\*3'"),
        ("*2t|L", r"has '\*' at character 1, which must stand between"),
        ("t*1 2", r"has '2' at character 5"),
        (f"t*{LONGEST + 1}", rf"repeats at character 2 to more than {LONGEST} symbols; repeat less often"),
        ("((t*50000)*2)*99999999999999999999", r"repeats at character 14 to more than"),
    ],
)
def test_a_text_that_cannot_be_read_is_refused_with_the_position(text: str, fault: str) -> None:
    with pytest.raises(ValueError, match=rf"^the layout text {re.escape(repr(text))} {fault}"):
        parse(text)
    assert re.search(fault, layout_faults(4, True, True, 2, StageLayout(text=text))[0])


def test_a_text_of_the_greatest_length_is_read() -> None:
    assert parse(f"t*{LONGEST}") == ("t" * LONGEST,)


def test_all_faults_of_the_writing_are_reported_at_once() -> None:
    faults = layout_faults(4, True, True, 2, StageLayout(text="Em)*|("))
    assert [re.search(r"at character (\d)", fault)[1] for fault in faults] == ["2", "3", "4", "6"]  # type: ignore[index]


# What cannot be


@pytest.mark.parametrize(
    ("num_layers", "stages", "layout", "faults"),
    [
        (3, 0, PLAIN, [f"{STAGES} (0) must be at least 1"]),
        (
            3,
            4,
            PLAIN,
            [
                f"layers (3) must be at least {STAGES} (4); the product may be 1 to 3, or write out every stage in a "
                "layout text, as in 'E|t|t|tL'"
            ],
        ),
        (
            1,
            6,
            StageLayout(counts_head=True),
            [
                f"layers (1) and the ends that count as one (1) must be at least {STAGES} (6); the product may be "
                "1 to 2, or write out every stage in a layout text, as in 'E|t||||L'"
            ],
        ),
        (
            0,
            2,
            PLAIN,
            [
                f"layers (0) must be at least {STAGES} (2); give the model layers, or write out every stage in a "
                "layout text, as in 'E|L'"
            ],
        ),
        (8, 4, StageLayout(balance="even"), ["balance ('even') must be 'layers' or 'cost'"]),  # type: ignore[arg-type]
        (
            8,
            4,
            StageLayout(num_layers_in_first_stage=-1, num_layers_in_last_stage=-2),
            [
                "num_layers_in_first_stage (-1) must be at least 0; 0 is as many as the rest",
                "num_layers_in_last_stage (-2) must be at least 0; 0 is as many as the rest",
            ],
        ),
        (
            8,
            4,
            StageLayout(balance="cost", counts_embedding=True, counts_head=True),
            [
                "counts_embedding (True) says nothing where balance is 'cost'; leave it out, or balance 'layers'",
                "counts_head (True) says nothing where balance is 'cost'; leave it out, or balance 'layers'",
            ],
        ),
        (
            8,
            4,
            StageLayout(
                counts_embedding=True, counts_head=True, num_layers_in_first_stage=1, num_layers_in_last_stage=2
            ),
            [
                "counts_embedding (True) says nothing where num_layers_in_first_stage (1) is set; "
                "leave out one of them",
                "counts_head (True) says nothing where num_layers_in_last_stage (2) is set; leave out one of them",
            ],
        ),
        (
            8,
            4,
            StageLayout(num_layers_in_first_stage=5, num_layers_in_last_stage=2),
            [
                "num_layers_in_first_stage (5) + num_layers_in_last_stage (2) must leave at least one of the layers "
                "(8) for each other stage (2); at most 6 would do"
            ],
        ),
        (
            8,
            4,
            StageLayout(num_layers_in_last_stage=8),
            [
                "num_layers_in_last_stage (8) must leave at least one of the layers (8) for each other stage (3); "
                "at most 5 would do"
            ],
        ),
        (
            6,
            2,
            StageLayout(num_layers_in_first_stage=2, num_layers_in_last_stage=2),
            [
                "num_layers_in_first_stage (2) + num_layers_in_last_stage (2) must be the layers (6) where "
                f"{STAGES} is 2; 2 + 4 would do"
            ],
        ),
        (
            6,
            2,
            StageLayout(num_layers_in_first_stage=7, num_layers_in_last_stage=2),
            [
                "num_layers_in_first_stage (7) + num_layers_in_last_stage (2) must be the layers (6) where "
                f"{STAGES} is 2; 4 + 2 would do"
            ],
        ),
        (
            6,
            1,
            StageLayout(num_layers_in_first_stage=6, num_layers_in_last_stage=2),
            [f"num_layers_in_last_stage (2) must be the layers (6) where {STAGES} is 1; leave it out"],
        ),
        (
            6,
            4,
            StageLayout(text="Ett|tt|ttL"),
            [
                f"the layout text 'Ett|tt|ttL' has 3 stages, but {STAGES} is 4; write 4, as in 'Et|t|tt|ttL', or make "
                "the product 3"
            ],
        ),
        (
            6,
            2,
            StageLayout(text="ttE|ttEt"),
            [
                "the layout text 'ttE|ttEt' names 2 embeddings E, but the model has 1; name 1, as in 'Et*3|t*3L'",
                "the layout text 'ttE|ttEt' names 5 layers t, but the model has 6; name 6, as in 'Et*3|t*3L'",
                "the layout text 'ttE|ttEt' names 0 heads L, but the model has 1; name 1, as in 'Et*3|t*3L'",
            ],
        ),
        (
            2,
            3,
            StageLayout(text="tE|tL"),
            [
                f"the layout text 'tE|tL' has 2 stages, but {STAGES} is 3; write 3, as in 'E|t|tL', or make the "
                "product 2",
                "the layout text 'tE|tL' must name E first, then every t, then L, as in 'E|t|tL'",
            ],
        ),
        (
            6,
            4,
            StageLayout(text="|Et*5|tL|"),
            [
                "the first stage of the layout text '|Et*5|tL|' must not be empty, because it reads the batch, "
                "as in 'Et|t|tt|ttL'",
                "the last stage of the layout text '|Et*5|tL|' must not be empty, because it gives the output, "
                "as in 'Et|t|tt|ttL'",
            ],
        ),
        (
            2,
            2,
            StageLayout(text="Et|tL", balance="cost", num_layers_in_last_stage=1, counts_embedding=True),
            [
                "the layout text 'Et|tL' excludes balance (cost), num_layers_in_last_stage (1), counts_embedding "
                "(True), because it says all; leave out the text or the others"
            ],
        ),
    ],
)
def test_a_layout_that_cannot_be_is_refused_with_all_that_is_wrong_and_what_would_do(
    num_layers: int, stages: int, layout: StageLayout, faults: list[str]
) -> None:
    assert layout_faults(num_layers, True, True, stages, layout) == faults
    symbols = gpt(num_layers)
    with pytest.raises(ValueError) as refused:
        assign(symbols, [1.0] * len(symbols), stages, layout)
    assert str(refused.value) == "\n".join(faults)


def test_a_chain_has_no_ends_to_count_and_none_to_name() -> None:
    counting = StageLayout(counts_embedding=True, counts_head=True)
    assert layout_faults(4, False, False, 2, counting) == [
        "counts_embedding (True) needs a model with a part E, which this one has not; leave it out",
        "counts_head (True) needs a model with a part L, which this one has not; leave it out",
    ]
    assert layout_faults(3, False, False, 2, StageLayout(text="Et|tt")) == [
        "the layout text 'Et|tt' names 1 embedding E, but the model has 0; name 0, as in 't|tt'"
    ]


def test_a_model_too_short_for_two_stages_gets_no_example() -> None:
    assert layout_faults(1, False, False, 2, PLAIN) == [
        f"layers (1) must be at least {STAGES} (2); the product may be 1"
    ]
    assert layout_faults(0, False, False, 1, PLAIN) == ["layers (0) must be at least 1; give the model a part"]


@given(num_layers=st.integers(0, 9), ends=st.tuples(st.booleans(), st.booleans()), stages=st.integers(1, 12))
def test_the_layout_text_that_a_fault_names_would_do(num_layers: int, ends: tuple[bool, bool], stages: int) -> None:
    for layout in (PLAIN, StageLayout(text="|t*20|")):
        for fault in layout_faults(num_layers, *ends, stages, layout):
            for example in re.findall(r"as in '([^']*)'", fault):
                assert layout_faults(num_layers, *ends, stages, StageLayout(text=example)) == []


@given(
    num_layers=st.integers(0, 9),
    ends=st.tuples(st.booleans(), st.booleans()),
    stages=st.integers(1, 9),
    layout=st.builds(
        StageLayout,
        balance=st.sampled_from(["layers", "cost"]),
        num_layers_in_first_stage=st.integers(0, 5),
        num_layers_in_last_stage=st.integers(0, 5),
        counts_embedding=st.booleans(),
        counts_head=st.booleans(),
    ),
)
def test_a_layout_without_faults_gives_every_stage_its_own(
    num_layers: int, ends: tuple[bool, bool], stages: int, layout: StageLayout
) -> None:
    if layout_faults(num_layers, *ends, stages, layout):
        return
    symbols = [*["E"] * ends[0], *["t"] * num_layers, "", *["L"] * ends[1]]
    ranges = assign(symbols, [1.0] * len(symbols), stages, layout)
    layers = [sum(symbols[part] == "t" for part in parts) for parts in ranges]
    assert [part for parts in ranges for part in parts] == list(range(len(symbols)))
    assert all("".join(symbols[part] for part in parts) for parts in ranges)
    assert layout.num_layers_in_first_stage in (0, layers[0])
    assert layout.num_layers_in_last_stage in (0, layers[-1])


@pytest.mark.parametrize("symbols", [["t", "E"], ["E", "E", "t"], ["L", "t"], ["t", "x"], ["", ""], []])
def test_symbols_that_are_no_model_are_refused(symbols: list[str]) -> None:
    with pytest.raises(ValueError, match=r"the symbols of a model's parts \(.*\) must be E at most once, then t"):
        assign(symbols, [1.0] * len(symbols), 1, PLAIN)


def test_a_cost_that_is_none_is_refused_by_its_index_in_the_model() -> None:
    with pytest.raises(ValueError, match=r"the cost of part 3 \(-1.0\)"):
        assign(gpt(2), [1.0, 1.0, 1.0, -1.0, 5.0], 2, StageLayout(balance="cost", num_layers_in_first_stage=1))
