"""Plans of dynamic context parallelism: which group of ranks runs which documents in which microbatch.

They are made before a step by pure functions of the documents' lengths, the same on every rank, no communication.
"""

from lightning_megatron.context.balance.bound import lower_bound
from lightning_megatron.context.balance.config import DynamicContextConfig, group_sizes
from lightning_megatron.context.balance.cost import CostModel
from lightning_megatron.context.balance.fit import Measurement, fit
from lightning_megatron.context.balance.slots import RankGroup, StepPlan, step_seconds
from lightning_megatron.context.balance.solve import plan

__all__ = [
    "CostModel",
    "DynamicContextConfig",
    "Measurement",
    "RankGroup",
    "StepPlan",
    "fit",
    "group_sizes",
    "lower_bound",
    "plan",
    "step_seconds",
]
