"""Text generation by a language model: rows of different lengths, token by token, the same on every layout.

    generate_rows      the loop: calls a `NextLogits`, draws a token for each row that is not over, until all are
    GPTNextLogits      logits of a GPT: the prompts in one call, then the new tokens alone, with a key-value cache
    llava_next_logits  the same, with the images of the prompts in the first call

Every rank calls alike: a model call is a collective. One rank broadcasts what it draws to those that share the row.
A model of another kind brings its own `NextLogits`: what it makes once of its other inputs, it makes in the first call.

B rows, L tokens of the longest row so far and room after it, V vocabulary.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.comm import collectives
from lightning_megatron.context.cache import KeyValueCache
from lightning_megatron.mesh import Axis
from lightning_megatron.models.gpt import GPTModel
from lightning_megatron.models.images import Images, images_by_row
from lightning_megatron.models.llava import LlavaModel
from lightning_megatron.models.ragged_rows import row_lengths, slice_rows
from lightning_megatron.models.sampling import GenerationConfig, draw
from lightning_megatron.transformer.decode_state import DecodeState

NextLogits = Callable[[Tensor, Tensor], Tensor]
"""Logits [B, V] of what follows, in a text [B, L], the first `lengths_B` (on the host) tokens of each row.

Of a row that has not grown since the last call they may be anything."""


def generate(
    model: GPTModel,
    tokens: Tensor,
    config: GenerationConfig,
    *,
    lengths: Tensor | None = None,
    samples: Tensor | None = None,
    images: Images | None = None,
) -> list[Tensor]:
    """The prompts with what the model adds, a tensor [length] for each row; the same on every rank.

    `tokens` [batch, sequence] are filled up at their ends to one length; `lengths` [batch] says how long the prompts
    are, where it is not the same. `samples` [batch] are the numbers of the rows among all that are generated, which
    with the seed name the draws; from 0 where not given. `images` are those of the prompts of a LLaVA, as
    `images_by_row` takes them without rows. A model with learned positions sees the last `max_sequence_length` tokens.
    Raises ValueError for prompts without a token, RuntimeError in training mode.
    """
    if model.training:
        raise RuntimeError("generate was called on a model in training mode, which drops; call model.eval() first")
    mesh, batch = model.mesh, tokens.shape[0]
    # Ranks that share experts or weights make each call together, and end together.
    together = (*model.gathers_over, *(() if model.config.moe is None else (mesh.axis("ep"), mesh.axis("etp"))))
    if isinstance(model, LlavaModel):
        next_logits = llava_next_logits(model, batch, images)
    elif images is None:
        next_logits = GPTNextLogits(model, batch)
    else:
        raise ValueError(f"images are for a LlavaModel, and this is a {type(model).__name__}; leave them out")
    return generate_rows(
        next_logits,
        tokens,
        row_lengths(tokens, lengths),
        config,
        samples_B=torch.arange(batch) if samples is None else samples,
        sharing=(mesh.tp, mesh.cp),
        together=together,
    )


@torch.no_grad()
def generate_rows(
    next_logits: NextLogits,
    tokens_BS: Tensor,
    lengths_B: Tensor,
    config: GenerationConfig,
    *,
    samples_B: Tensor,
    sharing: Sequence[Axis],
    together: Sequence[Axis] = (),
) -> list[Tensor]:
    """Each row with what follows, up to `max_new_tokens` or its first stop token.

    Ranks of the axes `sharing` have the same rows, and take the first one's draws: of equal rows they may have logits
    that differ in the last bits. Ranks of `together` call `next_logits` equally often.
    """
    text_BL = torch.nn.functional.pad(tokens_BS, (0, config.max_new_tokens))
    lengths_B, samples_B = lengths_B.clone(), samples_B.to(lengths_B)
    stop_tokens = torch.tensor(config.stop_tokens, dtype=torch.int64)
    rows_B = torch.arange(len(lengths_B))
    is_over_B = torch.zeros(len(lengths_B), dtype=torch.bool)
    for _ in range(config.max_new_tokens):
        if _is_over(bool(is_over_B.all()), together, text_BL.device):
            break
        logits_BV = next_logits(text_BL, lengths_B)
        device = logits_BV.device
        drawn_B = draw(logits_BV, config, samples_B=samples_B.to(device), positions_B=lengths_B.to(device)).contiguous()
        for axis in sharing:
            collectives.broadcast_(drawn_B, axis)
        drawn_B, going = drawn_B.cpu(), rows_B[~is_over_B]
        text_BL[going.to(text_BL.device), lengths_B[going].to(text_BL.device)] = drawn_B[going].to(text_BL)
        lengths_B[going] += 1
        is_over_B |= torch.isin(drawn_B, stop_tokens)
    return [row[:length].clone() for row, length in zip(text_BL, lengths_B.tolist(), strict=True)]


def llava_next_logits(model: LlavaModel, num_rows: int, images: Images | None) -> NextLogits:
    """Next-token logits of rows of a LLaVA with their images; -inf for the image token, which has no image."""
    by_row = images_by_row(images, None, num_rows)
    next_logits = GPTNextLogits(model, num_rows, {} if by_row is None else {"images": by_row})

    def text_logits(text_BL: Tensor, lengths_B: Tensor) -> Tensor:
        logits_BV = next_logits(text_BL, lengths_B)
        is_image_V = torch.arange(logits_BV.shape[1], device=logits_BV.device) == model.config.image_token
        return logits_BV.masked_fill(is_image_V, -torch.inf)

    return text_logits


class GPTNextLogits:
    """Next-token logits of rows of a GPT; each call takes only new tokens, as far as the model allows it, with a
    key-value cache. `prompt` are inputs of the call that has the beginnings of the rows."""

    def __init__(self, model: GPTModel, num_rows: int, prompt: Mapping[str, Any] = MappingProxyType({})) -> None:
        self._model, self._prompt = model, prompt
        self._cache = KeyValueCache(num_rows, cp=model.mesh.cp) if model.is_extendable else None
        self._rows_B = torch.arange(num_rows)
        self._seen_B = torch.zeros(num_rows, dtype=torch.int64)
        self._limit = model.config.max_sequence_length if model.config.position == "learned" else None

    def __call__(self, text_BL: Tensor, lengths_B: Tensor) -> Tensor:
        if self._limit is not None and int(lengths_B.max()) > self._limit:
            if self._prompt:
                raise ValueError(
                    f"a row has come to {int(lengths_B.max())} tokens, and images cannot be left behind as text is "
                    f"behind max_sequence_length ({self._limit}); ask for fewer new tokens, or give fewer images"
                )
            # All tokens that are still seen stand at new positions from now on.
            self._cache = None
        if self._cache is None:
            return self._without_cache(text_BL, lengths_B)
        new_B = lengths_B - self._seen_B
        tokens_BS = slice_rows(text_BL, self._seen_B, new_B)
        decode_state = DecodeState(lengths_B=new_B, seen_B=self._seen_B, rows_B=self._rows_B, cache=self._cache)
        # Tokens after the prompts see their images by keys and values.
        prompt = {} if decode_state.extends else self._prompt
        logits_BV: Tensor = self._model(tokens_BS, decode_state=decode_state, **prompt)
        self._cache.close()
        self._seen_B = lengths_B.clone()
        return logits_BV

    def _without_cache(self, text_BL: Tensor, lengths_B: Tensor) -> Tensor:
        """Logits from all tokens that the model sees, each row as if it were alone."""
        seen_B = lengths_B if self._limit is None else lengths_B.clamp(max=self._limit)
        tokens_BS = slice_rows(text_BL, lengths_B - seen_B, seen_B)
        index_S = torch.arange(tokens_BS.shape[1])
        segments_BS = torch.where(index_S < seen_B.unsqueeze(1), 0, -1)
        # Where there is padding, nothing of it may count, in no expert's capacity either.
        segments = None if bool((segments_BS == 0).all()) else segments_BS.to(text_BL.device)
        zeros_B = torch.zeros_like(seen_B)
        decode_state = DecodeState(lengths_B=seen_B, seen_B=zeros_B, rows_B=self._rows_B, cache=None)
        logits_BV: Tensor = self._model(tokens_BS, segments=segments, decode_state=decode_state, **self._prompt)
        return logits_BV


def _is_over(is_over: bool, together: Sequence[Axis], device: torch.device) -> bool:
    """Whether no rank of these axes has anything to do."""
    flag = torch.tensor(int(is_over), device=device)
    for axis in together:
        flag = collectives.all_reduce(flag, axis, "min")
    return bool(flag)
