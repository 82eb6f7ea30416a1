"""A model of transformers that was trained as it is, cut over ranks or not, into a folder that transformers loads.

Weights have transformers' own names on every layout. The first rank gathers them in host memory, and transformers
writes them with the configuration and the generation's. Of a model that peft has given adapters these alone are
gathered, and peft writes them.
"""

import os
import shutil
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from lightning_megatron.checkpoint import Piece
from lightning_megatron.checkpoint.gather import gather_on_first_rank
from lightning_megatron.comm import collectives
from lightning_megatron.hf.folder import CONFIG, on_disk
from lightning_megatron.hf.shards import finish_draft, start_draft
from lightning_megatron.mesh import Mesh
from lightning_megatron.optim.sharded_params import absent_names
from lightning_megatron.text_files import read_json_table

_RANKS = "_lightning_megatron_ranks"


def is_saved_by_itself(model: nn.Module) -> bool:
    """Whether a model has a method that writes it: one of transformers, or of peft with its adapters."""
    return isinstance(model, PreTrainedModel) or has_adapters(model)


def has_adapters(model: nn.Module) -> bool:
    """Whether a model is a `PeftModel`."""
    # Whoever has one has imported it.
    peft: Any = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


def of_adapters(model: Any, names: Iterable[str]) -> set[str]:
    """Names of the parameters that peft saves with a model's adapters, out of `names`, those of all it has here.

    Raises ValueError for adapters that are prompts, and not weights beside those of a layer.
    """
    if model.active_peft_config.is_prompt_learning:
        raise ValueError(
            f"a {type(model.active_peft_config).__name__} has prompts in place of layers' weights, which are not "
            "gathered from ranks; save the model by its own save_pretrained on one device"
        )
    # Peft picks by name.
    stand_ins = {name: torch.empty(0, device="meta") for name in names}
    with warnings.catch_warnings():
        # It warns again when it writes.
        warnings.simplefilter("ignore")
        picked = sys.modules["peft"].get_peft_model_state_dict(model, state_dict=dict(stand_ins))
    kept = {id(one) for one in picked.values()}
    return {name for name, one in stand_ins.items() if id(one) in kept}


@torch.no_grad()
def save_unchanged(
    model: Any,
    path: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None,
    max_shard_bytes: int,
    tokenizer_from: str | os.PathLike[str] | None,
) -> None:
    """Writes the folder, which may not be there, as `hf.save_pretrained` says. Collective over the world."""
    if absent := absent_names(model.named_parameters()):
        raise RuntimeError(
            f"{', '.join(absent)} are not gathered on this rank, and would be saved as NaN; save the model inside "
            "`with trainer.strategy.whole_weights():`, on all ranks"
        )
    world, target = mesh_of(model).world, on_disk(path)
    buffers = {name: tensor for name, tensor in model.named_buffers() if name in model.state_dict()}
    pieces = {
        name: Piece.all_like(one, one.detach()) for name, one in {**dict(model.named_parameters()), **buffers}.items()
    }
    if has_adapters(model):
        pieces = {name: pieces[name] for name in of_adapters(model, pieces)}
    full = gather_on_first_rank(pieces, world)
    fault: Exception | None = None
    if world.is_first:
        tokenizer = Path(tokenizer_from) if tokenizer_from is not None else None
        if dtype is not None:
            full = {name: one.to(dtype) if one.is_floating_point() else one for name, one in full.items()}
        try:
            write_folder(model, full, target, tokenizer, max_shard_bytes, dtype)
        except Exception as error:
            # Of any kind: the other ranks wait to hear of it.
            fault = error
    if fault := collectives.broadcast_object(fault, world):
        raise fault


def write_folder(
    model: Any,
    full: dict[str, torch.Tensor],
    target: Path,
    tokenizer: Path | None,
    max_shard_bytes: int,
    dtype: torch.dtype | None,
) -> None:
    """Writes whole weights, by their names in the model, as the model's own `save_pretrained` does.

    `dtype` is that of the weights, by default the model's.
    """
    draft = start_draft(target, tokenizer)
    try:
        # Not the model's own attribute: which refuses.
        type(model).save_pretrained(model, draft, state_dict=full, max_shard_size=max_shard_bytes)
        config = None if has_adapters(model) else dict(read_json_table(draft / CONFIG))
        if dtype is not None and config is not None:
            config["dtype"] = str(dtype).removeprefix("torch.")
        finish_draft(draft, target, config, tokenizer)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


class _Ranks:
    """The ranks that train a model, or did so in the last run."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Ranks":
        # Process groups cannot be copied.
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process, which may not have this package, loads the model with nothing in their place.
        return type(None), ()


class _SavePretrained:
    """The method `save_pretrained` of a model of which ranks have parts: it refuses to write that of one of them."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError(
            "each rank holds a part of this model, and save_pretrained would write that alone; call "
            "lightning_megatron.hf.save_pretrained(model, path) on every rank, within a run"
        )


class _Generate:
    """The method `generate` of a model that is cut, with `options` that are given where a caller does not.

    Where layers or tokens are cut it has no cache: a rank would have one of its own layers and tokens alone. Where
    experts are, all ranks go on until the last has all of its text: the others run its experts.
    """

    def __init__(self, model: Any, options: dict[str, Any]) -> None:
        self.model, self.options = model, options

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return type(self.model).generate(self.model, *args, **{**self.options, **kwargs})

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Generate":
        return _Generate(memo.get(id(self.model), self.model), self.options)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Generate, (self.model, self.options)


def remember_ranks(network: nn.Module, mesh: Mesh) -> None:
    """Makes the models of transformers in a network know the ranks that train them, for `hf.save_pretrained`."""
    for module in network.modules():
        if is_saved_by_itself(module):
            module.__dict__[_RANKS] = _Ranks(mesh)


def take_methods(network: nn.Module, mesh: Mesh) -> None:
    """Has the models of transformers in a network generate text as ranks can that have parts of it, and not be written
    by a rank alone."""
    options = {"use_cache": False} if mesh.pp.size * mesh.cp.size * mesh.sp.size > 1 else {}
    options |= {"synced_gpus": True} if mesh.sizes.ep > 1 else {}
    for module in network.modules():
        if is_saved_by_itself(module) and mesh.tp.size * mesh.pp.size * mesh.sizes.ep > 1:
            module.__dict__["save_pretrained"] = _SavePretrained()
        if options and isinstance(module, PreTrainedModel) and module.can_generate():
            module.__dict__["generate"] = _Generate(module, options)


def mesh_of(model: nn.Module) -> Mesh:
    """The ranks that train a model, or did so last; one device where no run has."""
    ranks = model.__dict__.get(_RANKS)
    return ranks.mesh if isinstance(ranks, _Ranks) else Mesh.single()
