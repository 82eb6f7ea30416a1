"""LoRA adapters of peft on a model of transformers as it is: added before it is cut, and merged to write it."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from lightning_megatron.transformer.linears import LINEAR_NAMES
from lightning_megatron.transformer.lora import DEFAULT_TARGETS, LoraConfig


def adapter_faults(lora: LoraConfig, from_scratch: bool) -> list[str]:
    """Errors of adapters for a model of transformers as it is, one sentence each."""
    faults = []
    if from_scratch:
        faults.append("lora freezes the model's weights, and from_scratch draws them anew; leave one of the two out")
    if lora.targets != DEFAULT_TARGETS and (other := [name for name in lora.targets if name in LINEAR_NAMES]):
        faults.append(
            f"lora targets ({', '.join(other)}) are names of this package's own layers; name modules of the model, "
            "such as q_proj, or leave targets out for all linears of its layers"
        )
    return faults


def add_adapters(model: Any, lora: LoraConfig) -> Any:
    """The model as a `PeftModel`, its weights frozen and `targets`, by default all linears but the head, adapted.

    Blocks of experts stay frozen. A starts at random, from torch's seed, and B at zero. Raises ValueError for targets
    that the model has not, that are of experts, or whose weight is that of another module too.
    """
    peft = _peft()
    targets = _linears(model) if lora.targets == DEFAULT_TARGETS else lora.targets
    if faults := _target_faults(model, targets):
        raise ValueError("\n".join(faults))
    config = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=lora.rank,
        lora_alpha=lora.alpha,
        use_rslora=lora.scaling == "root_of_rank",
        lora_dropout=lora.dropout,
        target_modules=list(targets),
    )
    with warnings.catch_warnings():
        # Of ranks of experts, which are refused below.
        warnings.filterwarnings("ignore", message="The following (rank|alpha)_pattern keys")
        made = peft.get_peft_model(model, config)
    if experts := sorted(config.target_parameters or ()):
        raise ValueError(
            f"peft takes lora targets ({', '.join(lora.targets)}) of a {type(model).__name__} for its experts "
            f"({', '.join(experts)}), which stay frozen; name targets of its attention"
        )
    return made


def _linears(model: Any) -> list[str]:
    """Names of the linears that get adapters where nobody names them."""
    head = model.get_output_embeddings()
    linears = [name for name, one in model.named_modules() if isinstance(one, nn.Linear) and one is not head]
    peft = _peft()
    asked = peft.LoraConfig(target_modules=linears)
    # Of a type whose experts were linears once, it takes every linear of such a name for one of experts.
    peft.utils.transformers_weight_conversion.convert_peft_config_for_transformers(asked, model, None)
    return [name for name in linears if name in asked.target_modules]


def _target_faults(model: Any, targets: Sequence[str]) -> list[str]:
    """Errors of the modules that targets name, one sentence each."""
    kind, modules = type(model).__name__, dict(model.named_modules())
    owners: dict[nn.Parameter, list[str]] = {}
    for name, module in modules.items():
        for weight in module.parameters(recurse=False):
            owners.setdefault(weight, []).append(name)
    # What has a matrix to itself.
    known = sorted({one[0].rpartition(".")[2] for weight, one in owners.items() if weight.dim() > 1 == len(one)})
    if not targets:
        return [f"a {kind} has no linears of torch to adapt; name lora targets, which may be {', '.join(known)}"]
    # By each end of them behind a dot, and in full.
    names: dict[str, list[str]] = {}
    for name in modules:
        parts = name.split(".")
        for first in range(len(parts)):
            names.setdefault(".".join(parts[first:]), []).append(name)
    faults = []
    for target in targets:
        found = names.get(target, [])
        if not found:
            faults.append(f"lora target {target!r} is no module of a {kind}; targets may be {', '.join(known)}")
        shared = (owners[weight] for name in found for weight in modules[name].parameters(recurse=False))
        faults += [
            f"lora target {target!r} has one weight under two names ({' and '.join(both)}), and merging its adapter "
            "would change both; leave it out of the targets"
            for both in shared
            if len(both) > 1
        ]
    return faults


@contextmanager
def merged_adapters(model: Any) -> Iterator[Any]:
    """The model inside of a `PeftModel`, with its adapters merged into its weights; after the block all is as before.

    The former weights are in host memory meanwhile, so that they are restored bit by bit.
    """
    layers = _peft().tuners.tuners_utils.BaseTunerLayer
    inside = model.get_base_model()
    adapted = {name: module for name, module in inside.named_modules() if isinstance(module, layers)}
    weights = {name: module.base_layer.weight.detach() for name, module in adapted.items()}
    # Layers of other stages have none.
    before = {name: weight.to("cpu", copy=True) for name, weight in weights.items() if not weight.is_meta}
    for name, module in adapted.items():
        module.merge()
        inside.set_submodule(name, module.base_layer)
    try:
        yield inside
    finally:
        for name, module in adapted.items():
            inside.set_submodule(name, module)
            module.merged_adapters.clear()
        for name, weight in before.items():
            weights[name].copy_(weight)


def _peft() -> Any:
    try:
        import peft
        import peft.utils.transformers_weight_conversion
    except ImportError as error:
        raise ValueError("lora needs the package 'peft>=0.19': pip install 'lightning_megatron[peft]'") from error
    return peft
