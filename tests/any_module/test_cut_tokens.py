"""Tokens of layers that are cut over sp and cp give one device's numbers, or the layers are refused by name."""

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_megatron import KernelConfig, MegatronStrategy
from lightning_megatron.any_module.cut_tokens import CutTokens
from lightning_megatron.any_module.tensor_styles import RowwiseLinear
from lightning_megatron.comm import collectives
from lightning_megatron.mesh import Axis, Mesh, Sizes
from lightning_megatron.testing import certify
from tests.any_module import networks
from tests.harness.ranks import run_on_ranks
from tests.harness.sample import every_nth
from tests.trainer.layouts import Layout, make_trainer


@pytest.mark.matrix
def test_a_network_of_ones_own_runs_its_norms_on_own_tokens() -> None:
    layouts = ("tp2-sp-pp2vp2", "tp2-sp")
    certify(networks.TrainsOverTensor, networks.batches, layouts=every_nth(layouts, 2), steps=2).assert_equal()
    certify(networks.TrainsScaled, networks.batches, layouts=layouts[1:], steps=2).assert_equal()


def test_what_later_layers_read_goes_to_their_stages_as_own_tokens() -> None:
    certify(networks.TrainsSaidSkipping, networks.batches, layouts=("tp2-sp-pp2",), steps=1).assert_equal()


def test_a_weight_that_is_handed_out_of_a_part_is_summed_over_ranks() -> None:
    certify(networks.TrainsLending, networks.batches, layouts=("tp2-sp",), steps=2).assert_equal()


class AddsItsCondition(networks.Diffusion):
    """What conditions the layers is added to the hidden states, and scales what comes out of them, too."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds, self.last = nn.Embedding(4, networks.WIDTH), nn.Linear(networks.WIDTH, networks.WIDTH)

    def forward(self, noisy: Tensor, time: Tensor) -> Tensor:
        condition = self.time(time) + self.kinds((4 * time[:, 0]).long().remainder(4))
        x = self.enter(noisy) + condition.unsqueeze(1)
        for block in self.blocks:
            x, _ = block(x, condition)
        left: Tensor = self.leave(x * self.last(condition).unsqueeze(1))
        return left


class TrainsAddedCondition(networks.TrainsDiffusion):
    network = AddsItsCondition


@pytest.mark.parametrize("make", [networks.TrainsDiffusion, TrainsAddedCondition])
def test_conditions_without_tokens_get_the_gradients_of_all_tokens(make: Callable[[], Any]) -> None:
    certify(make, networks.batches, layouts=("tp2-sp", "pp2tp2-sp"), steps=2).assert_equal()


class CountsMessages(L.Callback):
    """Counts how often the second step calls a collective on so many numbers."""

    def __init__(self, name: str, size: int) -> None:
        self.name, self.size, self.num_found = name, size, 0

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        collective = getattr(collectives, self.name)

        def counted(x: Tensor, *args: Any, **options: Any) -> Any:
            self.num_found += x.numel() == self.size
            return collective(x, *args, **options)

        # Before the first step layers are looked at.
        if batch_idx == 1:
            setattr(collectives, self.name, counted)


class OnOwnTokens(L.Callback):
    """Row-parallel linears of the first block that return a rank's own tokens."""

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        modules = pl_module.net.blocks[0].named_modules()
        linears = [(name, one) for name, one in modules if isinstance(one, RowwiseLinear)]
        self.names = {name for name, one in linears if one.tokens is not None}


def summed_whole(make: Callable[[], Any]) -> tuple[set[str], int]:
    counts, linears = CountsMessages("all_reduce_", networks.ROWS * networks.TOKENS * networks.WIDTH), OnOwnTokens()
    callbacks = [counts, linears]
    trainer = make_trainer(Layout(world=2, tp=2, sp=True), max_epochs=1, limit_train_batches=2, callbacks=callbacks)
    trainer.fit(make(), networks.loader())
    return linears.names, counts.num_found


def test_a_part_sums_hidden_states_of_own_tokens_alone() -> None:
    for found in run_on_ranks(2, summed_whole, networks.TrainsOverTensor, init=False):
        assert found == ({"attention.out", "down"}, 0)
    # A factor behind a linear is of all tokens: each block sums the output of one part, and not its gradient.
    for found in run_on_ranks(2, summed_whole, networks.TrainsScaled, init=False):
        assert found == ({"down"}, 4)


def scattered(num_chunks: int) -> tuple[int, list[Tensor]]:
    """Number of messages in a step that scatter a chunk of 16 rows of each rank, and the weights after two steps."""
    layout, counts = Layout(world=2, tp=2, sp=True), CountsMessages("reduce_scatter", 2 * 16 * networks.WIDTH)
    strategy = layout.strategy()
    assert isinstance(strategy, MegatronStrategy)
    strategy.kernels = KernelConfig(num_tp_overlap_chunks=num_chunks)
    torch.manual_seed(1)
    module = networks.TrainsOverTensor()
    options: dict[str, Any] = {"max_epochs": 1, "limit_train_batches": 2, "callbacks": [counts]}
    make_trainer(layout, strategy=strategy, **options).fit(module, networks.loader())
    return counts.num_found, [one.detach() for one in module.parameters()]


def test_what_a_part_returns_is_scattered_in_chunks_on_request() -> None:
    wholes, chunked = (run_on_ranks(2, scattered, num_chunks, init=False) for num_chunks in (1, 3))
    for (num_whole, wanted), (num_chunks, found) in zip(wholes, chunked, strict=True):
        # 8 rows of 6 own tokens, of 2 linears in each of 4 blocks.
        assert (num_whole, num_chunks) == (0, 3 * 2 * 4)
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_a_layer_that_mixes_tokens_by_itself_is_refused_by_name() -> None:
    [result] = certify(networks.TrainsSmoothed, networks.batches, layouts=("tp2-sp",), steps=1).results
    assert result.verdict == "refused"
    assert "blocks.0 (SmoothedBlock) computes other hidden states from the tokens of a rank" in result.message
    assert "use sequence_parallel=False" in result.message


def test_a_weight_that_is_used_on_all_tokens_is_refused_by_name() -> None:
    [result] = certify(networks.TrainsHanding, networks.batches, layouts=("tp2-sp",), steps=1).results
    assert result.verdict == "refused"
    assert "the gradient of blocks.0.shift is another one where its layer runs on a rank's own" in result.message


def test_a_sequence_that_ranks_do_not_divide_is_refused() -> None:
    [result] = certify(networks.TrainsOverTensor, networks.odd_batches, layouts=("tp2-sp",), steps=1).results
    assert "sequences of 11 tokens cannot be cut over 2 ranks" in result.message


def test_what_a_rank_reads_beside_hidden_states_is_cut_by_its_row_a_token() -> None:
    cp = Mesh.imagine(1, Sizes(world=2, cp=2)).cp
    tokens = CutTokens(cp, Axis.alone(1, "sp"), None)
    hidden, table, mask = torch.zeros(2, 6, 4), torch.arange(6.0).view(1, 6, 1), torch.zeros(2, 1, 3, 6)
    args, kwargs = tokens.enter(0, (hidden,), {"table": (table, table[0]), "mask": mask, "name": "x"}, is_whole=True)
    assert args[0].shape == (2, 3, 4) and kwargs["mask"] is mask and kwargs["name"] == "x"
    assert kwargs["table"][0].flatten().tolist() == [3.0, 4.0, 5.0] == kwargs["table"][1].flatten().tolist()


def test_a_layer_is_looked_at_with_few_tokens() -> None:
    tokens = CutTokens(Mesh.imagine(0, Sizes(world=2, cp=2)).cp, Axis.alone(0, "sp"), None)
    ids, mask = torch.zeros(2, 100, dtype=torch.long), torch.zeros(2, 7)
    short, same = (
        tokens.shortened(((ids,), {"mask": mask}), are_all=True)[0][0],
        tokens.shortened(ids[:, :5], are_all=True),
    )
    assert short.shape == (2, 32) and same.shape == (2, 5)
    assert tokens.shortened(torch.zeros(2, 50, 4), are_all=False).shape == (2, 16, 4)


def test_norms_are_summed_over_ranks_and_linears_are_not() -> None:
    block = networks.Block()
    tp = Mesh.imagine(0, Sizes(world=2, tp=2, sequence_parallel=True)).tp
    CutTokens(Axis.alone(0, "cp"), tp, None).watch(block)
    partial = {name for name, p in block.named_parameters() if getattr(p, "shard", None) is not None}
    assert partial == {f"norm_{i}.{name}" for i in (1, 2) for name in ("weight", "bias")}
    assert isinstance(block.up, nn.Linear)
