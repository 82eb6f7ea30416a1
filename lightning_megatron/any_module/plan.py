"""How a network that knows nothing of parallelism is cut, as data."""

from collections.abc import Mapping, Sequence
from dataclasses import field

from torch import nn

from lightning_megatron.any_module.around_layers import known_readers
from lightning_megatron.any_module.cut_experts import mark_experts, misfit_of_experts
from lightning_megatron.any_module.layer_list import is_list, layers_of
from lightning_megatron.any_module.tensor_styles import EMBEDDING, REPLICATE, STYLES, is_style, matching, styles_of
from lightning_megatron.config_dataclass import config_dataclass
from lightning_megatron.tensor.linear import ParallelLinear


@config_dataclass
class ModelPlan:
    """How the network of a LightningModule is cut: its layers over pipeline stages, its linears over tp.

    Names are those of `named_modules()` of the LightningModule; in patterns * stands for one name or number.
    """

    layers: tuple[str, ...] = ()
    """Lists of layers in the order in which the forward calls them, as ("model.encoder.block", "model.decoder.block").
    Empty: the one list of like children that holds most parameters."""
    skip_connections: tuple[str, ...] = ()
    """Layers whose outputs other layers than the next one read too, as the first halves of a U-Net:
    ("net.layers.0", "net.layers.1"). They go to all stages after theirs."""
    on_all_stages: tuple[str, ...] = ()
    """Modules around the layers that the step uses outside of the network's call, as ("net.embedding",): every stage
    has their weights."""
    styles: Mapping[str, str] = field(default_factory=dict)
    """Style of linears under tensor parallelism by pattern, as {"net.layers.*.up": "colwise"}; they come before those
    that a model of transformers brings along."""
    experts: tuple[str, ...] = ()
    """Modules that hold experts, by pattern, as ("net.layers.*.experts",), beside those that transformers marks. All
    their weights have a row for each of `num_experts`; they are called with tokens [T, H], the experts that each chose
    [T, K] and their probabilities [T, K], and return the sums [T, H]."""

    def __post_init__(self) -> None:
        if unknown := sorted(style for style in set(self.styles.values()) if not is_style(style)):
            raise ValueError(f"plan styles ({', '.join(map(repr, unknown))}) must be among {', '.join(STYLES)}")

    def faults(self, module: nn.Module) -> list[str]:
        """Errors of the plan for this module, one sentence each."""
        modules, faults = dict(module.named_modules()), []
        for name in self.layers:
            if name not in modules:
                likely = ", ".join(one for one, child in modules.items() if is_list(child)) or "none"
                faults.append(f"plan layers ({name!r}) is no module of {type(module).__name__}; its lists are {likely}")
            elif not is_list(modules[name]):
                faults.append(
                    f"plan layers ({name!r}) is a {type(modules[name]).__name__}; it must be an nn.ModuleList or "
                    "nn.Sequential of layers"
                )
        faults += [
            f"plan on_all_stages ({name!r}) is no module of {type(module).__name__}"
            for name in self.on_all_stages
            if name not in modules
        ]
        if len({name.partition(".")[0] for name in self.layers}) > 1:
            faults.append(f"plan layers ({', '.join(self.layers)}) must lie in one network, whose call is cut")
        if not faults:
            faults += self._faults_of_skips(module)
        found = list(matching(module, self.styles))
        for pattern in self.styles:
            if not any(True for _ in matching(module, {pattern: self.styles[pattern]})):
                linears = [one for one, child in modules.items() if isinstance(child, nn.Linear)]
                shown = f"; its linears are {', '.join(linears[:6])}, ..." if linears else ""
                faults.append(f"plan styles: no module of {type(module).__name__} is called {pattern!r}{shown}")
        faults += self._faults_of_experts(module)
        faults += [
            f"plan styles: {name} ({style}) is a {type(child).__name__}; {style} is a style of "
            + ("nn.Embedding" if style == EMBEDDING else "nn.Linear")
            for name, child, style in found
            if style not in (REPLICATE, "replicated_with_grad_allreduce")
            and not isinstance(child, nn.Embedding if style == EMBEDDING else (nn.Linear, ParallelLinear))
        ]
        return faults

    def mark_experts(self, module: nn.Module) -> None:
        """Marks the modules of experts that the plan names, so that they are cut as those of transformers."""
        for _, experts in self._experts_in(module, *self.experts):
            if not misfit_of_experts(experts):
                mark_experts(experts)

    def _experts_in(self, module: nn.Module, *patterns: str) -> list[tuple[str, nn.Module]]:
        return [(name, found) for name, found, _ in matching(module, dict.fromkeys(patterns, ""))]

    def _faults_of_experts(self, module: nn.Module) -> list[str]:
        return [
            f"plan experts: no module of {type(module).__name__} is called {pattern!r}"
            for pattern in self.experts
            if not self._experts_in(module, pattern)
        ] + [
            f"plan experts: {name} ({type(experts).__name__}) {misfit}"
            for name, experts in self._experts_in(module, *self.experts)
            if (misfit := misfit_of_experts(experts))
        ]

    def _faults_of_skips(self, module: nn.Module) -> list[str]:
        layers = [f"{name}.{one}" for name, child in module.named_children() for one in self.layers_in(name, child)[0]]
        unknown = [name for name in self.skip_connections if name not in layers]
        if not unknown:
            return []
        known = f"its layers are {layers[0]} to {layers[-1]}" if layers else "no list of its layers was found"
        return [f"plan skip_connections ({', '.join(unknown)}) must be layers that are cut; {known}"]

    def layers_in(self, name: str, network: nn.Module) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """Names of the layers of a network, the child `name` of a module, and which of them end a list but the last."""
        if not self.layers:
            return layers_of(network), ()
        lists = [one.removeprefix(f"{name}.") for one in self.layers if one.startswith(f"{name}.")]
        layers: list[str] = []
        ends = []
        for one in lists:
            layers += [f"{one}.{key}" for key, _ in network.get_submodule(one).named_children()]
            ends.append(len(layers) - 1)
        return tuple(layers), tuple(ends[:-1])

    def skips_in(self, name: str) -> set[str]:
        """Layers within a network, the child `name` of a module, whose outputs go to all stages after theirs."""
        return {one.removeprefix(f"{name}.") for one in self.skip_connections if one.startswith(f"{name}.")}

    def readers_in(self, module: nn.Module, name: str, layers: Sequence[str]) -> dict[str, frozenset[int]]:
        """By module around the layers of a network, the child `name` of `module`: the layers that read it, where that
        is known, and no other stage has to have it."""
        found = known_readers(module, name, layers)
        return {one: indices for one, indices in found.items() if indices and f"{name}.{one}" not in self.on_all_stages}

    def styles_in(self, name: str, network: nn.Module) -> dict[str, str]:
        """Styles by pattern within a network, the child `name` of a module."""
        prefix = f"{name}."
        own = {key.removeprefix(prefix): style for key, style in self.styles.items() if key.startswith(prefix)}
        return {**own, **{pattern: style for pattern, style in styles_of(network).items() if pattern not in own}}
