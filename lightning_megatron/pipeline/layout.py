"""Stage layouts: which contiguous parts of a model each stage has, as a user set it.

Before a step: every part of a model has a symbol, and a layout is a count of symbols for each stage.

    E    the embedding, at most one, first          |          ends a stage
    t    a layer                                    t*3        repeats what is before it: a symbol, a | or a group
    L    the head, at most one, last                (tt|)*29   a group
    ""   a part that goes with the symbol before it, wherever that goes: the final norm sits with the last layer, not
         with a head in a stage of its own. Before the first symbol it goes with that one.

A text names every stage, in the order of the model; commas and spaces do not count. Stages between the first, which
reads the batch, and the last, which gives the output, may be empty, as in "Ett||tL". Without a text every stage has a
layer, or an end that counts as one. It reads as Megatron-LM's --pipeline-model-parallel-layout, without the symbol m.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import fields
from itertools import accumulate, groupby, pairwise
from math import fsum

from lightning_megatron.mesh import StageLayout
from lightning_megatron.pipeline.partition import partition

STAGES = "pipeline_model_parallel_size x virtual_pipeline_model_parallel_size"
LONGEST = 100_000  # symbols and stages of a layout; a slip of the keys must not fill the memory

_TOKEN = re.compile(r"\*[\s,]*([0-9]*)|[^\s,]")


def assign(symbols: Sequence[str], costs: Sequence[float], stages: int, layout: StageLayout) -> tuple[range, ...]:
    """The parts of each stage: contiguous ranges that cover all parts; one is empty only where the text has it so.

    Layers, or costs, that do not divide evenly fall to late stages, as in `partition`. Raises ValueError with all
    faults of the layout.
    """
    assert len(symbols) == len(costs), "every part has a symbol and a cost"
    order = "".join(symbols)
    if not re.fullmatch("E?t*L?", order) or not order:
        raise ValueError(
            f"the symbols of a model's parts ({order!r}) must be E at most once, then t for every layer, then L at "
            "most once; give every part of a chain the symbol t"
        )
    num_layers, has_embedding, has_head = order.count("t"), "E" in order, "L" in order
    if faults := layout_faults(num_layers, has_embedding, has_head, stages, layout):
        raise ValueError("\n".join(faults))
    indices = [index for index, symbol in enumerate(symbols) if symbol]
    starts = [0, *indices[1:], len(symbols)]
    if layout.text:
        lengths = [len(stage) for stage in parse(layout.text)]
    else:
        if layout.balance == "cost":
            partition(costs, 1)  # tells of a cost that is none by its place in the model
            weights = [fsum(costs[start:end]) for start, end in pairwise(starts)]
        else:
            counted = {"E": float(layout.counts_embedding), "t": 1.0, "L": float(layout.counts_head)}
            weights = [counted[symbol] for symbol in order]
        lengths = _balanced(weights, has_embedding, has_head, stages, layout)
    return tuple(range(starts[first], starts[end]) for first, end in pairwise(accumulate(lengths, initial=0)))


def assign_alike(num_layers: int, stages: int, layout: StageLayout) -> tuple[range, ...]:
    """As `assign`, of layers that cost the same, with nothing beside them."""
    return assign(["t"] * num_layers, [1.0] * num_layers, stages, layout)


def layout_faults(num_layers: int, has_embedding: bool, has_head: bool, stages: int, layout: StageLayout) -> list[str]:
    """Every rule that a layout breaks for such a model in that many stages, one sentence each."""
    if stages < 1:
        return [f"{STAGES} ({stages}) must be at least 1"]
    order = "E" * has_embedding + "t" * num_layers + "L" * has_head
    if not order:
        return ["layers (0) must be at least 1; give the model a part"]
    if not layout.text:
        return _balance_faults(order, stages, layout)
    plain = StageLayout()
    others = [
        f"{field.name} ({getattr(layout, field.name)})"
        for field in fields(layout)
        if field.name != "text" and getattr(layout, field.name) != getattr(plain, field.name)
    ]
    faults = _text_faults(order, stages, layout.text)
    if others:
        faults.append(
            f"the layout text {layout.text!r} excludes {', '.join(others)}, because it says all; "
            "leave out the text or the others"
        )
    return faults


def parse(text: str) -> tuple[str, ...]:
    """The symbols of each stage of a layout text, as in ("Ett", "", "tL"). Raises ValueError where it is none."""
    stages, faults = _read(text)
    if faults:
        raise ValueError("\n".join(faults))
    return stages


def layout_text(symbols: Sequence[str], ranges: Sequence[range]) -> str:
    """The layout text of an assignment, short: `parse` gives back the symbols of each of its stages."""
    return _written(["".join(symbols[part] for part in parts) for parts in ranges])


def _balanced(
    weights: Sequence[float], has_embedding: bool, has_head: bool, stages: int, layout: StageLayout
) -> list[int]:
    """Number of symbols on each stage where only the first and the last may be given."""
    if stages == 1:
        return [len(weights)]
    first, last = layout.num_layers_in_first_stage, layout.num_layers_in_last_stage
    before = [first + has_embedding] if first else []
    after = [last + has_head] if last else []
    rest = weights[sum(before) : len(weights) - sum(after)]
    num_free = stages - len(before) - len(after)
    between = [len(parts) for parts in partition(rest, num_free)] if num_free else []
    return [*before, *between, *after]


def _balance_faults(order: str, stages: int, layout: StageLayout) -> list[str]:
    faults = []
    if layout.balance not in ("layers", "cost"):
        faults.append(f"balance ({layout.balance!r}) must be 'layers' or 'cost'")
    first, last = layout.num_layers_in_first_stage, layout.num_layers_in_last_stage
    for end, counts, symbol, place, number in (
        ("embedding", layout.counts_embedding, "E", "first", first),
        ("head", layout.counts_head, "L", "last", last),
    ):
        counts_name, number_name = f"counts_{end}", f"num_layers_in_{place}_stage"
        if number < 0:
            faults.append(f"{number_name} ({number}) must be at least 0; 0 is as many as the rest")
        if counts and symbol not in order:
            faults.append(
                f"{counts_name} (True) needs a model with a part {symbol}, which this one has not; leave it out"
            )
        if counts and layout.balance == "cost":
            faults.append(
                f"{counts_name} (True) says nothing where balance is 'cost'; leave it out, or balance 'layers'"
            )
        if counts and number > 0:
            faults.append(
                f"{counts_name} (True) says nothing where {number_name} ({number}) is set; leave out one of them"
            )
    return faults or _number_faults(order, stages, layout)


def _number_faults(order: str, stages: int, layout: StageLayout) -> list[str]:
    """Faults of the number of layers, in all, on the first stage and on the last."""
    num_layers, num_counted = order.count("t"), layout.counts_embedding + layout.counts_head
    num_weights = num_layers + num_counted
    if num_weights < stages:
        counted = f" and the ends that count as one ({num_counted})" if num_counted else ""
        fits = "1" if num_weights == 1 else f"1 to {num_weights}"
        ways = [f"the product may be {fits}"] if num_weights else ["give the model layers"]
        if example := _example(order, stages):
            ways.append(f"write out every stage in a layout text, as in {example!r}")
        return [f"layers ({num_layers}){counted} must be at least {STAGES} ({stages}); {', or '.join(ways)}"]
    first, last = layout.num_layers_in_first_stage, layout.num_layers_in_last_stage
    names = [
        f"{name} ({number})"
        for name, number in (("num_layers_in_first_stage", first), ("num_layers_in_last_stage", last))
        if number
    ]
    if stages == 1:
        return [
            f"{name} must be the layers ({num_layers}) where {STAGES} is 1; leave it out"
            for name, number in zip(names, filter(None, (first, last)), strict=True)
            if number != num_layers
        ]
    num_free = stages - len(names)
    largest = num_weights - num_free
    if num_free and first + last > largest:
        return [
            f"{' + '.join(names)} must leave at least one of the layers ({num_layers}) for each other stage "
            f"({num_free}); at most {largest} would do"
        ]
    if not num_free and first + last != num_layers:
        first = first if first < num_layers else max(num_layers - last, 1)
        return [
            f"{' + '.join(names)} must be the layers ({num_layers}) where {STAGES} is 2; "
            f"{first} + {num_layers - first} would do"
        ]
    return []


def _text_faults(order: str, stages: int, text: str) -> list[str]:
    found, faults = _read(text)
    if faults:
        return faults
    example = _example(order, stages)
    as_in = f", as in {example!r}" if example else ""
    if len(found) != stages:
        faults.append(
            f"the layout text {text!r} has {_num(len(found), 'stage')}, but {STAGES} is {stages}; "
            f"write {stages}{as_in}, or make the product {len(found)}"
        )
    named = "".join(found)
    for symbol, what in (("E", "embedding"), ("t", "layer"), ("L", "head")):
        if named.count(symbol) != order.count(symbol):
            faults.append(
                f"the layout text {text!r} names {_num(named.count(symbol), what)} {symbol}, but the model has "
                f"{order.count(symbol)}; name {order.count(symbol)}{as_in}"
            )
    if named != order and sorted(named) == sorted(order):
        faults.append(f"the layout text {text!r} must name E first, then every t, then L{as_in}")
    for place, stage, why in (("first", found[0], "it reads the batch"), ("last", found[-1], "it gives the output")):
        if not stage:
            faults.append(f"the {place} stage of the layout text {text!r} must not be empty, because {why}{as_in}")
    return faults


def _read(text: str) -> tuple[tuple[str, ...], list[str]]:
    """The symbols of each stage, and every fault of the writing."""
    faults: list[str] = []
    groups: list[list[str]] = [[]]  # of every open group its pieces, each of which a * may repeat
    opened: list[int] = []
    for token in _TOKEN.finditer(text):
        at, kind = f"at character {token.start() + 1}", token[0][0]
        if kind in "EtL|":
            groups[-1].append(kind)
        elif kind == "(":
            groups.append([])
            opened.append(token.start() + 1)
        elif kind == ")" and opened:
            group = "".join(groups.pop())
            groups[-1].append(group)
            opened.pop()
        elif kind == ")":
            faults.append(
                f"the layout text {text!r} closes ')' {at}, but no '(' is open; open one before it or leave it out"
            )
        elif kind != "*":
            faults.append(
                f"the layout text {text!r} has {kind!r} {at}; it may have E (embedding), t (layer), L (head), "
                "| (end of a stage), ( ) and *3 (repeat)"
            )
        elif not token[1] or not groups[-1]:
            faults.append(
                f"the layout text {text!r} has '*' {at}, which must stand between what it repeats and a number, "
                "as in 't*3' or '(tt|)*3'"
            )
        else:
            piece = groups[-1].pop()
            times = int(token[1]) if len(token[1]) < 10 else LONGEST + 1
            if len(piece) * times > LONGEST:
                faults.append(
                    f"the layout text {text!r} repeats {at} to more than {LONGEST} symbols; repeat less often"
                )
                times = 1
            groups[-1].append(piece * times)
    faults += [
        f"the layout text {text!r} opens '(' at character {start} and never closes it; close it or leave it out"
        for start in opened
    ]
    return tuple("".join(piece for group in groups for piece in group).split("|")), faults


def _example(order: str, stages: int) -> str:
    """A layout text that would do, its symbols spread evenly; none where a model is too short for two stages."""
    if stages > 1 and len(order) < 2:
        return ""
    if len(order) < stages:
        return _written([*order[:-1], *[""] * (stages - len(order)), order[-1]])
    # The ends weigh nothing where there are layers for every stage.
    end = float(order.count("t") < stages)
    ranges = partition([1.0 if symbol == "t" else end for symbol in order], stages)
    return layout_text(order, ranges)


def _written(stages: Sequence[str]) -> str:
    """The shortest of a stage written out and repeated, each by each."""
    text = ""
    for stage, same in groupby(map(_word, stages[:-1])):
        num = len(list(same))
        text += min(f"{stage}|" * num, f"({stage}|)*{num}", key=len)
    return text + _word(stages[-1])


def _word(stage: str) -> str:
    runs = [(symbol, len(list(same))) for symbol, same in groupby(stage)]
    return "".join(min(f"{symbol}*{num}", symbol * num, key=len) for symbol, num in runs)


def _num(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
