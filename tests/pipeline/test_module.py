"""A pipelined model builds its own stage only, under the names of the unsplit model."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron.mesh import Mesh, Sizes, StageLayout, ambient
from lightning_megatron.pipeline.module import Part, PipelineModule


def mesh_of_stage(stage: int, pp: int) -> Mesh:
    # Stages run against the ranks: the last one is on rank 0.
    return Mesh.imagine(pp - 1 - stage, Sizes(world=pp, pp=pp))


def parts(built: list[str]) -> list[Part]:
    def build(name: str) -> nn.Module:
        built.append(name)
        return nn.Linear(4, 4)

    names = ["embedding", "blocks.0", "blocks.1", "blocks.2", "head"]
    symbols = ["E", "t", "t", "t", "L"]
    shares = {"head": {"embedding": partial(build, "embedding again")}}
    return [
        Part(name=name, build=partial(build, name), symbol=symbol, shares=shares.get(name, {}))
        for name, symbol in zip(names, symbols, strict=True)
    ]


def test_each_stage_builds_its_own_parts_and_all_together_the_whole_model() -> None:
    built_whole: list[str] = []
    whole = PipelineModule(parts(built_whole), mesh=Mesh.single())
    names: list[str] = []
    for stage in range(3):
        built: list[str] = []
        model = PipelineModule(parts(built), mesh=mesh_of_stage(stage, 3))
        own = ["embedding", "blocks.0"] if stage == 0 else ["blocks.1"] if stage == 1 else ["blocks.2", "head"]
        assert list(model.parts_of(stage)) == own
        # The tied weight is on the first stage by itself, and on the last because the head shares it.
        assert built == own + (["embedding again"] if stage == 2 else [])
        names += model.state_dict().keys()
    assert set(names) == set(whole.state_dict())
    assert names.count("embedding.weight") == 2 and "embedding again" not in built_whole


def test_a_chain_may_be_indexed_where_it_holds_the_module() -> None:
    modules = {str(i): nn.Linear(i + 1, i + 2) for i in range(4)}
    chain: Any = PipelineModule.from_modules(modules, mesh=mesh_of_stage(1, 2))
    assert len(chain) == 4 and chain[2] is modules["2"] and chain[-1] is modules["3"]
    assert list(chain) == [modules["2"], modules["3"]]
    with pytest.raises(IndexError, match=r"module 0 of the chain is on another pipeline stage .* \(1\); go over named"):
        chain[0]


@pytest.mark.parametrize("placement", ["loop", "v"])
def test_a_rank_builds_the_parts_of_all_its_stages(placement: Any) -> None:
    sizes = Sizes(world=2, pp=2, vp=2, placement=placement, stage_layout=StageLayout(text="t|tt|tt|t*3"))
    modules = {f"b{i}": nn.Linear(1, 1) for i in range(8)}
    model = PipelineModule.from_modules(modules, mesh=Mesh.imagine(0, sizes))
    assert model.mesh.pp.is_last and model.mesh.own_stages == ((1, 3) if placement == "loop" else (0, 3))
    assert [model.parts_of(stage) for stage in range(4)] == [
        ("b0",),
        ("b1", "b2"),
        ("b3", "b4"),
        ("b5", "b6", "b7"),
    ]
    held = [name for name, _ in model.named_children()]
    assert held == [name for stage in model.mesh.own_stages for name in model.parts_of(stage)]


def test_too_few_parts_for_the_stages_are_refused() -> None:
    with pytest.raises(ValueError, match=r"layers \(3\) must be at least pipeline_model_parallel_size .* \(4\)"):
        PipelineModule(parts([]), mesh=mesh_of_stage(0, 4))


def test_a_chain_alone_computes_what_it_computes_as_a_sequential() -> None:
    chain = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    model = PipelineModule.from_modules({"in": chain[0], "mid.tanh": chain[1], "out": chain[2]}, mesh=Mesh.single())
    x = torch.randn(4, 3)
    torch.testing.assert_close(model(x), chain(x), rtol=0, atol=0)
    assert sorted(dict(model.named_parameters())) == ["in.bias", "in.weight", "out.bias", "out.weight"]
    for args, kwargs in (((x, x), {}), ((), {"x": x})):
        with pytest.raises(ValueError, match=r"takes one positional input.*override PipelineModule.prepare"):
            model(*args, **kwargs)


def test_the_ambient_mesh_is_that_of_the_block_and_a_stage_cannot_run_alone() -> None:
    modules = {"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)}
    with ambient(mesh_of_stage(1, 2)):
        model = PipelineModule.from_modules(modules)
    assert model.parts_of(1) == ("b",) and [name for name, _ in model.named_children()] == ["b"]
    assert PipelineModule.from_modules(modules).parts_of(0) == ("a", "b")
    with pytest.raises(RuntimeError, match=r"holds stage 1 of 2 and was called outside of"):
        model(torch.zeros(1, 2))


class Counting(PipelineModule):
    """Its parts read a context that every stage makes by itself."""

    def prepare(self, x: Tensor, scale: float = 1.0) -> tuple[Tensor, float]:
        return x, scale

    def run_part(self, name: str, hidden: Tensor, context: float) -> Tensor:
        output: Tensor = self.get_submodule(name)(hidden) * context
        return output


def test_a_subclass_decides_what_its_parts_take() -> None:
    chosen = [Part(name=f"p{i}", build=partial(nn.Linear, 2, 2), cost=1.0) for i in range(2)]
    model = Counting(chosen, mesh=Mesh.single())
    x = torch.randn(3, 2)
    layers = list(model.children())
    torch.testing.assert_close(model(x, scale=2.0), layers[1](layers[0](x) * 2) * 2)


def test_training_alone_counts_steps_and_evaluation_does_not() -> None:
    model = PipelineModule.from_modules(
        {"a": nn.Linear(2, 2)},
        mesh=Mesh.single(),
    )
    model(torch.zeros(1, 2))
    model.eval()(torch.zeros(1, 2))
    with torch.no_grad():
        model.train()(torch.zeros(1, 2))
    assert model.draws.step == 1


def test_stages_that_would_share_a_parameter_are_refused() -> None:
    shared, mesh = nn.Linear(2, 2), Mesh.imagine(0, Sizes(world=2, pp=2))
    with pytest.raises(ValueError, match="share a parameter"):
        PipelineModule.from_modules({"0": shared, "1": nn.Linear(2, 2), "2": shared}, mesh=mesh)
    # On one stage it is one parameter with two uses, as in plain torch.
    chain = PipelineModule.from_modules({"0": shared, "1": shared}, mesh=Mesh.single())
    assert len(list(chain.parameters())) == 2
