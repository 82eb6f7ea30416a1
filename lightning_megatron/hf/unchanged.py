"""Models of transformers as they are: from a folder, whose files are mapped, or new ones from a configuration.

A rank that keeps slices reads, or draws, these alone. Where the files have weights in another form than bits of a
floating-point number, or lack some, or where initial values are such that only constructors know them, the model is
made by transformers itself, whole, in host memory.
"""

import inspect
import logging
import operator
import os
import re
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_map_only
from transformers import (
    MODEL_FOR_MASKED_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from lightning_megatron.any_module.check_styles import without_fp8
from lightning_megatron.any_module.deviation import relative_deviation
from lightning_megatron.hf.converted_weights import ConvertedWeights, Sources, sources_of
from lightning_megatron.hf.folder import DTYPES, GENERATION, WeightFiles, on_disk
from lightning_megatron.hf.later_weights import fill_later
from lightning_megatron.hf.new_weights import NewWeights
from lightning_megatron.hf.save_unchanged import has_adapters
from lightning_megatron.hub import CONFIG_FILES, model_folder

logger = logging.getLogger(__name__)

# Few, so that each weighs much. No usual number of ranks divides it: ranks of cp and sp each take all of them.
_NUM_LOOKED_AT = 7
# More than blocks of tokens that a layer compresses, and a prime, too.
_NUM_OF_DOCUMENTS = 293


def read_config(path: str | os.PathLike[str]) -> Any:
    """The configuration of the model in a folder. Raises ValueError where there is none."""
    folder = model_folder(path, CONFIG_FILES)
    if not os.path.exists(folder):
        # It is no name with an owner: else the hub would have been asked.
        raise ValueError(
            f"{os.fspath(path)!r} is no folder here; give that of a Hugging Face model, or a model's name on the hub, "
            "as owner/model"
        )
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{os.fspath(path)} has no configuration that this version of transformers reads: {_first_line(error)}"
        ) from error


def sees_later_tokens(config: Any) -> bool:
    """Whether a token sees those behind it in the causal model of a configuration, which is of a type that fills gaps
    too and is not told to be a decoder."""
    is_both = type(config) in MODEL_FOR_MASKED_LM_MAPPING and not config.is_encoder_decoder
    return is_both and getattr(config, "is_decoder", None) is False


def deviation_by_later_tokens(model: Any) -> str:
    """The deviation, in words, of a token's logits by other tokens behind it; empty where rounding explains it.

    Calls a causal model once, on all ranks that it is cut over, and leaves it and random numbers as they were.
    """
    row_T, other_T = _two_rows(model, _NUM_LOOKED_AT)
    other_T[0] = row_T[0]
    [logits] = _logits(model, {"input_ids": torch.stack([row_T, other_T])})
    return _deviation(logits[0, 0], logits[1, 0])


def deviation_by_other_documents(model: Any) -> str:
    """The deviation, in words, of the logits of a document by the one before it in its row, or from those of the
    document alone; empty where rounding explains it.

    Calls a causal model twice, as `deviation_by_later_tokens`. Raises ValueError for one that takes no position_ids.
    """
    base = model.get_base_model() if has_adapters(model) else model
    if "position_ids" not in inspect.signature(base.forward).parameters:
        raise ValueError(f"{type(base).__name__} takes no position_ids, by which documents of a row are told apart")
    longest = num_positions(base)
    num_tokens = _NUM_OF_DOCUMENTS if longest is None else min(_NUM_OF_DOCUMENTS, longest)
    first = num_tokens // 2 + 2
    row_T, other_T = _two_rows(model, num_tokens)
    other_T[first:] = row_T[first:]
    index_T = torch.arange(num_tokens)
    # A third row, with another bound: some kernels keep documents apart where a call has a single row.
    segments_3T = torch.stack([index_T >= first, index_T >= first, index_T >= first - 1]).long()
    together = {
        "input_ids": torch.stack([row_T, other_T, row_T]),
        "position_ids": document_positions(segments_3T),
        # With a cache it would look for no documents.
        "use_cache": False,
    }
    logits, alone = _logits(model, together, {"input_ids": row_T[None, first:], "use_cache": False})
    own = logits[:, first:]
    # Of two rows of one shape rounding is the same, or nearly so.
    return _deviation(own[0], own[1], part=0.02) or _deviation(alone[0], own[0])


def document_positions(segments_BT: Tensor) -> Tensor:
    """Positions of tokens in their documents [B, T], by numbers of the documents that follow each other in a row; by
    positions that begin anew transformers keeps tokens of several documents apart."""
    index_T = torch.arange(segments_BT.shape[1], device=segments_BT.device)
    is_first_BT = functional.pad(segments_BT[:, 1:] != segments_BT[:, :-1], (1, 0), value=True)
    return index_T - torch.where(is_first_BT, index_T, 0).cummax(dim=1).values


def _two_rows(model: Any, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Two rows of tokens that differ everywhere."""
    size = int(model.config.get_text_config().vocab_size)
    row_T = torch.randint(size, (num_tokens,), generator=torch.Generator().manual_seed(0))
    return row_T, (row_T + 1) % size


@torch.no_grad()
def _logits(model: Any, *calls: dict[str, Any]) -> list[Tensor]:
    """The logits of calls of a model, which stays as it was, and without dropout."""
    device = next(one.device for one in model.parameters() if not one.is_meta)
    to_device = operator.methodcaller("to", device)
    modes = {module: module.training for module in model.modules()}
    before = [(one, one.clone()) for one in model.buffers()]
    model.eval()
    try:
        # Compiled for these few tokens, layers would be compiled for any number of them from then on.
        stance = torch.compiler.set_stance("force_eager")
        with stance, without_fp8(model), torch.random.fork_rng([device] if device.type == "cuda" else []):
            return [model(**tree_map_only(Tensor, to_device, call)).logits for call in calls]
    finally:
        for module, mode in modes.items():
            module.training = mode
        for one, value in before:
            one.copy_(value)


def _deviation(wanted: Tensor, found: Tensor, part: float = 1.0) -> str:
    """What `relative_deviation` says of the two."""
    # Masks of finite numbers let a millionth through (ProphetNet), which is no sight in float64 either.
    wanted, found = (one.float() if one.dtype == torch.float64 else one for one in (wanted, found))
    return relative_deviation(found, wanted, part)


def num_positions(model: Any) -> int | None:
    """Tokens of the longest row that a model of transformers has positions for in a table; None without such a table.

    The table is an embedding of as many rows as the configuration has positions. Before the first position some types
    have two more, and some take those up to that of padding.
    """
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    tables = [
        one for one in model.modules() if isinstance(one, nn.Embedding) and one is not model.get_input_embeddings()
    ]
    found = [
        min(longest, table.num_embeddings - (0 if table.padding_idx is None else table.padding_idx + 1))
        for table in tables
        if longest is not None and longest <= table.num_embeddings <= longest + 2
    ]
    return min(found, default=None)


def new_unchanged(
    config: PreTrainedConfig | str | os.PathLike[str],
    dtype: torch.dtype | None = None,
    seed: int | None = None,
    auto_class: Any = AutoModelForCausalLM,
) -> Any:
    """The model of a configuration, or of the one in a folder, with new weights: the same on every layout.

    Each weight is drawn as transformers draws it, from `seed` (by default torch's, which `seed_everything` sets) and
    its name. In a run that cuts it over tp, pp or ep the model stays on the meta device until the strategy has done so,
    after `configure_model`; elsewhere it is filled at once, in host memory. `dtype` is that of the weights, by default
    the configuration's, and `auto_class` the class of transformers that says which model it is
    (`AutoModelForSeq2SeqLM`). Raises ValueError where there is no such model.
    """
    if not isinstance(config, PreTrainedConfig | str | os.PathLike):
        raise ValueError(
            f"config is a {type(config).__name__}; it must be a configuration of transformers (LlamaConfig(...)), a "
            "folder, or a name on the hub"
        )
    config = config if isinstance(config, PreTrainedConfig) else read_config(config)
    options = {} if dtype is None else {"dtype": dtype}
    seed = torch.initial_seed() if seed is None else seed
    # Some constructors make tensors in host memory whatever the device.
    model = on_meta(config, options, f"a {type(config).__name__}", auto_class).to("meta")
    weights = NewWeights(model, seed)
    if weights.undrawn:
        logger.warning(
            "%s does not draw %s, and has constructors do so: every process makes all weights in host memory",
            type(model).__name__,
            ", ".join(weights.undrawn[:6]),
        )
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.default_generator.manual_seed(seed)
            return auto_class.from_config(config, **options)
    fill_later(model, weights)
    return model


def load_unchanged(
    path: str | os.PathLike[str], dtype: torch.dtype | None = None, auto_class: Any = AutoModelForCausalLM
) -> Any:
    """The model of a folder, as `auto_class.from_pretrained` reads it, with its weights mapped.

    `dtype` is that of the weights, by default the configuration's; in another one than the files' they are read.
    `auto_class` is the class of transformers that says which model it is (`AutoModelForSeq2SeqLM`). Weights that
    transformers converts (experts that files hold one by one) are read when the strategy has cut the model, in a run
    that cuts it over tp, pp or ep, and at once elsewhere. Raises ValueError where there is no such model, and for files
    that cannot be read.
    """
    # Wherever Lightning builds: files are mapped into host memory.
    with torch.device("cpu"):
        return _loaded(model_folder(path), dtype, auto_class)


def _loaded(path: str, dtype: torch.dtype | None, auto_class: Any) -> Any:
    config, files = read_config(path), WeightFiles(on_disk(path))
    model = on_meta(config, {} if dtype is None else {"dtype": dtype}, os.fspath(path), auto_class)
    sources = sources_of(model, files)
    converted = ConvertedWeights(model, files, sources.conversions)
    if unfit := _unfit(model, files, sources, converted):
        logger.warning(
            "%s in %s: transformers reads this model, and every process all of it into host memory", unfit, path
        )
        return auto_class.from_pretrained(path, config=config, dtype=dtype or "auto")
    dtypes = _dtypes_of(model)
    state = {name: files.mapped(source).to(dtypes[name]) for name, source in sources.names.items()}
    model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()
    for tensor in model.state_dict(keep_vars=True).values():
        # Transformers leaves alone what has this mark, and computes the rest: tables that no file holds.
        tensor._is_hf_initialized = True
    for name, buffer in list(model.named_non_persistent_buffers()):
        owner, _, last = name.rpartition(".")
        model.get_submodule(owner)._buffers[last] = torch.empty_like(buffer, device="cpu")
    model.initialize_weights()
    read_generation(model, path)
    fill_later(model, converted)
    return model.eval()


def read_generation(model: Any, path: str) -> None:
    """Gives a model the settings of generation in a folder, where there are some."""
    if (on_disk(path) / GENERATION).is_file():
        model.generation_config = GenerationConfig.from_pretrained(path)


def on_meta(config: Any, options: dict[str, Any], source: str, auto_class: Any = AutoModelForCausalLM) -> Any:
    """The model of a configuration, on the meta device as far as its constructors let it be.

    `options` are those of `auto_class.from_config`. Raises ValueError, which names `source`, where there is no such
    model.
    """
    if not hasattr(auto_class, "from_config"):
        raise ValueError(
            f"auto_class ({getattr(auto_class, '__name__', auto_class)!r}) must be a class of transformers that finds "
            "the model's own, as AutoModelForSeq2SeqLM"
        )
    try:
        with torch.device("meta"):
            return auto_class.from_config(config, **options)
    except ValueError as error:
        kind = "causal model" if auto_class is AutoModelForCausalLM else f"model of {auto_class.__name__}"
        raise ValueError(f"no {kind} can be made of {source}: {_first_line(error)}") from error


def _dtypes_of(model: PreTrainedModel) -> dict[str, torch.dtype]:
    """Dtypes in which transformers reads a model's weights, by name: some types keep some in float32."""
    # Transformers looks for these anywhere in a name.
    kept = [name.replace("*", ".*") for name in model._get_dtype_plan(model.dtype)]
    pattern = re.compile("|".join(kept)) if kept else None
    return {
        name: torch.float32 if pattern is not None and pattern.search(name) else tensor.dtype
        for name, tensor in model.state_dict().items()
    }


def _unfit(model: PreTrainedModel, files: WeightFiles, sources: Sources, converted: ConvertedWeights) -> str:
    """A weight of the model that cannot be read from the files by name, and why; empty where there is none."""
    for name, tensor in model.state_dict().items():
        if name in model.all_tied_weights_keys:
            continue
        source = sources.names.get(name)
        shape = converted.shapes.get(name) if source is None else files.shapes[source]
        if shape is None:
            return f"there is no {name}"
        if shape != tuple(tensor.shape):
            return f"{name} has shape {list(shape)}, and must have {list(tensor.shape)},"
    of_conversions = [one.name for conversion in sources.conversions for one in conversion.sources]
    for name in [*sources.names.values(), *of_conversions]:
        if files.dtypes[name] not in DTYPES.values():
            return f"{name} is no floating-point weight of 16, 32 or 64 bits"
    return ""


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
