"""A model's weights against the memory of the machine, before the first of them is made.

Only the weights, and the least of them that a machine can hold: what is refused here can never run. What a run takes in
all is the planner's to say.
"""

from typing import Any

from lightning_megatron.host_memory import machine_memory_bytes
from lightning_megatron.mesh import Sizes
from lightning_megatron.rules.limits import model_limit_faults
from lightning_megatron.transformer.config import LanguageModelConfig
from lightning_megatron.transformer.cost import model_parameters

_GIB = 2**30


def memory_faults(model: Any, sizes: Sizes, *, num_processes: int, precision: str) -> list[str]:
    """One sentence where this machine's memory cannot hold its processes' weights; its devices are CPUs."""
    if not isinstance(model, LanguageModelConfig) or model_limit_faults(model):
        return []
    bytes_each = 8 if precision.startswith("64") else 4 if precision.startswith("32") else 2
    cuts = max(1, sizes.tp) * max(1, sizes.pp) * max(1, sizes.ep) * max(1, sizes.etp)
    parameters = model_parameters(model)
    needed, memory = parameters * bytes_each * num_processes / cuts, machine_memory_bytes()
    if needed <= memory:
        return []
    return [
        f"the weights of the model ({parameters:,} parameters) take at least {needed / _GIB:,.1f} GiB of this machine "
        f"for its {num_processes} processes, and it has {memory / _GIB:,.1f} GiB: make hidden_size "
        f"({model.hidden_size}), num_layers ({model.num_layers}) or vocab_size ({model.vocab_size}) smaller, or use "
        "more machines and a larger tensor or pipeline parallel size"
    ]
