"""A model that was written for one device, cut into stages at its layers, with its own forward on every stage.

On each stage the model's forward runs as it is written. A layer of an earlier stage returns what was received from
there; the last layer of the stage leaves the forward, and what it returned goes to the next stage. What stands around
the layers (embeddings, masks, rotary tables, the head) is held, and computed, by every stage that reads it, as far as
that is known, else by all; the gradients of its weights are summed over the stages that hold them.

    stage 0    embedding   layer 0 ► layer 1 ─────► sent
    stage 1    (NaN)       (NaN)     received ────► layer 2 ► layer 3    norm   head   loss

What a stage does not have, and a layer of an earlier stage other than the last, returns placeholders: NaN, and in the
first calls marked as `Unknown` with all that is computed from them. Whoever reads one, reads what this stage does not
have, and no number of it can pass for a right one.
"""

import inspect
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_megatron.any_module.check_styles import is_look_due, without_fp8
from lightning_megatron.any_module.cut_error import CutError
from lightning_megatron.any_module.cut_tokens import ContextAttention, CutTokens, hidden_of
from lightning_megatron.any_module.deviation import relative_deviation
from lightning_megatron.any_module.loss_count import mean_count
from lightning_megatron.any_module.skeleton import put_together, taken_apart
from lightning_megatron.any_module.tensor_styles import ColwiseLinear
from lightning_megatron.any_module.unknown import Unknown, has_unknown
from lightning_megatron.any_module.whole_weights import (
    SummedInCalls,
    copied,
    gradients,
    recording,
    stand_ins,
    told_apart,
    whole_weights,
)
from lightning_megatron.comm import collectives, rng
from lightning_megatron.mesh import Mesh
from lightning_megatron.pipeline.module import Part, PipelineModule, StagePart

_NUM_CHECKED = 8
"""Calls of a rank in which it looks for numbers that a stage does not have."""

_CUT = "_lightning_megatron_cut"
_LAYER = "_lightning_megatron_layer"


class _StageEnd(BaseException):
    """Leaves the model's forward behind the last layer of a stage; `except Exception` lets it pass."""


class CutModel(PipelineModule):
    """The stages of `model`, a module that stays what it is; found by `cut_of`.

    `layers` are names of its layers in the order in which its forward calls them, `ends` how many of them end a list
    whose output later layers read too (the last layer of an encoder), `skips` names of others that are read so;
    `is_on_features` tells which weights are used on the features of a rank of tp. `absent` names the modules around the
    layers that no stage of this rank reads, as `absent_modules` finds. The parameters and children are the model's own,
    under its own names. Layers of other ranks and absent modules lose their weights. Raises ValueError for a layer
    whose weight another module has too, and for a stage without a layer.
    """

    _whole: nn.Module

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[str],
        *,
        ends: Sequence[int] = (),
        skips: Collection[str] = (),
        mesh: Mesh,
        attention: ContextAttention | None = None,
        is_on_features: Callable[[nn.Parameter], bool] = lambda weight: False,
        absent: Collection[str] = (),
    ) -> None:
        parts = [Part(name=name, build=partial(model.get_submodule, name)) for name in layers]
        super().__init__(parts, mesh=mesh)
        # The children and weights are the model's: this is another view of them.
        self._modules, self._parameters, self._buffers = model._modules, model._parameters, model._buffers
        self._whole = model
        self._ends = tuple(ends)
        # Layers whose output is for all stages after theirs, by index.
        self._shared = {*ends, *(index for index, name in enumerate(layers) if name in skips)}
        self._stage = -1
        self._received: dict[int, Any] = {}
        self._payload: dict[str, Tensor] = {}
        self._called: set[int] = set()
        self._is_checked = self._is_recorded = False
        self.tokens = CutTokens(mesh.cp, mesh.sp, attention)
        self._is_on_features = is_on_features
        self.cuts_sequences = mesh.cp.size > 1
        self.compare: Callable[..., None] = CutModel.require_cut_alike
        """Compares, before the first step, what layers compute of a rank's own tokens with what they compute of all."""
        self._probed: set[int] = set()
        # Hidden states that own layers return while they are looked at, by index.
        self._outputs: dict[int, Tensor] | None = None
        self._num_calls: Counter[int] = Counter()
        # A cache of keys and values would have those of this stage's layers alone, or of own tokens.
        # Recomputed layers would add theirs to it once more.
        takes_cache = "use_cache" in inspect.signature(model.forward).parameters
        self._options = {"use_cache": False} if takes_cache else {}
        # How a user does without the cut.
        self._way_out = "pipeline_model_parallel_size=1" if mesh.sizes.num_stages > 1 else self.tokens.without
        if not all(self.stages):
            raise ValueError(f"every stage of {type(model).__name__} needs a layer, and a stage of the layout has none")
        if mesh.sizes.num_stages > 1:
            _require_own_weights(model, layers)
        modules = [model.get_submodule(name) for name in layers]
        own = {self.part_names[index] for stage in self.mesh.own_stages for index in self.stages[stage]}
        for index, module in enumerate(modules):
            if layers[index] in own:
                self.tokens.watch(module)
            else:
                _drop_weights(module)
                module.__dict__["forward"] = partial(self._refuse_forward, layers[index])
            module.__dict__[_LAYER] = (self, index)
            _call_through(module, _LAYER)
        for name in absent:
            module = model.get_submodule(name)
            _drop_weights(module)
            module.__dict__["forward"] = partial(self._unknown_output, name)
        model.__dict__[_CUT] = self
        _call_through(model, _CUT)

    def __setattr__(self, name: str, value: Any) -> None:
        # Children and weights are the model's, whatever they are called; what is set here is of the cut alone.
        object.__setattr__(self, name, value)

    def get_submodule(self, target: str) -> nn.Module:
        # By the model itself: names of children may be those of attributes here.
        return self._whole.get_submodule(target)

    def _register(self, name: str, module: nn.Module) -> None:
        """Nothing: the model has its modules."""

    def prepare(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """The arguments of the model's forward, which every stage gets; no tensor comes into the first."""
        return None, (args, kwargs)

    def run_stage(self, stage: int, hidden: Any, context: Any) -> Any:
        """The model's output on the last stage; on another, the tensors that the next one gets, by name."""
        args, kwargs = context
        self._received = {} if hidden is None else _unpacked(hidden)
        self._refuse_what_is_shared(kwargs)
        if not torch.is_grad_enabled() and not self.tokens.divide((args, kwargs)):
            # Text that is generated has any number of tokens.
            with self.tokens.off():
                return self._run_stage(stage, args, kwargs)
        if self.tokens.size > 1 and stage not in self._probed:
            self._probed.add(stage)
            with without_fp8(self._whole), self.with_weights():
                self._look(stage, args, kwargs)
        return self._run_stage(stage, args, kwargs)

    def _run_stage(self, stage: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._stage, self._called = stage, set()
        self._payload = {}
        self._num_calls[stage] += 1
        self._is_recorded = torch.is_grad_enabled()
        # A number that is none may come from the data, or from a learning rate.
        self._is_checked = stage > 0 and self._num_calls[stage] <= _NUM_CHECKED and not _has_nan(self._received)
        try:
            output = _plain_call(self._whole, _CUT, args, self._options | kwargs)
        except _StageEnd:
            # Not kept: a module with tensors of a graph could not be copied after a run.
            payload, self._payload = self._payload, {}
            return payload
        except CutError:
            raise
        except Exception as error:
            if not self._is_checked:
                raise
            first = self.part_names[self.stages[stage].start]
            raise CutError(
                f"{error}: on stage {stage}, where layers of earlier stages return placeholders. If the code of "
                f"{type(self._whole).__name__} reads more of them than what the last layer returned, it cannot be cut "
                f"in front of {first}: name the layers that it reads in ModelPlan(skip_connections=...), or use "
                "pipeline_model_parallel_size=1"
            ) from error
        finally:
            self._stage, self._received = -1, {}
        scalars = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.numel() == 1]
        count = mean_count(scalars[0]) if len(scalars) == 1 else None
        if count is not None:
            self.loss_weight = torch.as_tensor(count, device=scalars[0].device).detach()
        # A mean over nothing is no number anywhere.
        if self._is_checked and (has_unknown(output) or ((count is None or self.loss_weight) and _has_nan(output))):
            raise CutError(
                f"the output of {type(self._whole).__name__} reads what layers of earlier stages returned, and not the "
                "last layer alone (hidden states, attentions or router logits of all layers); leave it out, or use "
                "pipeline_model_parallel_size=1"
            )
        missed = [self.part_names[index] for index in self.stages[stage] if index not in self._called]
        if missed or stage < self.mesh.sizes.num_stages - 1:
            raise CutError(
                f"the forward of {type(self._whole).__name__} ended without calling {', '.join(missed)}; the layers "
                "that are cut must each run once a call"
            )
        return output

    @property
    def is_looking(self) -> bool:
        """Whether layers run to be looked at."""
        return self._outputs is not None

    def _note(self, index: int, output: Any, *, is_end: bool) -> None:
        hidden = hidden_of(output)
        if hidden is not None:
            assert self._outputs is not None
            self._outputs[index] = hidden
        if is_end:
            raise _StageEnd

    @torch.no_grad()
    def _look(self, stage: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Runs own layers on a few tokens, cut and whole, and compares them."""
        received, tokens = self._received, self.tokens
        args, kwargs = tokens.shortened((args, kwargs), are_all=True)
        short = {index: tokens.shortened(value, are_all=index in self._ends) for index, value in received.items()}
        modes = {module: module.training for module in self._whole.modules()}
        self._is_checked = self._is_recorded = False
        self._whole.eval()
        try:
            whole = {index: one if index in self._ends else tokens.of_all_ranks(one) for index, one in short.items()}
            # Whole sequences come first: modules with cut linears are looked at in their first call.
            with self._running_on_own_tokens():
                with tokens.off(), recording():
                    given = _with_gradients(args, kwargs, whole)
                    wanted = {index: one.detach() for index, one in self._hidden_states(stage, *given).items()}
                with tokens.finding_sums():
                    self._hidden_states(stage, args, kwargs, short)
            self.compare(self, stage, (args, kwargs), short, whole, wanted)
        finally:
            self._received = received
            for module, mode in modes.items():
                module.training = mode

    @contextmanager
    def _running_on_own_tokens(self) -> Iterator[None]:
        """Raises CutError for layers that do not run on the tokens of a rank, inside of the block."""
        try:
            yield
        except (torch.OutOfMemoryError, CutError):
            raise
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            raise CutError(
                f"the layers of {type(self._whole).__name__} do not run on the tokens of a rank ({error}); use "
                f"{self.tokens.without}"
            ) from error

    def require_cut_alike(
        self,
        stage: int,
        call: tuple[tuple[Any, ...], dict[str, Any]],
        short: dict[int, Any],
        whole: dict[int, Any],
        wanted: dict[int, Tensor],
    ) -> None:
        """Compares own layers on a rank's own tokens with what they return of all, and their gradients.

        `short` and `whole` are what earlier stages send of own and of all tokens, `wanted` what layers return of all,
        each by the index of a layer. Raises CutError for a layer whose numbers differ.
        """
        (args, kwargs), tokens = call, self.tokens
        with self._running_on_own_tokens():
            cut = self._hidden_states(stage, args, kwargs, short)
        last = self.stages[stage].stop - 1
        shape = wanted[last].shape if last in wanted else torch.Size()
        summed = {id(getattr(owner, key)) for found in tokens.summed.values() for owner, key in found}
        weights = self._compared_weights(stage, summed) if shape else {}
        # Places of what layers are given beside their hidden states, by what they are called in errors.
        places: dict[str, tuple[int, int]] = {}

        def differentiated(received: dict[int, Any]) -> dict[str, Tensor]:
            with recording(), tokens.noting_given() as noted:
                hidden = self._hidden_states(stage, *_with_gradients(args, kwargs, received))[last]
                scale = torch.arange(shape.numel(), dtype=hidden.dtype, device=hidden.device).cos().view(shape)
                number = (hidden * tokens.own_part(scale, hidden.shape)).sum()
                held = dict(self._whole.named_parameters())
                of_weights = {name: held[name] for name in weights}
                places.update({f"argument {at} of {self.part_names[index]}": (index, at) for index, at in noted})
                found = gradients(number, of_weights | {name: noted[place] for name, place in places.items()})
                # Where cp cuts, too, a rank's gradient of an argument is that of a mean.
                return {name: one for name, one in found.items() if tokens.cp.size == 1 or name in weights}

        with stand_ins(self._whole, weights.values()):
            found = differentiated(short)
            with tokens.off():
                meant = differentiated(whole)
        for index, hidden in wanted.items():
            own = cut[index] if cut[index].shape == hidden.shape else tokens.of_all_ranks(cut[index])
            if deviation := relative_deviation(own, hidden):
                name = self.part_names[index]
                raise CutError(
                    f"{name} ({type(self.get_submodule(name)).__name__}) computes other hidden states from the tokens "
                    f"of a rank ({deviation}): it mixes tokens elsewhere than in an attention that can be cut; use "
                    f"{tokens.without}"
                )
        are_all = last in self._ends or last == len(self.part_names) - 1
        own = {
            key: tokens.sum_of(one, are_all, over_sp=key in weights and id(weights[key]) in summed)
            for key, one in found.items()
        }
        # On whole sequences a rank has a term of these, too: of its features.
        of_features = {name for name, one in weights.items() if id(one) in summed and self._is_on_features(one)}
        meant |= {name: collectives.all_reduce(meant[name], tokens.sp) for name in sorted(of_features)}
        terms, _, wrong = told_apart(own, meant, tokens.sp)
        if wrong:
            name, deviation = next(iter(wrong.items()))
            raise CutError(
                f"the gradient of {name} is another one where its layer runs on a rank's own tokens ({deviation}); it "
                "is used where all tokens are, too, such as by a part of the layer that it is handed to; use "
                f"{tokens.without}"
            )
        tokens.sum_given(places[name] for name in terms if name in places)
        for layer in [self.part_names[index] for index in self.stages[stage]] if terms else ():
            names = [name.removeprefix(f"{layer}.") for name in terms if name.startswith(f"{layer}.")]
            SummedInCalls(self.get_submodule(layer), names, tokens.sp, lambda: not tokens.is_off)

    def _compared_weights(self, stage: int, summed: set[int]) -> dict[str, nn.Parameter]:
        """Weights of own layers that may be used on own tokens, by name: vectors, and under sequence parallelism all
        that ranks of tp hold whole, since a layer may be given a condition that has no tokens.

        `summed` are ids of weights whose gradients are summed over sp."""
        layers = tuple(f"{self.part_names[index]}." for index in self.stages[stage])
        return {
            name: one
            for name, one in whole_weights(self._whole).items()
            if name.startswith(layers) and (self.tokens.sp.size > 1 or one.dim() <= 1 or id(one) in summed)
        }

    def _hidden_states(
        self, stage: int, args: tuple[Any, ...], kwargs: dict[str, Any], received: dict[int, Any]
    ) -> dict[int, Tensor]:
        """What own layers return, by index."""
        self._stage, self._called, self._received, self._outputs = stage, set(), dict(received), {}
        try:
            _plain_call(self._whole, _CUT, args, self._options | kwargs)
        except _StageEnd:
            return self._outputs
        finally:
            self._stage, self._outputs = -1, None
        raise CutError(f"the forward of {type(self._whole).__name__} ended without calling its layers")

    def _refuse_forward(self, name: str, *_: Any, **__: Any) -> Any:
        """Raises CutError: the layer of another stage was not called as a module is."""
        raise CutError(
            f"the code of {type(self._whole).__name__} calls {name}.forward(...), which goes past the layers of other "
            f"stages; let it call the layer itself, or use {self._way_out}"
        )

    def _unknown_output(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """What a module around the layers returns where no layer reads it: NaN in the place of its numbers.

        Raises CutError outside of the model's call, where anything may read it.
        """
        if self._stage < 0:
            raise CutError(
                f"{name} is called outside of the call of {type(self._whole).__name__}, on a rank whose stages do not "
                "have its weights; let the model call it, name it in ModelPlan(on_all_stages=...), or use "
                f"{self._way_out}"
            )
        self._is_checked |= self._num_calls[self._stage] <= _NUM_CHECKED and not _has_nan(self._received)
        module = self.get_submodule(name)
        # Not that of an argument: code may send that to the device of the weights.
        held = (weight.device for weight in self._whole.parameters() if not weight.is_meta)
        device = next(held, torch.device("meta"))
        first = next(iter((*args, *kwargs.values())), None)
        # Positions may be asked for by a shape.
        if isinstance(module, nn.Embedding) and isinstance(first, Tensor):
            shape = (*first.shape, module.embedding_dim)
            like = torch.empty((), dtype=module.weight.dtype, device=device).expand(shape)
            return Unknown.like(like, is_marked=self._is_checked)
        args, kwargs = tree_map_only(Tensor, lambda one: one.to("meta"), (args, kwargs))
        # What counts this rank's work shall not count it.
        with _disable_current_modes():
            output = type(module).forward(module, *args, **kwargs)
        marked = self._is_checked
        return tree_map_only(
            Tensor, lambda one: Unknown.like(torch.empty_like(one, device=device), is_marked=marked), output
        )

    def _refuse_what_is_shared(self, kwargs: dict[str, Any]) -> None:
        """Raises CutError for options of transformers by which a call collects something of every layer and token."""
        config = getattr(self._whole, "config", None)
        configs = [one for one in (config, getattr(config, "text_config", None)) if one is not None]
        asked = [
            name
            for name in ("output_router_logits", "output_hidden_states", "output_attentions")
            if (kwargs[name] if kwargs.get(name) is not None else any(getattr(one, name, False) for one in configs))
        ]
        asked += [name for name in ("use_cache", "past_key_values") if kwargs.get(name) not in (None, False)]
        if asked:
            raise CutError(
                f"{type(self._whole).__name__} was called with {', '.join(asked)}, of which a rank has those of its "
                f"own layers and tokens alone; leave it out (generate(use_cache=False)), or use {self._way_out}"
            )

    def run_layer(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the layer of that index returns on this stage."""
        layer, name = self.get_submodule(self.part_names[index]), self.part_names[index]
        if self._stage < 0:
            # The network's own checkpointing runs layers once more in the backward.
            return self._on_own_tokens(index, args, kwargs, partial(self._run_plainly, layer))
        own = self.stages[self._stage]
        expected = len(self._called)
        if index != expected:
            again = "a second time" if index in self._called else f"before {self.part_names[expected]}"
            raise CutError(
                f"the forward of {type(self._whole).__name__} calls {name} {again}; layers that are cut over stages "
                f"run once, in their order; use {self._way_out}"
            )
        self._called.add(index)
        if index < own.start:
            return self._of_earlier_stage(index)
        self._require_known(name, args, kwargs)
        if self._is_recorded and not torch.is_grad_enabled() and any(p.requires_grad for p in layer.parameters()):
            raise CutError(
                f"{name} runs without recording gradients (torch.no_grad, or checkpoint(use_reentrant=True)), and what "
                "it sends to the next stage would take none back; use checkpoint(use_reentrant=False)"
            )
        if index == own.start and self._stage and self._whole.training:
            _draw_for_layer(index)
        run = self.between_hooks(name, partial(self._run_plainly, layer))
        part = StagePart(module=layer, is_layer=True, run=run)
        output = self._on_own_tokens(index, args, kwargs, lambda given: self.runner([part], given))
        if self._outputs is not None:
            self._note(index, output, is_end=index == own.stop - 1)
        if index == own.stop - 1 and self._stage < self.mesh.sizes.num_stages - 1:
            self._payload = self._packed(index, output)
            raise _StageEnd
        if index in self._shared:
            self._received[index] = _copy(output)
        return output

    def _run_plainly(self, layer: nn.Module, given: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
        """What the layer's own call returns."""
        try:
            return _plain_call(layer, _LAYER, *given)
        finally:
            # A recomputation ends inside of a layer, and calls no hook behind its parts.
            # Each layer would hold what its linears were given last.
            for linear in layer.modules():
                if isinstance(linear, ColwiseLinear):
                    linear.copies.forget()

    def _on_own_tokens(
        self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[[Any], Any]
    ) -> Any:
        """What a layer returns for own tokens; for all of them where it ends a list."""
        is_start = index == 0 or index - 1 in self._ends
        output = run(self.tokens.enter(index, args, kwargs, is_whole=is_start))
        is_end = index in self._ends or index == len(self.part_names) - 1
        return self.tokens.leave(output) if is_end else output

    def _of_earlier_stage(self, index: int) -> Any:
        if index in self._received:
            return _copy(self._received[index])
        text, tensors = taken_apart(self._received[max(self._received)])
        return put_together(text, [Unknown.like(tensor, is_marked=self._is_checked) for tensor in tensors])

    def _packed(self, index: int, output: Any) -> dict[str, Tensor]:
        """The outputs that later stages read: that of the stage's last layer, and of layers for all of them."""
        kept = {one: self._received[one] for one in sorted(self._shared) if one in self._received and one < index}
        packed: dict[str, Tensor] = {}
        for number, value in {**kept, index: output}.items():
            try:
                text, tensors = taken_apart(value)
            except TypeError as error:
                raise CutError(
                    f"{self.part_names[number]} returned a {error}, which cannot be sent to the next stage; a layer at "
                    "the end of a stage returns tensors, or tuples, lists and dicts of them"
                ) from None
            for place, tensor in enumerate(tensors):
                packed[f"{number}:{place}:{text if not place else ''}"] = tensor
        return packed

    def _require_known(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raises CutError where a layer reads what a layer of another stage computed, and is not handed on."""
        if not self._is_checked:
            return
        named = {**{f"argument {place}": value for place, value in enumerate(args)}, **kwargs}
        if unknown := [key for key, value in named.items() if has_unknown(value) or _has_nan(value)]:
            raise CutError(
                f"{name} reads {', '.join(unknown)}, which layers of an earlier stage computed, and not only what the "
                f"layer before it returned; layers of {type(self._whole).__name__} cannot be cut there: name the "
                "layers that computed it in ModelPlan(skip_connections=...), or use pipeline_model_parallel_size=1, or "
                "a stage layout that keeps these layers together"
            )


def renumbered(name: str, index: int) -> str:
    """The name of a tensor that a stage sends, as if it came from the layer of that index."""
    return f"{index}:{name.partition(':')[2]}"


def names_around(module: nn.Module) -> set[str]:
    """Names of the parameters and buffers around the layers of the cut networks of a module that this rank has."""
    found: set[str] = set()
    for prefix, child in module.named_modules():
        cut = child.__dict__.get(_CUT)
        if isinstance(cut, CutModel):
            layers = tuple(f"{name}." for name in cut.part_names)
            named = [*child.named_parameters(), *child.named_buffers()]
            found |= {f"{prefix}.{name}" if prefix else name for name, _ in named if not name.startswith(layers)}
    return found


def _require_own_weights(model: nn.Module, layers: Sequence[str]) -> None:
    owners: dict[nn.Parameter, dict[str, str]] = {}
    prefixes = {f"{layer}.": layer for layer in layers}
    for name, weight in model.named_parameters(remove_duplicate=False):
        layer = next((layer for prefix, layer in prefixes.items() if name.startswith(prefix)), "")
        owners.setdefault(weight, {})[layer] = name
    if tied := [" and ".join(names.values()) for names in owners.values() if len(names) > 1]:
        raise ValueError(
            f"{type(model).__name__} cannot be cut at its layers: {'; '.join(tied)} are one weight, and stages would "
            "train copies of it; use pipeline_model_parallel_size=1"
        )


def cut_of(module: nn.Module) -> PipelineModule | None:
    """The pipelined view of a module: itself, where it is one, or that of its cut."""
    if isinstance(module, PipelineModule):
        return module
    cut: PipelineModule | None = module.__dict__.get(_CUT)
    return cut


def is_looked_at(layer: nn.Module) -> bool:
    """Whether the next call of a layer is there to look at it, or at what is in it."""
    owner: CutModel | None = layer.__dict__.get(_LAYER, (None,))[0]
    return (owner is not None and owner.is_looking) or is_look_due(layer)


def _draw_for_layer(index: int) -> None:
    """Seeds the default generators from what they would draw and the index of a layer.

    Stages begin with one state and draw nothing for each other's layers: their masks of dropout would be the same.
    """
    drawn = int(torch.randint(1 << 31, ()).item())
    rng.seed_torch(rng.key(drawn, "layer", index) & ((1 << 63) - 1))


def _with_gradients(args: Any, kwargs: Any, received: dict[int, Any]) -> Any:
    """A copy of what a stage is given, in which all that it received takes gradients, as it does in training."""
    given = copied((args, kwargs, received))
    for one in tree_leaves(given[2]):
        if isinstance(one, Tensor) and one.is_floating_point():
            one.requires_grad_()
    return given


def _copy(output: Any) -> Any:
    """What a layer returned, which the model may change in place: each stage does so with its own."""
    text, tensors = taken_apart(output)
    return put_together(text, [tensor.clone() for tensor in tensors])


def _unpacked(payload: Mapping[str, Tensor]) -> dict[int, Any]:
    texts: dict[int, str] = {}
    tensors: dict[int, list[Tensor]] = {}
    for key, tensor in payload.items():
        number, place, text = key.split(":", 2)
        if place == "0":
            texts[int(number)] = text
        tensors.setdefault(int(number), []).append(tensor)
    return {number: put_together(text, tensors[number]) for number, text in texts.items()}


@torch.no_grad()
def _has_nan(value: Any) -> bool:
    leaves = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return any(bool(leaf.isnan().any()) for leaf in leaves)


def _drop_weights(module: nn.Module) -> None:
    """Takes all weights and buffers out of a module; what reads their shapes and dtypes finds them without memory."""
    for child in module.modules():
        for held in (child._parameters, child._buffers):
            for name, tensor in list(held.items()):
                if tensor is not None:
                    del held[name]
                    # One number, however many there were: a model may be on the meta device as a whole.
                    child.__dict__[name] = torch.empty((), dtype=tensor.dtype, device="meta").expand(tensor.shape)


def _call_through(module: nn.Module, mark: str) -> None:
    kind: Any = type(module)
    module.__class__ = _called_as(kind, mark)


@cache
def _called_as(kind: Any, mark: str) -> type[nn.Module]:
    """A subclass, with the name of `kind`, whose calls go where the instance's attribute `mark` says.

    Calls and not `forward`: gradient checkpointing runs a layer's forward a second time, on its own.
    """

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if mark == _CUT:
            cut: CutModel = self.__dict__[_CUT]
            return cut(*args, **kwargs)
        owner, index = self.__dict__[_LAYER]
        return owner.run_layer(index, args, kwargs)

    body = {"__call__": call, "__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(kind.__name__, (kind,), body)


def _plain_call(module: nn.Module, mark: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    call: Callable[..., Any] = type(module).__mro__[1].__call__
    return call(module, *args, **kwargs)
