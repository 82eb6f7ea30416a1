"""The layers of a network are the one list of like children with most parameters."""

from torch import nn

from lightning_megatron.any_module.layer_list import layers_of
from lightning_megatron.any_module.tensor_styles import cut_linears
from lightning_megatron.mesh import Mesh, Sizes


class Two(nn.Module):
    """A list of small layers, one of large ones, and a chain of unlike modules that is larger than both."""

    def __init__(self) -> None:
        super().__init__()
        self.small = nn.ModuleList(nn.Linear(2, 2) for _ in range(4))
        self.inner = nn.Module()
        self.inner.large = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.chain = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 8))


def test_the_largest_list_of_like_children_is_found() -> None:
    assert layers_of(Two()) == ("inner.large.0", "inner.large.1", "inner.large.2")


def test_the_largest_list_is_that_of_the_model_whose_linears_are_cut() -> None:
    net = Two()
    net.middle = nn.ModuleList(nn.Linear(7, 7) for _ in range(3))
    cut_linears(net, {"inner.large.*": "colwise"}, Mesh.imagine(0, Sizes(world=2, tp=2)).tp)
    assert net.inner.large[0].weight.shape == (4, 8)
    assert layers_of(net) == ("inner.large.0", "inner.large.1", "inner.large.2")


def test_layers_in_a_list_of_lists_are_those_of_the_largest() -> None:
    net = nn.Module()
    net.stages = nn.ModuleList(nn.ModuleList(nn.Linear(size, size) for _ in range(2)) for size in (2, 4, 3))
    assert layers_of(net) == ("stages.1.0", "stages.1.1")


def test_a_list_itself_is_one_and_one_layer_is_none() -> None:
    assert layers_of(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))) == ("0", "1")
    assert layers_of(nn.ModuleList([nn.Linear(2, 2)])) == () == layers_of(nn.Linear(2, 2))


def test_a_layer_that_stands_twice_counts_once() -> None:
    layer = nn.Linear(2, 2)
    assert layers_of(nn.Sequential(layer, layer)) == ("0",)


class Layer(nn.Module):
    """What layers of two kinds have in common."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)


class CrossLayer(Layer):
    """A layer of another kind."""


def test_layers_of_several_kinds_are_like_where_they_share_a_class() -> None:
    assert layers_of(nn.ModuleList([Layer(), CrossLayer()])) == ("0", "1")
    assert layers_of(nn.ModuleList([Layer(), nn.Linear(2, 2)])) == ()
