"""From text to batches: documents, tokens, samples, their order, and batches. Knows nothing of Lightning.

documents = load_documents(path="corpus/")                               # one process first, then all
tokenizer = train_tokenizer(documents["text"], 32_000, "tokenizer.json")  # one process; the others load it
samples = PackedTokens(prepare_tokens(documents, tokenizer, "cache/"), sequence_length=1024)
sampler = GlobalBatchSampler(samples, global_batch_size=256, num_replicas=dp.size, rank=dp.rank)
loader = DataLoader(samples, sampler.num_replica_samples, sampler=sampler, collate_fn=collate_tokens)
"""

from lightning_megatron.data.chat_samples import ChatSamples, PackedChats, prepare_chats
from lightning_megatron.data.chat_template import ChatTemplate, load_chat_template
from lightning_megatron.data.collate import collate_padded, collate_tokens
from lightning_megatron.data.pack import PackedTokens, TokenBlocks, pack_documents, prepare_tokens
from lightning_megatron.data.packed_documents import (
    DocumentRows,
    PackedDocuments,
    document_lengths,
    pack_rows,
)
from lightning_megatron.data.packing import LongDocuments
from lightning_megatron.data.sampler import GlobalBatchSampler
from lightning_megatron.data.sources import load_documents, load_rows, split_documents
from lightning_megatron.data.tokenizer import Tokenizer, load_tokenizer, train_tokenizer

__all__ = [
    "ChatSamples",
    "ChatTemplate",
    "DocumentRows",
    "GlobalBatchSampler",
    "LongDocuments",
    "PackedChats",
    "PackedDocuments",
    "PackedTokens",
    "TokenBlocks",
    "Tokenizer",
    "collate_padded",
    "collate_tokens",
    "document_lengths",
    "load_chat_template",
    "load_documents",
    "load_rows",
    "load_tokenizer",
    "pack_documents",
    "pack_rows",
    "prepare_chats",
    "prepare_tokens",
    "split_documents",
    "train_tokenizer",
]
