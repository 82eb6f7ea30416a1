"""Recomputation changes what is saved and nothing else: loss and every gradient are bit for bit those without it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from lightning_megatron.comm import rng
from lightning_megatron.mesh import Axis, Mesh, Sizes
from lightning_megatron.models import GPTConfig, GPTModel
from lightning_megatron.pipeline.module import PipelineModule
from lightning_megatron.tensor import weight_gradients
from lightning_megatron.tensor.weight_gradients import Task, WeightGradients
from lightning_megatron.transformer import cost, dropout, recompute
from lightning_megatron.transformer.config import TransformerConfig
from lightning_megatron.transformer.recompute import RecomputeConfig, RecomputeRunner
from tests.harness.sample import every_nth
from tests.harness.threads import new_group, run_on_threads
from tests.transformer.saved_activations import saved_bytes

GPT2 = GPTConfig(
    num_layers=3,
    hidden_size=32,
    num_attention_heads=4,
    ffn_hidden_size=48,
    vocab_size=131,
    max_sequence_length=16,
    hidden_dropout=0.1,
    attention_dropout=0.1,
    # Large, so that a wrong layer moves the loss by much.
    init_std=0.3,
)
LLAMA = replace(
    GPT2,
    num_query_groups=2,
    activation="swiglu",
    normalization="rmsnorm",
    add_bias_linear=False,
    position="rotary",
    tie_embeddings=False,
)
VARIANTS = {"gpt2": GPT2, "llama": LLAMA}
WAYS = {
    "core attention": RecomputeConfig(granularity="selective"),
    "norm": RecomputeConfig(granularity="selective", parts=("norm",)),
    "activation": RecomputeConfig(granularity="selective", parts=("activation",)),
    "mlp": RecomputeConfig(granularity="selective", parts=("mlp",)),
    "norm, mlp": RecomputeConfig(granularity="selective", parts=("norm", "mlp")),
    "three": RecomputeConfig(granularity="selective", parts=("core_attention", "norm", "activation")),
    "full": RecomputeConfig(granularity="full"),
    "full by 2": RecomputeConfig(granularity="full", num_layers=2),
    "full, first 2": RecomputeConfig(granularity="full", method="block", num_layers=2),
    "full, sharded": RecomputeConfig(granularity="full", shard_saved_inputs=True),
}
each_variant = pytest.mark.parametrize("variant", VARIANTS)
each_way = pytest.mark.parametrize("way", WAYS)
Found = tuple[Tensor, dict[str, Tensor]]


def set_up(model: GPTModel, config: RecomputeConfig) -> GPTModel:
    recompute.set_recomputed(model, config)
    model.runner = RecomputeRunner(config, tp=model.mesh.tp, sp=model.mesh.sp)
    return model


def batch_of(vocab_size: int = 131) -> tuple[Tensor, Tensor]:
    """3 rows of 7 tokens, which sequence parallelism must pad, and labels with holes."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(vocab_size, (3, 7), generator=generator)
    return tokens, torch.where(torch.rand(3, 7, generator=generator) < 0.2, -100, tokens.roll(-1, 1))


def step(model: nn.Module, *inputs: Any, **named: Any) -> Found:
    model.zero_grad()
    loss = model(*inputs, **named)
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def are_equal(ours: Found, theirs: Found) -> bool:
    return (
        torch.equal(ours[0], theirs[0])
        and ours[1].keys() == theirs[1].keys()
        and all(torch.equal(grad, theirs[1][name]) for name, grad in ours[1].items())
    )


# One device


@pytest.mark.matrix
@each_variant
@each_way
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_and_gradients_are_those_of_keeping_all(variant: str, way: str, dtype: torch.dtype) -> None:
    tokens, labels = batch_of()
    model = GPTModel(VARIANTS[variant], seed=7).to(dtype)
    wanted = step(model, tokens, labels=labels)
    another_step = step(model, tokens, labels=labels)
    assert not are_equal(another_step, wanted)  # other masks are seen
    model.draws.step = 0
    assert are_equal(step(set_up(model, WAYS[way]), tokens, labels=labels), wanted)


@each_variant
@each_way
def test_autocast_is_as_it_was_when_something_is_recomputed(variant: str, way: str) -> None:
    tokens, labels = batch_of()
    model = GPTModel(VARIANTS[variant], seed=7)
    with torch.autocast("cpu", torch.bfloat16):
        wanted = model(tokens, labels=labels)
    wanted.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    model.draws.step = 0
    set_up(model, WAYS[way])
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(tokens, labels=labels)
    # Outside of the block, where the backward of a Trainer may be too.
    loss.backward()
    assert are_equal((loss, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}), (wanted, grads))


def test_a_mask_that_is_drawn_anew_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison bites: masks that depend on when they are drawn give other gradients under recomputation."""
    tokens, labels = batch_of()
    model = GPTModel(GPT2, seed=7)
    wanted = step(model, tokens, labels=labels)
    model.draws.step = 0
    drawn = 0

    def anew(keys: Tensor, *rest: Any) -> Tensor:
        nonlocal drawn
        drawn += 1
        # As the forward of the full model draws them: 3 in each layer, 1 before.
        return keep_mask(keys + (drawn > num_forward), *rest)

    keep_mask, num_forward = rng.keep_mask, 1 + 3 * 3
    monkeypatch.setattr(dropout.rng, "keep_mask", anew)
    loss, grads = step(set_up(model, WAYS["full"]), tokens, labels=labels)
    assert drawn > num_forward and torch.equal(loss, wanted[0])
    assert (grads["layers.0.mlp.up.weight"] - wanted[1]["layers.0.mlp.up.weight"]).abs().max() > 1e-3


def test_what_is_recomputed_runs_twice_and_what_is_not_once() -> None:
    calls: dict[str, int] = {}

    def count(name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            calls[name] = calls.get(name, 0) + 1

        return hook

    def counted(config: RecomputeConfig) -> dict[str, int]:
        model = set_up(GPTModel(GPT2, seed=7), config)
        for name, module in model.named_modules():
            if name.startswith("layers.") and name.count(".") == 2:
                module.register_forward_pre_hook(count(name.removeprefix("layers.")))
        tokens, labels = batch_of()
        calls.clear()
        step(model, tokens, labels=labels)
        return dict(calls)

    assert set(counted(RecomputeConfig()).values()) == {1}
    for way, twice in {
        "core attention": set(),
        "norm": {"0.attention_norm", "0.mlp_norm"},
        "activation": set(),
        "mlp": {"0.mlp"},
        "norm, mlp": {"0.attention_norm", "0.mlp_norm", "0.mlp"},
    }.items():
        found = counted(WAYS[way])
        assert {name for name in found if name[0] == "0" and found[name] == 2} == twice
    assert set(counted(WAYS["full"]).values()) == {2}
    found = counted(WAYS["full, first 2"])
    assert {name[0] for name, times in found.items() if times == 2} == {"0", "1"}
    assert {name[0] for name, times in found.items() if times == 1} == {"2"}


# The compiler looks at everything that a layer holds.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor:UserWarning")
@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("way", every_nth(["norm, mlp", "three", "full"], 3))
def test_compiled_layers_recompute_the_same(way: str) -> None:
    tokens, labels = batch_of()
    model = GPTModel(replace(GPT2, num_layers=2), seed=7)
    wanted = step(model, tokens, labels=labels)
    model.draws.step = 0
    set_up(model, WAYS[way])
    # The one that counts its draws from others.
    model.get_submodule("layers.1").compile(backend="aot_eager")
    assert are_equal(step(model, tokens, labels=labels), wanted)


def test_evaluation_computes_nothing_twice() -> None:
    model = set_up(GPTModel(GPT2, seed=7), WAYS["full"]).eval()
    tokens, labels = batch_of()
    with torch.no_grad():
        assert torch.equal(model(tokens, labels=labels), set_up(model, RecomputeConfig())(tokens, labels=labels))


@each_way
def test_a_second_backward_through_what_was_retained_is_the_same(way: str) -> None:
    model = set_up(GPTModel(GPT2, seed=7), WAYS[way])
    # Of the logits: the loss overwrites them.
    loss = model(batch_of()[0]).square().mean()
    first, second = (torch.autograd.grad(loss, list(model.parameters()), retain_graph=True) for _ in range(2))
    assert all(torch.equal(one, two) for one, two in zip(first, second, strict=True))


# Layouts


def on_mesh(world: Any, sizes: Sizes, config: GPTConfig, ways: list[RecomputeConfig], queued: bool) -> list[bool]:
    """Whether each way gives what keeping all gives, with weight gradients past autograd, as under a schedule."""
    model = GPTModel(config, mesh=Mesh.build(sizes, world.rank(), new_group), seed=7)
    gradients = WeightGradients()
    weight_gradients.share(model, gradients)
    found: list[Found] = []
    for way in (RecomputeConfig(), *ways):
        set_up(model, way)
        model.zero_grad()
        model.draws.step = 0
        queue: list[Task] = []
        loss = model(batch_of()[0], labels=batch_of()[1])
        with gradients.opened(queue if queued else None):
            loss.backward()
        assert len(queue) == (4 * config.num_layers + 1 if queued else 0)
        for _, task in queue:
            task()
        grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        assert grads.keys() == dict(model.named_parameters()).keys()
        found.append((loss.detach(), grads))
    return [are_equal(each, found[0]) for each in found[1:]]


LAYOUTS = {
    "one": Sizes(),
    "tp2": Sizes(world=2, tp=2),
    "tp2 sp": Sizes(world=2, tp=2, sequence_parallel=True),
    "tp4 sp": Sizes(world=4, tp=4, sequence_parallel=True),
}


@pytest.mark.matrix
@each_variant
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("queued", [False, True], ids=["added", "queued"])
def test_every_layout_gives_what_it_gives_without_recomputation(variant: str, layout: str, queued: bool) -> None:
    sizes = LAYOUTS[layout]
    # 21 tokens: a saved input does not divide by tp.
    for equal in run_on_threads(sizes.world, on_mesh, sizes, VARIANTS[variant], list(WAYS.values()), queued):
        assert dict(zip(WAYS, equal, strict=True)) == dict.fromkeys(WAYS, True)


def test_a_saved_input_whose_shards_are_swapped_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    gather = recompute.collectives.all_gather

    def swapped(x: Tensor, axis: Axis, **how: Any) -> Any:
        # The linears gather by the same function, and without sequence parallelism have nothing to gather.
        return gather(x, axis).roll(1, 0) if axis.size > 1 else gather(x, axis, **how)

    monkeypatch.setattr(recompute.collectives, "all_gather", swapped)
    sizes, ways = LAYOUTS["tp2"], [WAYS["full"], WAYS["full, sharded"]]
    assert run_on_threads(2, on_mesh, sizes, GPT2, ways, False) == [[True, False]] * 2


# Memory


BF16 = torch.bfloat16
GPT_1T = GPTConfig(
    num_layers=128, hidden_size=25600, num_attention_heads=160, max_sequence_length=2048, vocab_size=51200
)
TP8 = Sizes(world=8, tp=8)
TP8_SP = Sizes(world=8, tp=8, sequence_parallel=True)


def test_selective_removes_what_grows_with_the_square_of_the_sequence() -> None:
    config = replace(GPT_1T, hidden_dropout=0.1, attention_dropout=0.1)
    unit = 2048 * 25600 / 8  # s b h / t
    square = 2048 * 2048 * 160 / 8  # a s^2 b / t
    saved = saved_bytes(config, TP8_SP, 1, 2048, BF16)
    selective = saved_bytes(config, TP8_SP, 1, 2048, BF16, WAYS["core attention"])
    # Beyond the paper's 34 are the statistics of the norms.
    assert selective == pytest.approx(34 * unit, rel=1e-4)
    # Two bytes of weights, a byte of mask, and here the softmax in float32: a kernel in bf16 would save 5 in all.
    assert saved - selective == 7 * square >= 5 * square
    longer = saved_bytes(config, TP8_SP, 1, 4096, BF16, WAYS["core attention"])
    assert longer == 2 * selective


@pytest.mark.parametrize(
    ("way", "sizes", "expected"),
    [
        ("full", TP8, 2.0),
        ("full", TP8_SP, 2 / 8),
        ("full, sharded", TP8, 2 / 8),
        ("full, sharded", TP8_SP, 2 / 8),
        ("full by 2", TP8_SP, 1 / 8),
    ],
)
def test_full_leaves_the_input_of_a_layer(way: str, sizes: Sizes, expected: float) -> None:
    config = replace(GPT_1T, hidden_dropout=0.1, attention_dropout=0.1)
    for num_layers in (2, 4):
        saved = saved_bytes(config, sizes, 1, 2048, BF16, WAYS[way], num_layers)
        assert saved == num_layers * expected * 2048 * 25600
    if WAYS[way].num_layers == 1:
        by_formula = cost.layer_activation_bytes(
            config, sizes, batch=1, sequence=2048, bytes_per_element=2, recompute=WAYS[way]
        )
        assert by_formula == expected * 2048 * 25600


def test_the_first_layers_of_a_stage_alone_are_recomputed() -> None:
    saved = saved_bytes(GPT_1T, TP8_SP, 1, 2048, BF16, WAYS["full, first 2"], num_layers=3)
    one = saved_bytes(GPT_1T, TP8_SP, 1, 2048, BF16)
    assert saved == pytest.approx(2 * 2 * 2048 * 25600 / 8 + one, rel=1e-6)


@pytest.mark.matrix
@pytest.mark.parametrize("sizes", [Sizes(), Sizes(world=4, tp=4, sequence_parallel=True)], ids=["one", "tp4 sp"])
@pytest.mark.parametrize("way", [way for way in WAYS if WAYS[way].granularity == "selective"])
@pytest.mark.parametrize("probability", [0.0, 0.1])
@each_variant
def test_saved_bytes_by_formula_are_those_saved(variant: str, way: str, probability: float, sizes: Sizes) -> None:
    # Layer norm, because the formula counts a fused RMS norm and the one of torch on CPU saves more.
    changes: dict[str, Any] = {"hidden_size": 256, "head_dim": 64, "ffn_hidden_size": 512, "normalization": "layernorm"}
    changes |= {"hidden_dropout": probability, "attention_dropout": probability}
    config: TransformerConfig = replace(VARIANTS[variant], **changes)
    sequence = 127  # with padding

    def by_formula(recomputed: RecomputeConfig) -> int:
        return cost.layer_activation_bytes(
            config, sizes, batch=3, sequence=sequence, bytes_per_element=2, recompute=recomputed
        )

    angles = 2 * 2 * sequence * config.rotary_width
    formula, total = by_formula(WAYS[way]) + angles, by_formula(RecomputeConfig())
    # What is left are statistics of norms, here in half precision too.
    assert saved_bytes(config, sizes, 3, sequence, BF16, WAYS[way]) == pytest.approx(formula, abs=0.005 * total)


def test_what_a_linear_saves_under_autocast_is_recomputed_too() -> None:
    with torch.autocast("cpu", BF16):
        saved, less = (
            saved_bytes(GPT2, Sizes(), 3, 64, torch.float32, way) for way in (RecomputeConfig(), WAYS["norm"])
        )
    assert saved - less == 2 * 2 * 3 * 64 * 32  # two norms, two bytes


# Models of others


class Noisy(nn.Module):
    """A user's layer: torch's own dropout, from the global generator, and a batch norm that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.dropout = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.3)

    def forward(self, x: Any) -> Any:
        hidden = self.dropout(torch.tanh(self.norm(self.linear(x["hidden"]))))
        return {"hidden": hidden + x["first"], "first": x["first"]}


class Ends(nn.Module):
    def __init__(self, *, is_first: bool) -> None:
        super().__init__()
        self.is_first = is_first

    def forward(self, x: Any) -> Any:
        return {"hidden": x, "first": x.sin()} if self.is_first else x["hidden"].square().sum()


def noisy_step(config: RecomputeConfig) -> tuple[list[Found], dict[str, Tensor], Tensor]:
    torch.manual_seed(5)
    chain = {"in": Ends(is_first=True), "a": Noisy(), "b": Noisy(), "c": Noisy(), "out": Ends(is_first=False)}
    model = PipelineModule.from_modules(chain, mesh=Mesh.single())
    model.runner = RecomputeRunner(config, tp=model.mesh.tp, sp=model.mesh.sp)
    # Two calls before the backwards, as microbatches in flight.
    losses = [model(torch.randn(4, 6)) for _ in range(2)]
    found = []
    for loss in losses:
        model.zero_grad()
        loss.backward()
        grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        found.append((loss.detach(), grads))
    return found, {name: buffer.clone() for name, buffer in model.named_buffers()}, torch.rand(1)


@pytest.mark.parametrize("way", ["full", "full by 2", "full, first 2", "full, sharded"])
def test_recomputed_layers_of_others_draw_what_they_drew_and_count_once(way: str) -> None:
    wanted, wanted_buffers, wanted_next = noisy_step(RecomputeConfig())
    found, buffers, drawn_next = noisy_step(WAYS[way])
    assert all(are_equal(ours, theirs) for ours, theirs in zip(found, wanted, strict=True))
    assert not are_equal(found[0], found[1])
    assert buffers.keys() == wanted_buffers.keys() and buffers["a.norm.num_batches_tracked"] == 2
    assert all(torch.equal(buffer, wanted_buffers[name]) for name, buffer in buffers.items())
    assert torch.equal(drawn_next, wanted_next)


class PerRank(nn.Module):
    """A user's layer between whose ranks of tp hidden states differ."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((6,), 1.0 + rank))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale).sin()


def per_rank(world: Any, way: str) -> bool:
    mesh = Mesh.build(Sizes(world=2, tp=2), world.rank(), new_group)
    model = PipelineModule.from_modules({"a": PerRank(mesh.tp.rank), "b": PerRank(mesh.tp.rank)}, mesh=mesh)
    x, found = torch.arange(12.0).view(2, 6), []
    for config in (RecomputeConfig(), WAYS[way]):
        model.runner = RecomputeRunner(config, tp=mesh.tp, sp=mesh.sp)
        model.zero_grad()
        model(x).sum().backward()
        found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    return all(torch.equal(one, two) for one, two in zip(*found, strict=True))


def test_saved_inputs_that_may_differ_between_ranks_are_not_cut() -> None:
    assert run_on_threads(2, per_rank, "full, sharded") == [True, True]


# Which layers


def text_of(config: RecomputeConfig, symbols: str) -> str:
    """A stage's parts in groups: [recomputed together] and saved."""
    groups = recompute.groups_of(config, [symbol == "t" for symbol in symbols])
    return "".join(
        f"[{symbols[places.start : places.stop]}]" if is_recomputed else symbols[places.start : places.stop]
        for places, is_recomputed in groups
    )


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (RecomputeConfig(), "EtttttNL"),
        (WAYS["three"], "EtttttNL"),
        (WAYS["full"], "E[t][t][t][t][t]NL"),
        (WAYS["full by 2"], "E[tt][tt][t]NL"),
        (replace(WAYS["full by 2"], num_layers=9), "E[ttttt]NL"),
        (WAYS["full, first 2"], "E[t][t]tttNL"),
        (replace(WAYS["full, first 2"], num_layers=9), "E[t][t][t][t][t]NL"),
    ],
)
def test_layers_are_recomputed_as_the_method_says(config: RecomputeConfig, text: str) -> None:
    assert text_of(config, "EtttttNL") == text


def test_a_group_ends_where_something_else_comes_between() -> None:
    assert text_of(WAYS["full by 2"], "tttEttt") == "[tt][t]E[tt][t]"
    assert text_of(WAYS["full, first 2"], "tEtt") == "[t]E[t]t"
    assert text_of(WAYS["full"], "") == ""


# Cost in FLOPs


def test_full_recomputation_costs_a_forward_of_the_layers_and_no_more() -> None:
    tokens, labels = batch_of()

    def flops(config: RecomputeConfig) -> int:
        model = set_up(GPTModel(GPT2, seed=7), config)
        with FlopCounterMode(display=False) as counter:
            step(model, tokens, labels=labels)
        return counter.get_total_flops()

    forward = cost.layer_linear_flops(GPT2, num_tokens=21)
    forward += cost.layer_attention_flops(GPT2, batch=3, sequence=7, is_causal=False)
    extra = flops(WAYS["full"]) - flops(RecomputeConfig())
    assert extra == pytest.approx(3 * forward, rel=1e-3)
    for way in ("norm", "activation"):
        assert flops(WAYS[way]) == flops(RecomputeConfig())


# Faults


def test_every_fault_is_reported_at_once() -> None:
    with pytest.raises(ValueError) as raised:
        RecomputeConfig(
            granularity="some",  # type: ignore[arg-type]
            parts=("mlp", "attention", "activation"),  # type: ignore[arg-type]
            method="all",  # type: ignore[arg-type]
            num_layers=0,
        )
    text = str(raised.value)
    assert "granularity ('some') must be one of 'none', 'selective', 'full'" in text
    assert "part 'attention' is unknown; parts may be 'core_attention', 'norm', 'activation', 'mlp', 'moe'" in text
    assert "'activation' is inside 'mlp'" in text
    assert "method ('all') must be one of 'uniform', 'block'" in text
    assert "num_layers (0) must be at least 1" in text
    assert len(text.splitlines()) == 5


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"granularity": "selective", "parts": ()}, "parts are empty; name some"),
        ({"granularity": "selective", "parts": "mlp"}, r"must be of type .*; write \('mlp',\)"),
        ({"granularity": "full", "parts": ("mlp",)}, "parts .* acts with granularity='selective' alone.* is 'full'"),
        ({"parts": ("norm",)}, "leave parts out, or use granularity='selective'"),
        ({"granularity": "selective", "num_layers": 2}, "num_layers .* acts with granularity='full' alone"),
        ({"granularity": "selective", "method": "block"}, "method .* acts with granularity='full' alone"),
        ({"shard_saved_inputs": True}, "shard_saved_inputs .* acts with granularity='full' alone"),
    ],
)
def test_settings_that_cannot_act_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        RecomputeConfig(**settings)
    assert len(str(raised.value).splitlines()) == 1


def test_a_part_that_the_model_does_not_have_is_reported() -> None:
    model = GPTModel(GPT2, seed=7)
    offered = recompute.recomputable_parts(model)
    assert offered == {"core_attention", "norm", "activation", "mlp"}
    config = RecomputeConfig(granularity="selective", parts=("moe", "norm"))
    [fault] = recompute.part_faults(config, offered)
    assert fault == (
        "recompute part 'moe' cannot act: the model has no expert layers; "
        "parts may be 'activation', 'core_attention', 'mlp', 'norm'"
    )
    assert len(recompute.part_faults(config, set())) == 2
    assert recompute.part_faults(WAYS["full"], set()) == []
