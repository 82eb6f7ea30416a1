"""A model must be built for the ranks it runs on."""

import lightning as L
import pytest
import torch
from torch import Tensor

from lightning_megatron import ConfigurationError, KernelConfig, MegatronStrategy
from lightning_megatron.mesh import Mesh, Sizes
from lightning_megatron.models import BertModel, GPTConfig, GPTModel, LlavaModel, T5Model
from lightning_megatron.models.heads import LanguageModelHead
from lightning_megatron.tensor.linear import ParallelLinear
from lightning_megatron.trainer.setup.model_checks import require_spreading, share_kernels
from lightning_megatron.trainer.setup.pipelined_models import cut_plain_networks
from tests.harness.ranks import run_on_ranks
from tests.models import small_llava, test_bert, test_t5
from tests.trainer.layouts import Layout, make_trainer

CONFIG = GPTConfig(num_layers=2, hidden_size=16, num_attention_heads=2, vocab_size=32, max_sequence_length=8)


class TooEarly(L.LightningModule):
    """Builds its model before anyone knows the ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.model = GPTModel(CONFIG)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(batch[:, :-1], labels=batch[:, 1:])
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(layout: Layout) -> str:
    loader = torch.utils.data.DataLoader(torch.randint(0, 32, (8, 9)), batch_size=4)
    trainer = make_trainer(layout, max_epochs=1, limit_val_batches=0)
    try:
        trainer.fit(TooEarly(), loader)
    except ConfigurationError as error:
        return str(error)
    return "trained"


@pytest.mark.parametrize("layout", [Layout(world=2, tp=2), Layout(world=2, pp=2, microbatches=2)], ids=str)
def test_a_model_built_in_init_is_refused_where_it_would_be_unsharded_on_every_rank(layout: Layout) -> None:
    for shown in run_on_ranks(2, fit, layout, init=False):
        assert "build it in configure_model" in shown


def test_a_model_built_in_init_trains_where_each_rank_holds_it_unsharded() -> None:
    assert run_on_ranks(2, fit, Layout(world=2), init=False) == ["trained", "trained"]


class Reused(L.LightningModule):
    """A chain in which one activation stands in two places."""

    def __init__(self) -> None:
        super().__init__()
        act = torch.nn.Tanh()
        self.chain = torch.nn.Sequential(torch.nn.Linear(2, 2), act, torch.nn.Linear(2, 2), act)


def test_a_module_that_stands_twice_in_a_chain_keeps_both_positions() -> None:
    module, mesh = Reused(), Mesh.imagine(0, Sizes(world=2, pp=2))
    assert cut_plain_networks(module, mesh)
    assert module.chain.part_names == ("0", "1", "2", "3")


class Normed(L.LightningModule):
    """Batch norms in a chain, of which the stages hold different numbers, and one outside."""

    def __init__(self) -> None:
        super().__init__()
        norms = [torch.nn.BatchNorm1d(2) for _ in range(3)]
        self.chain = torch.nn.Sequential(torch.nn.Linear(2, 2), norms[0], norms[1], norms[2], torch.nn.Linear(2, 2))
        self.outside = torch.nn.BatchNorm1d(2)
        self.talks: list[list[int]] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        raise AssertionError("synchronised batch norms run on GPUs only; this test sets them up and runs none")

    def on_fit_start(self) -> None:
        norms = [child for child in self.modules() if isinstance(child, torch.nn.SyncBatchNorm)]
        self.talks = [torch.distributed.get_process_group_ranks(norm.process_group) for norm in norms]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def ranks_of_norms(layout: Layout) -> list[list[int]]:
    """The global ranks that each synchronised batch norm talks over in the fit; after it there is none."""
    module = Normed()
    trainer = make_trainer(layout, sync_batchnorm=True, limit_train_batches=0, limit_val_batches=0)
    trainer.fit(module, torch.utils.data.DataLoader(torch.ones(8, 2), batch_size=4))
    assert not any(isinstance(child, torch.nn.SyncBatchNorm) for child in module.modules())
    return module.talks


@pytest.mark.filterwarnings("ignore:batch norms .* normalise each microbatch:UserWarning")
def test_synchronised_batch_norms_reduce_over_the_dp_ranks_of_their_stage() -> None:
    by_rank = run_on_ranks(4, ranks_of_norms, Layout(world=4, pp=2, microbatches=2), init=False)
    # Replicas 0 and 1 of a stage are neighbours: ranks 0 and 1, 2 and 3.
    for rank, talks in enumerate(by_rank):
        assert talks and all(sorted(ranks) == ([0, 1] if rank < 2 else [2, 3]) for ranks in talks)
    assert len(by_rank[0]) + len(by_rank[2]) == 3 + 2
    assert len(by_rank[0]) != len(by_rank[2])


class Holder(torch.nn.Module):
    """Of whose model nobody knows the architecture before it is built."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model


def test_dynamic_context_parallelism_is_refused_for_what_is_no_gpt_by_the_name_of_the_model() -> None:
    require_spreading(Holder(GPTModel(CONFIG)))
    others = (T5Model(test_t5.T5), BertModel(test_bert.POST), LlavaModel(small_llava.LLAVA))
    for model in others:
        shown = rf"documents of Holder, and model \({type(model).__name__}\) does not take .* leave dynamic_context out"
        with pytest.raises(ConfigurationError, match=shown):
            require_spreading(Holder(model))
    with pytest.raises(ConfigurationError, match="it holds no model of parts"):
        require_spreading(torch.nn.Linear(2, 2))


class Late(TooEarly):
    """Builds its model where the ranks are known, and keeps the weights that it begins with."""

    def __init__(self) -> None:
        L.LightningModule.__init__(self)

    def configure_model(self) -> None:
        self.model = GPTModel(CONFIG)

    def on_train_start(self) -> None:
        self.first = [one.detach().clone() for one in self.parameters()]


def trained(layout: Layout, kernels: KernelConfig) -> Late:
    """A module after an epoch."""
    torch.manual_seed(1)
    strategy = layout.strategy()
    assert isinstance(strategy, MegatronStrategy)
    strategy.kernels = kernels
    module = Late()
    loader = torch.utils.data.DataLoader(torch.arange(72).remainder(32).view(8, 9), batch_size=4)
    make_trainer(layout, strategy=strategy, max_epochs=1, limit_val_batches=0).fit(module, loader)
    heads = [one for one in module.modules() if isinstance(one, LanguageModelHead)]
    assert all(head.chunk_tokens == kernels.loss_chunk_tokens for head in heads)
    linears = [one for one in module.modules() if isinstance(one, ParallelLinear)]
    assert linears and all(linear.num_chunks == kernels.num_tp_overlap_chunks for linear in linears)
    return module


def difference_of_chunks(layout: Layout, kernels: KernelConfig) -> float:
    """The largest difference that chunks make to a weight, relative to how far training moved it."""
    whole, chunked = trained(layout, KernelConfig()), trained(layout, kernels)
    found = []
    for first, one, other in zip(whole.first, whole.parameters(), chunked.parameters(), strict=True):
        moved = float((one - first).detach().abs().max())
        assert moved > 0
        found.append(float((one - other).detach().abs().max()) / moved)
    return max(found)


@pytest.mark.parametrize(
    ("layout", "kernels"),
    [
        (Layout(world=2, tp=2, sp=True), KernelConfig(loss_chunk_tokens=5)),
        (Layout(world=2, pp=2, microbatches=2), KernelConfig(loss_chunk_tokens=5)),
        (Layout(world=2, tp=2, sp=True), KernelConfig(num_tp_overlap_chunks=3)),
    ],
    ids=["loss, tp2-sp", "loss, pp2", "linears, tp2-sp"],
)
def test_chunks_train_the_same(layout: Layout, kernels: KernelConfig) -> None:
    # Chunks add the terms of gradients in another order. In float64 that is some 1e-14 of what a weight moves by.
    assert max(run_on_ranks(2, difference_of_chunks, layout, kernels, init=False)) < 1e-12


def test_tokens_in_chunks_are_for_modules_with_linears_that_are_cut() -> None:
    with pytest.raises(ConfigurationError, match=r"num_tp_overlap_chunks \(3\) is for linears that are cut over"):
        share_kernels(torch.nn.Linear(2, 2), KernelConfig(num_tp_overlap_chunks=3), Mesh.single())


def test_a_loss_in_chunks_is_for_language_models_of_this_package() -> None:
    with pytest.raises(ConfigurationError, match=r"loss_chunk_tokens \(5\) is for this package's language models"):
        share_kernels(torch.nn.Linear(2, 2), KernelConfig(loss_chunk_tokens=5), Mesh.single())
    with pytest.raises(ValueError, match=r"loss_chunk_tokens \(-1\) must be at least 0"):
        KernelConfig(loss_chunk_tokens=-1)
