"""Tests of parameters that get their values when these are first used: whoever uses them notices nothing."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.optim.swa_utils import AveragedModel

from lightning_megatron.mesh import Mesh
from lightning_megatron.sharding import (
    Initial,
    ShardedParameter,
    deferring,
    is_deferred,
    materialize,
    shard_of,
    shard_parameter,
    write_elements,
)
from lightning_megatron.transformer.init import initialise

TP = Mesh.single().tp
ROWS, COLUMNS, SEED = 6, 4, 7
X = torch.ones(2, COLUMNS)


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = shard_parameter((ROWS, COLUMNS), initial=Initial(std=1.0), replicas=(TP,))
        self.bias = shard_parameter((ROWS,), initial=Initial(std=0.5, mean=1.0), replicas=(TP,))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


def linear() -> Linear:
    model = Linear()
    initialise(model, SEED)
    return model


def deferred() -> Linear:
    with deferring():
        model = linear()
    assert all(map(is_deferred, model.parameters()))
    return model


class Product(torch.autograd.Function):
    """Saves the weight before it is used."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return grads[0] @ weight, grads[0].t() @ x


def trained(model: Linear, out: Tensor) -> Any:
    out.pow(2).sum().backward()
    return [one.grad for one in model.parameters()]


def scaled(model: Linear) -> None:
    with torch.no_grad():
        torch._foreach_mul_(list(model.parameters()), 3.0)


def copied_within_inference(model: Linear) -> Tensor:
    with torch.inference_mode():
        return model.weight + 1


def pickled(model: Linear) -> Tensor:
    found: Tensor = pickle.loads(pickle.dumps(model.weight))
    assert getattr(found, "deferral", None) is None
    return found


def added(model: Linear) -> Tensor:
    model.weight.data[0] += 1.0
    return model.weight + 0


def tied(model: Linear) -> Tensor:
    other = nn.Linear(COLUMNS, ROWS)
    other.weight = model.weight
    other.weight.data.mul_(2.0)
    return model(X)


def loaded(model: Linear) -> None:
    model.load_state_dict({"weight": torch.ones(ROWS, COLUMNS)}, strict=False)


def normed(model: Linear) -> Tensor:
    return parametrizations.spectral_norm(parametrize.register_parametrization(model, "weight", nn.Tanh()))(X)


USES: dict[str, Callable[[Linear], Any]] = {
    "data, filled": lambda model: model.weight.data.normal_(),
    "data, set": lambda model: setattr(model.weight, "data", torch.ones(ROWS, COLUMNS)),
    "data, of an element": added,
    "an initialiser": lambda model: nn.init.xavier_uniform_(model.weight),
    "module.apply": lambda model: model.apply(lambda one: nn.init.zeros_(one.weight)) and None,  # type: ignore[arg-type]
    "several at once": scaled,
    "another dtype": lambda model: model.to(torch.float64) and None,
    "a norm": lambda model: nn.utils.get_total_norm(list(model.parameters())),
    "a vector": lambda model: nn.utils.parameters_to_vector(model.parameters()),
    "a copy": lambda model: list(copy.deepcopy(model).parameters()),
    "an average": lambda model: list(AveragedModel(model).parameters()),
    "a pickle": pickled,
    "another of its type": lambda model: type(model.weight)(model.weight.detach() * 2),
    "the state": lambda model: model.state_dict(),
    "some of the state, loaded": loaded,
    "optimizer states": lambda model: [one["sum"] for one in torch.optim.Adagrad(model.parameters()).state.values()],
    "the layout": lambda model: torch.tensor(model.weight.stride()),
    "a parametrization": normed,
    "a tied weight": tied,
    "memory that is set": lambda model: model.weight.detach().set_(torch.ones(ROWS, COLUMNS)),
    "another mode": copied_within_inference,
    "a step": lambda model: trained(model, model(X)),
    "a function of autograd": lambda model: trained(model, Product.apply(X, model.weight)),
    "a transform": lambda model: torch.func.grad(lambda x: model(x).pow(2).sum())(X),
    "text": lambda model: torch.tensor(list(repr(model.weight).encode())),
    "random numbers of torch": lambda model: torch.rand(3),
}


def flat(x: Any) -> list[Tensor]:
    """The tensors of a result, on the host."""
    if isinstance(x, Tensor):
        return [torch.zeros(x.shape) if x.is_meta else x.detach().cpu()]
    return [one for each in (x.values() if isinstance(x, dict) else x or ()) for one in flat(each)]


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_whoever_uses_a_parameter_without_values_gets_them(use: Callable[[Linear], Any]) -> None:
    model, like = linear(), deferred()
    own = dict(like.named_parameters())
    torch.manual_seed(0)
    expected = flat(use(model))
    torch.manual_seed(0)
    found = flat(use(like))
    for one in like.parameters():
        materialize(one)
    # What holds the parameters holds them still, and nothing of how they got their values.
    assert not any(hasattr(one, "deferral") and one.deferral for one in own.values())
    assert {type(one) for one in own.values()} == {ShardedParameter}
    assert list(like.state_dict()) == list(model.state_dict())
    expected, found = expected + flat(model.state_dict()), found + flat(like.state_dict())
    assert len(expected) == len(found) > 0
    for one, other in zip(expected, found, strict=True):
        assert one.equal(other) and one.dtype == other.dtype and one.stride() == other.stride()


def test_questions_of_shape_need_no_values() -> None:
    model = deferred()
    weight = model.weight
    assert (weight.shape, weight.ndim, len(weight), weight.numel()) == ((ROWS, COLUMNS), 2, ROWS, ROWS * COLUMNS)
    assert weight.dtype == torch.float32 and weight.device.type == "cpu" and weight.is_leaf and weight.grad is None
    model.requires_grad_(False).requires_grad_(True).to("cpu").float().cpu()
    weight.register_hook(lambda grad: 2 * grad)
    torch.optim.AdamW([{"params": [one for one in model.parameters() if one.dim() > 1]}]).zero_grad()
    assert all(map(is_deferred, model.parameters()))
    assert weight.untyped_storage().nbytes() == weight.nbytes and not is_deferred(weight)
    expected = linear()
    trained(expected, expected(X))
    trained(model, model(X))
    assert expected.weight.grad is not None and weight.grad is not None
    assert weight.grad.equal(2 * expected.weight.grad)


def test_memory_that_torch_does_not_tell_of_is_kept_or_its_loss_refused() -> None:
    model = deferred()
    with torch.no_grad():
        model.weight.set_(torch.full((1,), 2.0).expand(ROWS, COLUMNS))
    out = torch.empty(ROWS * COLUMNS)
    write_elements(model.weight, 0, out.numel(), out)
    assert out.eq(2.0).all()
    model.bias.as_subclass(Tensor).data.fill_(1.0)
    with pytest.raises(RuntimeError, match="written to before it has values"):
        materialize(model.bias)


def test_values_go_with_the_parameter_when_tensors_are_swapped() -> None:
    model, other = deferred(), nn.Parameter(torch.ones(3))
    torch.utils.swap_tensors(model.weight, other)
    assert model.weight.equal(torch.ones(3)) and other.equal(linear().weight)
    assert shard_of(other).global_shape == (ROWS, COLUMNS)
