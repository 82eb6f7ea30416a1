"""Check of a user's module before its ranks are there, where its network is built in `__init__` and shows then."""

import lightning.pytorch as pl
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_megatron.any_module.cut_experts import expert_faults
from lightning_megatron.any_module.pipelined_modules import pipelined_modules
from lightning_megatron.any_module.plan import ModelPlan
from lightning_megatron.mesh import Mesh, Sizes
from lightning_megatron.sharding import sharded_parameters
from lightning_megatron.trainer.setup.model_checks import mesh_faults, spreading_faults, unused_axis_faults
from lightning_megatron.trainer.setup.pipelined_models import (
    cut_axes,
    pipeline_faults,
    plan_of,
)


def early_model_faults(
    module: pl.LightningModule,
    sizes: Sizes,
    *,
    uses_schedule: bool,
    spreads_documents: bool,
    plan: ModelPlan | None = None,
) -> list[str]:
    """Errors that the set-up of the module on these ranks would find; none where it may build more until then."""
    is_late = any(is_overridden(name, module) for name in ("configure_model", "setup"))
    if is_late or sizes.faults() or not any(True for _ in module.parameters()):
        return []
    found = model_faults(module, sizes, uses_schedule=uses_schedule, plan=plan)
    return found + (spreading_faults(module) if spreads_documents else [])


def model_faults(
    module: pl.LightningModule, sizes: Sizes, *, uses_schedule: bool, plan: ModelPlan | None = None
) -> list[str]:
    """Errors of a module that is made and not yet cut, on ranks of these sizes."""
    plan = plan_of(module, plan)
    misfits = plan.faults(module)
    found = misfits + expert_faults(module, sizes) + mesh_faults(module, Mesh.imagine(0, sizes))
    if misfits:
        # What the plan names may not be there.
        return found
    # One that was built for other ranks than its run has is told so already.
    if not pipelined_modules(module) and not any(True for _ in sharded_parameters(module)):
        found += unused_axis_faults(module, sizes, cut_axes(module, plan, sizes))
    return found + pipeline_faults(module, sizes, uses_schedule=uses_schedule, plan=plan)
