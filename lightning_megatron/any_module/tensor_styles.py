"""Linears of a network that was written for one device, cut over `tp` by styles that name patterns have.

    style                            what becomes of a linear, and of its output
    colwise                          column-parallel: the features of a rank
    colwise_gather_output            the same, and all features are gathered: whole
    packed_colwise, packed_colwise:3 colwise of each of two blocks of outputs, or of so many, which lie side by side
    rowwise                          row-parallel, behind a colwise one: whole
    rowwise_split_input              row-parallel, behind one that is whole: whole
    embedding_rowwise                an embedding cut by its rows, the vocabulary: whole
    replicated_with_grad_allreduce   whole, on features of a rank: its gradient is a term of a sum over tp
    replicate                        whole, with all linears of its parent: overrules the plan of a model
    mla_kv_a_proj                    whole; the last features, a key's rotary part, go to heads of a rank (DeepSeek's
                                     multi-head latent attention), the others to a colwise linear

The words are those of transformers. A style that is not among these leaves all linears of its parent whole: what one
of them gives another takes.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_megatron.any_module.check_styles import StyleChecks
from lightning_megatron.any_module.cut_experts import has_experts
from lightning_megatron.any_module.cut_logits import joined
from lightning_megatron.any_module.latent_linear import LatentLinear
from lightning_megatron.comm import differentiable
from lightning_megatron.mesh import Axis
from lightning_megatron.sharding import Initial, Shard, ShardedParameter, shard_of, shard_parameter, sharded_parameters
from lightning_megatron.tensor.linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    TokenKeys,
    column_parallel_linear,
    row_parallel_linear,
)
from lightning_megatron.tensor.weight_gradients import has_gradient_hooks
from lightning_megatron.tensor.whole_linear import as_a_call

REPLICATE = "replicate"
STYLES = (
    "colwise",
    "colwise_gather_output",
    "packed_colwise",
    "rowwise",
    "rowwise_split_input",
    "embedding_rowwise",
    "replicated_with_grad_allreduce",
    REPLICATE,
    "mla_kv_a_proj",
)
# What linears are called that go into attention and feed-forward networks, and that come out of them.
_INTO: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "fc1", "fc_in", "c_fc", "dense_h_to_4h", "lin1", "up_proj")
_INTO += ("gate_proj", "wi", "wi_0", "wi_1", "w1", "w3")
# BERT's kin: linears of modules that go in, and `output.dense` beside them comes out.
_BESIDE_OUTPUT = {"self": ("query", "key", "value"), "intermediate": ("dense",)}
# The linears of peft's module: the model's own, and those of adapters.
_ADAPTED = re.compile(r"\.(base_layer|lora_[AB]\.[^.]+)$")
_OUT_OF = ("o_proj", "out_proj", "fc2", "fc_out", "c_proj", "dense_4h_to_h", "lin2", "down_proj", "wo", "w2")
BY_OUTPUTS = ("colwise", "colwise_gather_output")
_PACKED = re.compile(r"packed_colwise(?::([2-9]))?")
EMBEDDING = "embedding_rowwise"
BY_INPUTS = ("rowwise", "rowwise_split_input")


def is_style(style: str) -> bool:
    """Whether a style is known."""
    return style in STYLES or _PACKED.fullmatch(style) is not None


def is_by_outputs(style: str) -> bool:
    """Whether a style cuts a linear by its outputs."""
    return style in BY_OUTPUTS or _PACKED.fullmatch(style) is not None


def _num_blocks(style: str) -> int:
    """Blocks of outputs that a linear packs."""
    found = _PACKED.fullmatch(style)
    return 1 if found is None else int(found[1] or 2)


def styles_of(network: nn.Module) -> dict[str, str]:
    """The styles that a network brings along, by name pattern; transformers' models have some in `_tp_plan`.

    Such plans leave out the embedding of tokens, which is cut as well. Linears of modules of which a plan says nothing
    are cut by what they are called, where a module has no other matrices.
    """
    styles: dict[str, str] = {}
    for prefix, model in _with_plans(network):
        given: Any = model._tp_plan or {}
        planned = {parent_of(name) for name, _, _ in matching(model, given)}
        named = dict(_by_names(model))
        left_out = {
            name: style for name, style in named.items() if not given or _is_left_out(model, name, named, planned)
        }
        plan = {**given, **left_out}
        if not plan:
            continue
        embedding = _embedding_of(model)
        found = [name for name, one in model.named_modules() if one is embedding and type(one) is nn.Embedding]
        own = {**dict.fromkeys(found, EMBEDDING), **plan}
        styles |= {f"{prefix}{key}": style for key, style in own.items() if style != REPLICATE}
    return styles


def _with_plans(network: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The outermost modules in a network that have a plan of their own, each with what stands before its names."""
    # Not by getattr: a PeftModel hands on the attributes of the model inside.
    if isinstance(network.__dict__.get("_tp_plan", getattr(type(network), "_tp_plan", None)), Mapping):
        yield prefix, network
        return
    for name, child in network.named_children():
        yield from _with_plans(child, f"{prefix}{name}.")


def _embedding_of(network: nn.Module) -> nn.Module | None:
    """The embedding of tokens of a model of transformers."""
    find: Any = getattr(network, "get_input_embeddings", None)
    try:
        return find() if callable(find) else None
    except NotImplementedError:
        # Models of images have none.
        return None


def _is_left_out(model: nn.Module, name: str, named: Mapping[str, str], planned: Collection[str]) -> bool:
    """Whether a linear may be cut although a plan, with styles for children of `planned`, is silent on its module.

    All matrices of the module have to be those of linears with known names. The module has no weights of its own, and
    no norm over all features of a linear that is cut.
    """
    parent = parent_of(name)
    weights = [
        (key.rpartition(".")[0], one) for key, one in model.get_submodule(parent).named_parameters(prefix=parent)
    ]
    cut = {len(weight) for owner, weight in weights if weight.ndim > 1 and named.get(owner) == "colwise"}
    others = [
        weight.ndim > 1 or owner == parent or weight.numel() in cut for owner, weight in weights if owner not in named
    ]
    return parent not in planned and not any(others)


def _by_names(network: nn.Module) -> Iterator[tuple[str, str]]:
    """Styles of linears by their own names, of those whose counterpart has its name too."""
    linears = [name for name, module in network.named_modules() if type(module) is nn.Linear]
    known, by_parent = set(linears), dict[str, set[str]]()
    for name in linears:
        by_parent.setdefault(parent_of(name), set()).add(name.rpartition(".")[2])
    for name in linears:
        parent, _, last = name.rpartition(".")
        beside = by_parent.get(parent, set())
        kind = parent.rpartition(".")[2]
        # Of several that come out, one may read what another one gives.
        comes_out = len(beside.intersection(_OUT_OF)) == 1
        if last in _INTO and comes_out:
            yield name, "colwise"
        elif last in _OUT_OF and comes_out and beside.intersection(_INTO):
            yield name, "rowwise"
        beside_parent = parent.removesuffix(kind)
        given = (f"{beside_parent}{other}.{one}" for other, names in _BESIDE_OUTPUT.items() for one in names)
        if last in _BESIDE_OUTPUT.get(kind, ()) and f"{beside_parent}output.dense" in known:
            yield name, "colwise"
        elif kind == "output" and last == "dense" and any(one in known for one in given):
            yield name, "rowwise"


def matching(network: nn.Module, styles: Mapping[str, str]) -> Iterator[tuple[str, nn.Module, str]]:
    """Each module whose name fits a pattern, in which * stands for one number or name, with its style."""
    patterns = [(re.compile(re.escape(key).replace(r"\*", "[^.]+")), style) for key, style in styles.items()]
    for name, module in network.named_modules():
        found = next((style for pattern, style in patterns if pattern.fullmatch(name)), None)
        if found is not None:
            yield from _with_adapters(name, module, found)


def _with_adapters(name: str, module: Any, style: str) -> Iterator[tuple[str, nn.Module, str]]:
    """Yields a module with its name and style; for peft's wrapper, its linear and the part of each adapter that is cut.

    An adapter adds B A x. Where the outputs are cut, B is, and A is whole, as its input; where the inputs are, A is.
    """
    base: Any = getattr(module, "base_layer", None)
    is_known = (is_by_outputs(style) or style in (*BY_INPUTS, EMBEDDING)) and type(base) in (nn.Linear, nn.Embedding)
    if not (is_known and _is_lora(module)):
        yield name, module, style
        return
    yield f"{name}.base_layer", base, style
    if style != EMBEDDING:
        part = "lora_B" if is_by_outputs(style) else "lora_A"
        for adapter, linear in module.get_submodule(part).named_children():
            yield f"{name}.{part}.{adapter}", linear, style


def _is_lora(module: nn.Module) -> bool:
    """Whether a module of peft adds B A x alone: not DoRA, whose norms are of whole weights, nor another kind."""
    if len(getattr(module, "lora_magnitude_vector", ())):
        return False
    parts = [module._modules.get(part) for part in ("lora_A", "lora_B")]
    return all(isinstance(one, nn.ModuleDict) and all(type(x) is nn.Linear for x in one.values()) for one in parts)


def cut_by(network: nn.Module, styles: Mapping[str, str], size: int) -> list[tuple[str, nn.Module, str]]:
    """The modules of a network that so many ranks cut, each with its style: those whose parents fit in all."""
    found = list(matching(network, styles))
    whole = {parent_of(name) for name, _, style in found if _misfit(network, name, style, size)}
    tied = _tied(network, {name: style for name, _, style in found if parent_of(name) not in whole})
    whole |= {parent_of(name) for name, module, _ in found if not tied.isdisjoint(module.parameters())}
    return [(name, module, style) for name, module, style in found if parent_of(name) not in whole]


def reason_of_whole(network: nn.Module, styles: Mapping[str, str], name: str, size: int) -> str:
    """Why a module of that name, which has a style, stays whole over so many ranks."""
    beside = [one for one in matching(network, styles) if parent_of(one[0]) == parent_of(name)]
    for other, _, style in sorted(beside, key=lambda one: one[0] != name):
        if misfit := _misfit(network, other, style, size):
            return misfit if other == name else f"as {other.rpartition('.')[2]} beside it, {misfit}"
    return "its weight is tied to another module's"


def parent_of(name: str) -> str:
    """Name of the module that a linear is a part of; peft's stands between, where there are adapters."""
    return _ADAPTED.sub("", name).rpartition(".")[0]


def is_adapter(name: str) -> bool:
    """Whether a linear of that name is one of an adapter of peft."""
    found = _ADAPTED.search(name)
    return found is not None and found[1] != "base_layer"


def _tied(network: nn.Module, styles: Mapping[str, str]) -> set[nn.Parameter]:
    """Weights of several modules that are not all cut alike by their first dim: what one gives away, another needs."""
    owners: dict[nn.Parameter, list[str]] = {}
    for name, child in network.named_modules():
        for weight in child._parameters.values():
            if weight is not None:
                owners.setdefault(weight, []).append(name)
    return {
        weight
        for weight, names in owners.items()
        if len(names) > 1 and not all(styles.get(name) in (*BY_OUTPUTS, EMBEDDING) for name in names)
    }


def cut_linears(
    network: nn.Module,
    styles: Mapping[str, str],
    tp: Axis,
    *,
    is_staged: bool = False,
    absent: Collection[str] = (),
) -> Callable[[nn.Parameter], bool]:
    """Cuts the linears of a network in place; over stages (`is_staged`) its own forward does not run to its end.

    Those within `absent` modules stay as they are: this rank will not have their weights. Returns what tells, once
    modules were looked at, whether a weight is used on the features of a rank.
    """
    copies: dict[str, _SharedCopy] = {}
    cut_modules: dict[nn.Module, nn.Module] = {}
    # Slices of weights by the whole ones, which modules may share.
    slices: dict[Tensor, nn.Parameter] = {}
    parents: set[str] = set()
    skipped = tuple(f"{one}." for one in absent)
    for name, module, style in cut_by(network, styles, tp.size):
        if f"{name}.".startswith(skipped):
            continue
        parent = parent_of(name)
        owner = network.get_submodule(parent)
        parents.add(parent)
        if style == "replicated_with_grad_allreduce":
            for child in module.modules():
                for key, weight in list(child.named_parameters(recurse=False)):
                    sum_gradients(child, key, weight, tp)
            continue
        if isinstance(module, nn.Embedding):
            embedding = RowwiseEmbedding(module, tp)
            embedding.weight = slices.setdefault(module.weight, embedding.weight)
            cut_modules[module] = embedding
            continue
        assert isinstance(module, nn.Linear)
        if style == "mla_kv_a_proj":
            cut_modules[module] = LatentLinear(module, tp, _rotary_size(owner))
        else:
            kind = RowwiseLinear if style in BY_INPUTS else ColwiseLinear
            cut = kind(module, tp, style)
            cut.weight = slices.setdefault(module.weight, cut.weight)
            cut_modules[module] = cut
            if isinstance(cut, ColwiseLinear):
                # The adapters' own inputs come between those of one parent.
                key = name if ".lora_B." in name else parent
                cut.copies = copies[key] = copies.get(key) or _SharedCopy((owner, network), tp)
    put_everywhere(network, cut_modules)
    checks = StyleChecks(tp)
    with_plans: list[tuple[str, Any]] = list(_with_plans(network))
    planned = {
        f"{prefix}{parent_of(name)}"
        for prefix, model in with_plans
        for name, _, _ in matching(model, model._tp_plan or {})
    }
    for parent in sorted(parents - {""} if is_staged else parents):
        if parent not in planned:
            # Code that a plan is made for finds its heads out by itself.
            checks.count_heads(network.get_submodule(parent))
        checks.watch(parent, network.get_submodule(parent), pattern_of(parent))
    return checks.is_on_features


def pattern_of(name: str) -> str:
    """The pattern of a module's name, with * for each number."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def put_everywhere(network: nn.Module, cut: Mapping[nn.Module, nn.Module]) -> None:
    """Puts cut modules into every place of the whole ones."""
    for owner in list(network.modules()):
        for name, child in owner._modules.items():
            if child is not None and child in cut:
                owner._modules[name] = cut[child]


def _misfit(network: nn.Module, name: str, style: str, size: int) -> str:
    """Why a module cannot be cut by its style over so many ranks; empty where it can."""
    module = network.get_submodule(name)
    if not is_style(style):
        return f"the style {style} is not known"
    if style == REPLICATE:
        return f"its style is {style}"
    if style == "replicated_with_grad_allreduce":
        return ""
    if has_hooks(module):
        return "it has hooks, or its weights have, which would see the part of a rank"
    if style == EMBEDDING:
        if type(module) is not nn.Embedding or module.max_norm or module.sparse or module.scale_grad_by_freq:
            return f"{style} is a style of nn.Embedding without max_norm, sparse and scale_grad_by_freq"
        num_rows = module.num_embeddings
        return f"{size} ranks do not divide its {num_rows} rows" if num_rows % size else ""
    if type(module) is not nn.Linear:
        return f"{style} is a style of nn.Linear, and not of {type(module).__module__}.{type(module).__name__}"
    if style == "mla_kv_a_proj":
        return "" if _rotary_size(network.get_submodule(parent_of(name))) else "its attention has no qk_rope_head_dim"
    features, blocks = module.in_features if style in BY_INPUTS else module.out_features, _num_blocks(style)
    if features % (blocks * size):
        of_blocks = "" if blocks == 1 else f" in {blocks} blocks"
        return f"{size} ranks do not divide its {features} features{of_blocks}"
    num_heads = 0 if style in BY_INPUTS or blocks > 1 else _num_heads(network, name, features)
    if num_heads % size:
        return f"{size} ranks do not divide its {num_heads} heads"
    return ""


def _num_heads(network: nn.Module, name: str, features: int) -> int:
    """Heads that a linear of an attention computes, by the size of a head that the attention names; 0: not known."""
    size = getattr(network.get_submodule(parent_of(name)), "head_dim", 0)
    return features // size if isinstance(size, int) and size > 0 and features % size == 0 else 0


def has_hooks(module: nn.Module) -> bool:
    """Whether code of others runs around a module's forward or backward, or on the gradients of its own weights."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    weights = (weight for weight in module._parameters.values() if weight is not None)
    return any(hooks) or any(map(has_gradient_hooks, weights))


def _rotary_size(attention: nn.Module) -> int:
    """Features of a key's rotary part, as transformers' attention modules call them; 0 where there is none."""
    size = getattr(attention, "qk_rope_head_dim", 0)
    return size if isinstance(size, int) else 0


class TakenParameter(ShardedParameter):
    """A weight whose values are those of a network that each process made, and not of a seed."""


class SummedParameter(TakenParameter):
    """A weight of whose gradient every rank has a term."""


def sum_gradients(module: nn.Module, name: str, weight: nn.Parameter, tp: Axis) -> None:
    """Makes the gradient of a weight that every rank of `tp` has, a parameter of that name, a term of a sum over it."""
    held = SummedParameter(weight.detach(), requires_grad=weight.requires_grad)
    held.shard = Shard(global_shape=tuple(weight.shape), replicas=(tp,), partial=tp)
    setattr(module, name, held)


def _as_made(linear: nn.Linear, tp: Axis) -> dict[str, Any]:
    """Arguments of a parallel linear of the same features, outside of sequence parallelism."""
    alone = Axis.alone(tp.ranks[tp.rank], "sp")
    return {"tp": tp, "sp": alone, "bias": linear.bias is not None, "initial": Initial()}


class OwnTokens(Protocol):
    """What linears of a part of a layer know of its tokens under sequence parallelism."""

    sp: Axis

    @property
    def are_cut(self) -> bool:
        """Whether the running layer is given own tokens."""

    def gathered(self, x: Tensor) -> Tensor | None:
        """A tensor equal to `x`, whose gradient is reduce-scattered; None where `x` is no gathered input."""


class _SharedCopy:
    """The input of colwise linears of one parent, whose gradient is summed over tp once for those that get the same."""

    def __init__(self, callers: Sequence[nn.Module], tp: Axis) -> None:
        self._tp = tp
        self.tokens: OwnTokens | None = None
        # Whether an uncompiled call has ended, and whether one changed an input in place between two linears.
        self._is_known = self._is_changed = False
        self._last: tuple[Tensor, int, bool, Tensor] | None = None
        # The parent may be a list, which nobody calls. Errors reach the network, whose hook alone is called for them.
        # With one on each parent each compiled layer would have a graph of its own.
        for caller in callers:
            caller.register_forward_hook(self.forget, always_call=caller is callers[-1])

    def __deepcopy__(self, memo: dict[int, Any]) -> "_SharedCopy":
        return _SharedCopy((), self._tp)

    def of(self, x: Tensor) -> Tensor:
        """The input for ranks that each compute other features of it."""
        is_recorded = torch.is_grad_enabled()
        # A compiler breaks its graph where code asks how often a tensor was changed: it goes by what calls before saw.
        is_traced = torch.compiler.is_compiling() and self._is_known
        version = 0 if is_traced else x._version
        if self._last is not None:
            source, was_version, was_recorded, copy = self._last
            if source is x and was_recorded == is_recorded:
                self._is_changed |= version != was_version
                if not (self._is_changed if is_traced else version != was_version):
                    return copy
        gathered = None if self.tokens is None else self.tokens.gathered(x)
        copy = differentiable.copy(x, self._tp) if gathered is None else gathered
        self._last = (x, version, is_recorded, copy)
        return copy

    def forget(self, *_: Any) -> None:
        """Lets go of the last input, as a call of the parent ends."""
        self._last = None
        self._is_known |= not torch.compiler.is_compiling()


class ColwiseLinear(ColumnParallelLinear):
    """A linear [*, I] to [*, O/tp], in the blocks of the whole one, or to all outputs [*, O] under
    `colwise_gather_output`."""

    copies: _SharedCopy

    def __init__(self, linear: nn.Linear, tp: Axis, style: str) -> None:
        super().__init__(linear.in_features, linear.out_features, **_as_made(linear, tp))
        # The gradient of the input is summed by `copies`.
        self.alone = Axis.alone(tp.ranks[tp.rank], "tp")
        self.gathers_output = style == "colwise_gather_output"
        self.in_features = linear.in_features
        self.out_features = linear.out_features // (1 if self.gathers_output else tp.size)
        self.num_blocks = _num_blocks(style)
        for _, weight, shard in list(sharded_parameters(self)):
            # `take_weights` takes what the shard says.
            weight.shard = replace(shard, blocks=self.num_blocks)  # type: ignore[attr-defined]
        take_weights(self, linear)
        self.register_forward_pre_hook(as_a_call)

    def forward(self, x: Tensor, tokens: TokenKeys | None = None) -> Tensor:
        x_TI = self.copies.of(x).reshape(-1, x.shape[-1])
        y_TO = column_parallel_linear(
            x_TI, self.weight, self.bias, tp=self.alone, sp=self.sp, gradients=self.weight_gradients, gemm=self.gemm
        )
        if self.gathers_output:
            return joined(y_TO.view(*x.shape[:-1], y_TO.shape[-1]), self.tp)
        return y_TO.view(*x.shape[:-1], y_TO.shape[-1])


class RowwiseLinear(RowParallelLinear):
    """A linear [*, I/tp] to [*, O], or of a whole input [*, I], as all are under `rowwise_split_input`."""

    def __init__(self, linear: nn.Linear, tp: Axis, style: str) -> None:
        super().__init__(linear.in_features, linear.out_features, **_as_made(linear, tp))
        self.splits_input = style == "rowwise_split_input"
        self.tokens: OwnTokens | None = None
        """Where it is set, the output is that of own tokens."""
        self.in_features, self.out_features = linear.in_features, linear.out_features
        take_weights(self, linear)
        self.register_forward_pre_hook(as_a_call)

    def forward(self, x: Tensor, tokens: TokenKeys | None = None) -> Tensor:
        # What stands in front of a linear that is cut by what it is called may return whole features.
        if self.splits_input or x.shape[-1] == self.in_features:
            x = differentiable.split(x, self.tp, dim=-1)
        if self.tokens is not None and self.tokens.are_cut:
            return self._of_own_tokens(x, self.tokens.sp)
        y_TO = super().forward(x.reshape(-1, x.shape[-1]))
        return y_TO.view(*x.shape[:-1], y_TO.shape[-1])

    def _of_own_tokens(self, x: Tensor, sp: Axis) -> Tensor:
        """The output [B, T/sp, *, O] from the features of this rank of all tokens [B, T, *, I/tp]."""
        # Scattered are the tokens of one rank after those of another.
        by_rank: Tensor = x.unflatten(1, (sp.size, -1)).transpose(0, 1)
        y_TO = row_parallel_linear(
            by_rank.reshape(-1, x.shape[-1]),
            self.weight,
            # Every rank has a term of the bias's gradient, of its own tokens.
            None if self.bias is None else differentiable.copy(self.bias, sp),
            tp=self.tp,
            sp=sp,
            gradients=self.weight_gradients,
            gemm=self.gemm,
            num_chunks=self.num_chunks,
            is_symmetric=self.is_symmetric,
        )
        return y_TO.view(*by_rank.shape[1:-1], y_TO.shape[-1])


class RowwiseEmbedding(nn.Embedding):
    """An embedding of tokens [*] to [*, H], of which a rank has the rows of V/tp tokens."""

    weight: nn.Parameter

    def __init__(self, embedding: nn.Embedding, tp: Axis) -> None:
        nn.Module.__init__(self)
        self.tp = tp
        self.num_embeddings, self.embedding_dim = embedding.num_embeddings, embedding.embedding_dim
        self.padding_idx, self.max_norm, self.norm_type = embedding.padding_idx, None, embedding.norm_type
        self.scale_grad_by_freq = self.sparse = False
        self.weight = shard_parameter(tuple(embedding.weight.shape), initial=Initial(), dim=0, axis=tp)
        take_weights(self, embedding)

    def forward(self, input: Tensor) -> Tensor:
        num_own = self.num_embeddings // self.tp.size
        own = input - self.tp.rank * num_own
        is_foreign = (own < 0) | (own >= num_own)
        rows = functional.embedding(own.masked_fill(is_foreign, 0), self.weight)
        if self.padding_idx is not None:
            # The gradient of the padding's row stays zero.
            rows = torch.where((input == self.padding_idx)[..., None], rows.detach(), rows)
        return differentiable.reduce(rows.masked_fill(is_foreign[..., None], 0), self.tp)


def names_of_taken(module: nn.Module) -> set[str]:
    """Names of sharded parameters whose values are those of a network that each process made, and not of a seed."""
    kinds = (ColwiseLinear, RowwiseLinear, RowwiseEmbedding)
    found = set()
    for name, child in module.named_modules():
        # Experts as transformers has them are cut too.
        is_taken = isinstance(child, kinds) or has_experts(child)
        for key, weight in child.named_parameters(recurse=False):
            if is_taken or isinstance(weight, TakenParameter):
                found.add(f"{name}.{key}" if name else key)
    return found


@torch.no_grad()
def take_weights(cut: nn.Module, whole: nn.Module) -> None:
    """Gives a cut module this rank's slices of the weights of the whole one, on their device."""
    for name, weight in whole.named_parameters():
        shard = shard_of(cut.get_parameter(name))
        values = shard.part_of(weight).detach().clone(memory_format=torch.contiguous_format)
        held = ShardedParameter(values, requires_grad=weight.requires_grad)
        held.shard = shard
        setattr(cut, name, held)
