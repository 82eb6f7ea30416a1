"""States by name, groups by the names of their parameters, and what another mesh could not read is refused."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_megatron.checkpoint import (
    load,
    merge_rest,
    pieces_of_optimizer,
    read_entries,
    read_meta,
    rebuild_optimizer,
    save,
)
from lightning_megatron.checkpoint.state import Slot
from lightning_megatron.mesh import Mesh, Sizes
from lightning_megatron.sharding import Initial, shard_parameter
from tests.checkpoint.small_model import adamw, mesh_of, parameters_of, train
from tests.harness.ranks import on_ranks

WORLD = Mesh.single().world


def named(parameters: dict[str, nn.Parameter]) -> dict[nn.Parameter, str]:
    return {parameter: name for name, parameter in parameters.items()}


def round_trip(path: Path, source: torch.optim.Optimizer, target: torch.optim.Optimizer, names, target_names) -> None:
    pieces, rest = pieces_of_optimizer(source, names)
    save(path, pieces, {"rest": rest}, world=WORLD)
    pieces = rebuild_optimizer(target, target_names, read_meta(path)["rest"], read_entries(path))
    load(path, pieces, world=WORLD)


def test_groups_hold_names_and_hyperparameters(tmp_path: Path) -> None:
    parameters = parameters_of(Mesh.single(), fill=True)
    pieces, rest = pieces_of_optimizer(adamw(parameters), named(parameters))
    assert pieces == {}
    assert rest["groups"][1]["params"] == ["layers.0.norm.weight", "layers.1.norm.weight", "scale"]
    assert [group["weight_decay"] for group in rest["groups"]] == [0.1, 0.0]
    assert rest["groups"][0]["betas"] == (0.8, 0.9)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.Adam(p, amsgrad=True, foreach=True),
        lambda p: torch.optim.AdamW(p, fused=True),
        lambda p: torch.optim.NAdam(p),
        lambda p: torch.optim.RAdam(p),
        lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
        lambda p: torch.optim.Adagrad(p),
        lambda p: torch.optim.Adadelta(p),
        lambda p: torch.optim.ASGD(p),
        lambda p: torch.optim.Rprop(p),
        lambda p: torch.optim.Adafactor(p),
        lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=2, history_size=3),
    ],
)
def test_every_optimizer_of_torch_goes_on_as_if_it_had_never_stopped(tmp_path: Path, make) -> None:
    def closure(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer):
        optimizer.zero_grad()
        loss = sum(((parameter - 1) ** 2).sum() for parameter in parameters) + parameters[0].prod()
        loss.backward()
        return loss

    def steps(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
        for _ in range(3):
            optimizer.step(lambda: closure(parameters, optimizer))

    first = [nn.Parameter(torch.tensor([0.5, 0.2])), nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.tensor(0.3))]
    one = make(first)
    steps(first, one)
    second = [nn.Parameter(parameter.detach().clone()) for parameter in first]
    other = make(second)
    names = [dict(zip(some, "abc", strict=True)) for some in (first, second)]
    round_trip(tmp_path / "o.ckpt", one, other, *names)
    steps(first, one)
    steps(second, other)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


def test_names_that_the_optimizer_itself_gives_stay_its_own(tmp_path: Path) -> None:
    one, other = ({"w": nn.Parameter(torch.ones(2))} for _ in range(2))
    first = torch.optim.SGD([("old.w", one["w"])], lr=0.5)
    second = torch.optim.SGD([("new.w", other["w"])], lr=0.1)
    round_trip(tmp_path / "n.ckpt", first, second, named(one), named(other))
    assert second.param_groups[0]["param_names"] == ["new.w"]
    assert second.param_groups[0]["lr"] == 0.5


def test_states_keep_the_dtype_that_torch_gives_them(tmp_path: Path) -> None:
    one, other = ({"w": nn.Parameter(torch.ones(2, dtype=torch.bfloat16))} for _ in range(2))
    first, second = (torch.optim.AdamW([parameters["w"]]) for parameters in (one, other))
    one["w"].grad = torch.ones(2, dtype=torch.bfloat16)
    first.step()
    round_trip(tmp_path / "n.ckpt", first, second, named(one), named(other))
    state = second.state[other["w"]]
    assert {key: value.dtype for key, value in state.items()} == {
        "step": torch.float32,
        "exp_avg": torch.bfloat16,
        "exp_avg_sq": torch.bfloat16,
    }


def test_a_state_that_another_mesh_could_not_read_is_refused() -> None:
    tp = Mesh.imagine(0, Sizes(world=2, tp=2)).tp
    parameter = shard_parameter((4, 6), initial=Initial(), dim=0, axis=tp)
    parameter.data.zero_()
    optimizer = torch.optim.Adafactor([parameter])
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    with pytest.raises(ValueError, match=r"Adafactor keeps 'row_var' of shape \(2, 1\) for 'w'"):
        pieces_of_optimizer(optimizer, {parameter: "w"})


def test_a_state_of_another_shape_is_saved_where_the_axis_that_would_cut_has_one_rank(tmp_path: Path) -> None:
    def sharded() -> dict[str, nn.Parameter]:
        tp, ep = Mesh.single().tp, Mesh.single().axis("ep")
        weights = {
            "w": shard_parameter((4, 6), initial=Initial(), dim=0, axis=tp),
            "experts": shard_parameter((2, 4, 6), initial=Initial(), dim=1, axis=tp, leading=ep),
        }
        for weight in weights.values():
            weight.data.fill_(0.5)
        return weights

    def step(parameters: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
        for parameter in parameters.values():
            parameter.grad = parameter.detach().cos() + torch.arange(parameter.numel()).view(parameter.shape)
        optimizer.step()

    one, other = sharded(), sharded()
    first, second = (torch.optim.Adafactor(list(parameters.values()), lr=0.1) for parameters in (one, other))
    step(one, first)
    for name, parameter in one.items():
        other[name].data.copy_(parameter.data)
    fresh = torch.optim.Adafactor([nn.Parameter(one["w"].detach().clone())], lr=0.1)
    round_trip(tmp_path / "a.ckpt", first, second, named(one), named(other))
    step(one, first)
    step(other, second)
    assert all(torch.equal(one[name], other[name]) for name in one)
    [without_state] = fresh.param_groups[0]["params"]
    step({"w": without_state}, fresh)
    assert not torch.equal(without_state, one["w"])


def test_a_part_of_a_weight_has_no_unsharded_state() -> None:
    parameter = nn.Parameter(torch.ones(4, 6))
    main = nn.Parameter(torch.ones(12))
    optimizer = torch.optim.SGD([main], lr=0.1)
    optimizer.state[main]["rows"] = torch.ones(4)
    with pytest.raises(ValueError, match=r"keeps 'rows' of shape \(4,\) for 'w', whose part here is \(12,\)"):
        pieces_of_optimizer(optimizer, {main: Slot("w", parameter, 12, 24)})


def test_a_parameter_that_is_not_the_modules_is_refused() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(3, 2))])
    with pytest.raises(
        ValueError, match=r"group 0 of SGD holds a parameter of shape \(3, 2\) that is not the module's"
    ):
        pieces_of_optimizer(optimizer, {})


def test_other_groups_than_the_saved_ones_are_refused() -> None:
    parameters = {name: nn.Parameter(torch.zeros(1)) for name in "ab"}
    a, b = parameters.values()
    _, rest = pieces_of_optimizer(torch.optim.SGD([{"params": [a]}, {"params": [b]}]), named(parameters))
    with pytest.raises(ValueError, match="has 2 param groups of optimizer 0, SGD has 1"):
        rebuild_optimizer(torch.optim.SGD([a, b]), named(parameters), rest, {})
    with pytest.raises(ValueError, match="param group 0 of optimizer 0 did not hold b"):
        rebuild_optimizer(torch.optim.SGD([{"params": [b]}, {"params": [a]}]), named(parameters), rest, {})


@on_ranks(2)
def test_ranks_that_disagree_about_a_group_are_reported() -> None:
    mesh = mesh_of(Sizes(world=2, pp=2))
    parameters = parameters_of(mesh, fill=True)
    optimizer = adamw(parameters)
    train(parameters, optimizer, range(1))
    _, rest = pieces_of_optimizer(optimizer, named(parameters))
    merged = merge_rest(rest, mesh.world)
    assert len(merged["groups"][0]["params"]) > len(rest["groups"][0]["params"])
    assert merged["groups"][1]["params"].count("scale") == 1

    rest["groups"][1]["lr"] = 0.1 * (1 + dist.get_rank())
    with pytest.raises(ValueError, match=r"param group 1 has lr = 0\.1 on rank 0 and 0\.2 on rank 1"):
        merge_rest(rest, mesh.world)
    rest["groups"] = rest["groups"][: 1 + dist.get_rank()]
    with pytest.raises(ValueError, match=r"has \[1, 2\] param groups"):
        merge_rest(rest, mesh.world)


def test_a_state_of_experts_that_no_other_mesh_could_read_is_refused() -> None:
    ep = Mesh.imagine(1, Sizes(world=2, ep=2)).axis("ep")
    experts = shard_parameter((4, 3), initial=Initial(), leading=ep)
    optimizer = torch.optim.SGD([experts], lr=0.1)
    # One number for each of this rank's experts.
    optimizer.state[experts]["norm"] = torch.ones(2)
    with pytest.raises(ValueError, match=r"keeps 'norm' of shape \(2,\) for 'experts', whose part here is \(2, 3\)"):
        pieces_of_optimizer(optimizer, {experts: "experts"})
