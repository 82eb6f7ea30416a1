"""FP8 in networks that know nothing of ranks: alike on any layout, in the linears of their layers alone."""

import os
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_megatron import ConfigurationError, Fp8Config, KernelConfig, RecomputeConfig
from lightning_megatron.any_module.cut_tokens import CutTokens
from lightning_megatron.any_module.tensor_styles import ColwiseLinear, RowwiseLinear, sum_gradients
from lightning_megatron.mesh import Axis, Mesh, Sizes
from lightning_megatron.precision.gemm import Fp8Gemm
from lightning_megatron.sharding import Box, shard_of
from lightning_megatron.tensor.whole_linear import WholeLinear
from lightning_megatron.trainer.precision import MegatronPrecision
from lightning_megatron.transformer.fp8_layers import use_torch
from tests.any_module.model_families import ROWS, batches
from tests.harness.ranks import run_on_ranks
from tests.harness.sample import every_nth
from tests.harness.threads import new_group, run_on_threads
from tests.precision import engine_stub
from tests.trainer.setup.test_fp8_layers import CURRENT, DELAYED, FP8_ROUNDING, MXFP8, SAME_CASTS, TOLERANCE, trainer_of

# A rank has one head of keys, whose rows tiles of 32 divide.
WIDE = {"head_dim": 64}
FULL = RecomputeConfig(granularity="full")
# Steps of the same four microbatches: data-parallel ranks have two each.
ONE: dict[str, Any] = {"num_microbatches": 4}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": ONE | {"tensor_model_parallel_size": 2},
    "tp2+sp in chunks, recomputed": ONE
    | {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "recompute": FULL,
        "kernels": KernelConfig(num_tp_overlap_chunks=3),
    },
    "pp2": ONE | {"pipeline_model_parallel_size": 2},
    "dp2": {"num_microbatches": 2},
}
LINEARS = [
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
]


class Llama(L.LightningModule):
    """Trains a model of transformers as it is."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__()
        self.sizes = sizes
        self.model: Any = None
        self.losses: list[float] = []
        self.in_fp8: list[str] = []
        self.first: dict[str, Tensor] = {}
        self.last: dict[str, Tensor] = {}
        self.boxes: dict[str, Box] = {}
        self.amaxes: dict[str, Tensor] = {}

    def configure_model(self) -> None:
        if self.model is None:
            torch.manual_seed(1)
            sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128} | self.sizes
            config = LlamaConfig(
                vocab_size=64, hidden_size=64, num_hidden_layers=4, initializer_range=0.1, use_cache=False, **sizes
            )
            self.model = LlamaForCausalLM(config)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        loss = self.model(**batch).loss
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.losses.append(float(self.trainer.callback_metrics["loss"]))
        self.in_fp8 = fp8_linears(self)
        plugin = self.trainer.precision_plugin
        if not self.first:
            # One step of SGD has added a multiple of the gradients.
            self.first = weights_of(self)
            assert isinstance(plugin, MegatronPrecision)
            self.amaxes = plugin.fp8_layers.state_dict() if plugin.fp8_layers is not None else {}

    def on_train_end(self) -> None:
        self.last = weights_of(self)
        self.boxes = {name: shard_of(weight).box for name, weight in self.named_parameters()}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fp8_linears(module: nn.Module) -> list[str]:
    return [name for name, one in module.named_modules() if isinstance(getattr(one, "gemm", None), Fp8Gemm)]


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in module.named_parameters()}


def loader(layout: dict[str, Any]) -> Any:
    """The batches; a data-parallel rank has those rows of which its microbatches are."""
    num_own = 2 * int(layout["num_microbatches"])
    start = num_own * int(os.environ["RANK"]) % ROWS
    rows = [
        {name: values[row] for name, values in batch.items()}
        for batch in batches()
        for row in range(start, start + num_own)
    ]
    return DataLoader(rows, batch_size=num_own)  # type: ignore[arg-type]


class Trained(NamedTuple):
    """What one rank has of a run."""

    losses: list[float]
    linears: list[str]
    first: dict[str, Tensor]
    last: dict[str, Tensor]
    boxes: dict[str, Box]
    amaxes: dict[str, Tensor]

    def furthest(self, which: str, wanted: dict[str, Tensor]) -> float:
        """The largest difference between its weights and its parts of whole ones."""
        return max(
            float((weight - wanted[name][tuple(map(slice, box.offsets, ends(box)))]).abs().max())
            for name, weight in getattr(self, which).items()
            for box in [self.boxes[name]]
        )


def ends(box: Box) -> list[int]:
    return [start + size for start, size in zip(box.offsets, box.sizes, strict=True)]


def trained(world: int, layout: dict[str, Any]) -> dict[str, Trained]:
    found = {}
    runs = {"plain": ({}, None), "current": ({}, CURRENT), "delayed": ({}, DELAYED)}
    for name, (sizes, fp8) in (runs | {"wide": (WIDE, None), "mxfp8": (WIDE, MXFP8)}).items():
        module = Llama(**sizes)
        trainer_of(world, layout, fp8=fp8).fit(module, loader(layout))
        found[name] = Trained(module.losses, module.in_fp8, module.first, module.last, module.boxes, module.amaxes)
        assert not fp8_linears(module) and not any(isinstance(one, WholeLinear) for one in module.modules())
    return found


@pytest.fixture(scope="module")
def on_one() -> dict[str, Trained]:
    [found] = run_on_ranks(1, trained, 1, ONE, init=False)
    return found


def built(sizes: dict[str, int]) -> Llama:
    module = Llama(**sizes)
    module.configure_model()
    return module


# The same numbers are cast. Over tp float32 sums in another order move a few of them over the edge between two values
# of float8; from then on weights go the ways of their rounding, and losses and the first gradients tell.
GRADIENTS = {name: FP8_ROUNDING if "tp2" in name else SAME_CASTS for name in LAYOUTS}


@pytest.mark.matrix
@pytest.mark.parametrize("name", every_nth(LAYOUTS, 2))
def test_an_unchanged_model_trains_in_fp8_on_any_layout_as_on_one_device(name: str, on_one: dict[str, Trained]) -> None:
    for found in run_on_ranks(2, trained, 2, LAYOUTS[name], init=False, timeout=180):
        for scaling, unscaled in (("current", "plain"), ("delayed", "plain"), ("mxfp8", "wide")):
            own, wanted, plain = found[scaling], on_one[scaling], on_one[unscaled]
            initial = weights_of(built(WIDE if scaling == "mxfp8" else {}))
            assert own.losses == pytest.approx(wanted.losses, abs=TOLERANCE)
            moved = wanted.furthest("first", initial)
            assert own.furthest("first", wanted.first) < GRADIENTS[name] * moved
            if "tp2" not in name:
                assert own.furthest("last", wanted.last) < SAME_CASTS * wanted.furthest("last", initial)
            # They are FP8's numbers and not the plain ones.
            assert max(abs(a - b) for a, b in zip(own.losses, plain.losses, strict=True)) > 2 * TOLERANCE
            assert wanted.furthest("first", plain.first) > FP8_ROUNDING * moved
            assert set(own.linears) <= set(wanted.linears) and own.linears
        for unscaled in ("plain", "wide"):
            assert found[unscaled].losses == pytest.approx(on_one[unscaled].losses, abs=1e-5)
        amaxes, wanted_amaxes = found["delayed"].amaxes, on_one["delayed"].amaxes
        assert amaxes.keys() == wanted_amaxes.keys()
        assert all(
            amax.tolist() == pytest.approx(wanted_amaxes[key].tolist(), rel=2e-3) for key, amax in amaxes.items()
        )


def test_the_linears_of_the_layers_and_no_others_multiply_in_fp8(on_one: dict[str, Trained]) -> None:
    def of_layers(*layers: int) -> list[str]:
        return [f"model.model.layers.{layer}.{name}" for layer in layers for name in LINEARS]

    assert on_one["delayed"].linears == of_layers(0, 1, 2, 3)
    # The configuration leaves the first layer alone.
    assert on_one["current"].linears == of_layers(1, 2, 3)
    assert on_one["plain"].linears == []
    tensors = ("input", "weight", "gradient")
    assert set(on_one["delayed"].amaxes) == {f"{name}.{one}" for name in of_layers(0, 1, 2, 3) for one in tensors}


def test_every_rank_casts_its_part_as_it_would_be_cast_whole() -> None:
    """Numbers that grow along both dims: a rank of small ones would scale otherwise by itself."""

    def growing(rows: int, columns: int) -> Tensor:
        return torch.outer(torch.linspace(0, 8, rows).exp2(), torch.linspace(0, 8, columns).exp2())

    def casts(linear: Any, x: Tensor, grad: Tensor) -> list[Any]:
        use_torch({}, Fp8Config(), **axes, device=torch.device("cpu"), others={"linear": linear})
        gemm = linear.gemm
        weight = gemm.cast_weight(linear.weight, is_training=False).rows
        return [one.inverse_scale for one in (gemm.cast_input(x, is_training=True), weight, gemm.cast_gradient(grad))]

    x, grad, weight = growing(16, 32), growing(16, 64), growing(64, 32)
    alone = Axis.alone(0)
    axes: dict[str, Any] = {"tp": alone, "replicas": alone, "pp": alone}

    def linear() -> nn.Linear:
        made = nn.Linear(32, 64, bias=False)
        made.weight.data.copy_(weight)
        return made

    wanted = casts(linear(), x, grad)

    def on_rank(world: Any) -> None:
        mesh = Mesh.build(Sizes(world=2, tp=2, sequence_parallel=True), world.rank(), new_group)
        tp = mesh.tp
        own_x, own_grad = x.chunk(2, 1)[tp.rank], grad.chunk(2, 1)[tp.rank]
        if tp.rank == 0:
            # Alone it would find other scales.
            assert own_x.max() < x.max() / 4 and own_grad.max() < grad.max() / 4
        assert casts(ColwiseLinear(linear(), tp, "colwise"), x, own_grad) == wanted
        assert casts(RowwiseLinear(linear(), tp, "rowwise"), own_x, grad) == wanted
        # Under sequence parallelism a rank has the gradient of its own tokens.
        layer = nn.ModuleDict({"part": nn.Sequential(RowwiseLinear(linear(), tp, "rowwise"))})
        CutTokens(mesh.cp, mesh.sp, None).watch(layer)
        assert casts(layer.get_submodule("part.0"), own_x, grad.chunk(2)[tp.rank]) == wanted
        # Each rank has the whole weight, and runs it on the features of its heads.
        on_parts = linear()
        sum_gradients(on_parts, "weight", on_parts.weight, tp)
        assert casts(on_parts, own_x, own_grad) == wanted

    run_on_threads(2, on_rank)


def refusal(module: L.LightningModule, fp8: Fp8Config) -> str:
    with pytest.raises(ConfigurationError) as error:
        trainer_of(1, ONE, fp8=fp8).fit(module, loader(ONE))
    return str(error.value)


def test_a_network_that_cannot_multiply_in_fp8_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    assert "mlp.gate_proj (72 x 64) must have multiples of 16" in refusal(Llama(intermediate_size=72), DELAYED)
    text = refusal(Llama(), Fp8Config(num_first_layers_bf16=3, num_last_layers_bf16=1))
    assert "beside num_first_layers_bf16 (3) and num_last_layers_bf16 (1) of them" in text
    engine_stub.install(monkeypatch)
    text = refusal(Llama(), Fp8Config(engine="transformer_engine"))
    assert "Llama holds another network; use Fp8Config(engine='torch')" in text
