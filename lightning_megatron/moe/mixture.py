"""The path of tokens through experts in order: out, something else meanwhile, the experts, home."""

from collections.abc import Callable

from torch import Tensor

from lightning_megatron.moe.experts import Experts
from lightning_megatron.moe.token_dispatcher import TokenDispatcher
from lightning_megatron.tensor.linear import as_product_input


def mix(
    hidden_TH: Tensor,
    expert_ids_TK: Tensor,
    probs_TK: Tensor,
    *,
    dispatcher: TokenDispatcher,
    experts: Experts,
    num_rows: int | None = None,
    meanwhile: Callable[[], Tensor | None] = lambda: None,
) -> tuple[Tensor, Tensor | None]:
    """The weighted sum of what each token's experts make of it, [T, H]; and what `meanwhile` gave, computed while
    tokens travel.

    A choice of -1 is none. With `num_rows` every expert gets so many rows of each rank, zeros behind those of tokens.
    Talks over ep and etp.
    """
    # Tokens travel in the dtype that they are multiplied in.
    journey = dispatcher.dispatch(as_product_input(hidden_TH), expert_ids_TK, probs_TK, num_rows)
    beside = meanwhile()
    journey.send_back(experts(journey.arrive()))
    return journey.come_home(), beside
