"""The path of tokens through experts in order: out, the shared expert meanwhile, the chosen ones, home."""

from torch import Tensor

from lightning_megatron.moe.capacity import Capacity
from lightning_megatron.moe.dispatch import Dispatcher
from lightning_megatron.moe.experts import Experts
from lightning_megatron.moe.shared import SharedExpert
from lightning_megatron.tensor.linear import as_product_input


def mix(
    hidden_TH: Tensor,
    experts_TK: Tensor,
    weights_TK: Tensor,
    *,
    num_experts: int,
    dispatcher: Dispatcher,
    experts: Experts,
    shared: SharedExpert | None = None,
    capacity: Capacity | None = None,
) -> Tensor:
    """The weighted sum of what each token's experts make of it, and of what the shared expert does, [T, H].

    A choice of -1 is none. Talks over ep and etp, and over tp for the shared expert. Raises ValueError where the
    capacity is below one token.
    """
    num_rows = None
    if capacity is not None:
        experts_TK = capacity.kept(experts_TK, weights_TK, num_experts)
        if capacity.pads:
            num_rows = capacity.num_rows(len(experts_TK), experts_TK.shape[1], num_experts)
    # Tokens travel in the dtype that they are multiplied in.
    journey = dispatcher.dispatch(as_product_input(hidden_TH), experts_TK, weights_TK, num_rows)
    shared_TH = None if shared is None else shared(hidden_TH)
    journey.send_back(experts(journey.arrive()))
    mixed_TH = journey.come_home()
    return mixed_TH if shared_TH is None else mixed_TH + shared_TH
