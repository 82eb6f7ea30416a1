"""From text to batches: documents, tokens, samples, their order, and batches. Knows nothing of Lightning.

documents = load_documents(path="corpus/")                               # one process first, then all
tokenizer = train_tokenizer(documents["text"], 32_000, "tokenizer.json")  # one process; the others load it
samples = GPTSamples(prepare_corpus(documents, tokenizer, "cache/"), sequence_length=1024)
sampler = GlobalBatchSampler(samples, global_batch_size=256, num_replicas=dp.size, rank=dp.rank)
loader = DataLoader(samples, sampler.num_replica_samples, sampler=sampler, collate_fn=collate_tokens)
"""

from typing import TYPE_CHECKING

from lightning_megatron.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from lightning_megatron.data.answer_samples import AnswerSamples, PackedAnswers, prepare_answers
    from lightning_megatron.data.batch_ramp import BatchRamp
    from lightning_megatron.data.bert_samples import BertSampleConfig, BertSpans
    from lightning_megatron.data.blend import Blend, BlendedSamples
    from lightning_megatron.data.chat_samples import ChatSamples, PackedChats, prepare_chats
    from lightning_megatron.data.chat_template import ChatTemplate, load_chat_template
    from lightning_megatron.data.collate import collate_padded, collate_tokens
    from lightning_megatron.data.corpus import TokenCorpus, corpus_in_memory
    from lightning_megatron.data.epoch_permutation import BlendedEpochs, InfiniteSampler, ShuffledEpochs
    from lightning_megatron.data.gpt_samples import DocumentStretches, GPTSamples
    from lightning_megatron.data.image_chats import encode_prompt, image_template
    from lightning_megatron.data.image_samples import ImageSamples, PackedImageSamples, prepare_image_chats
    from lightning_megatron.data.images import ImageConfig, load_image
    from lightning_megatron.data.masking import Masking, mask_words
    from lightning_megatron.data.megatron_files import MegatronCorpus, megatron_writer, token_dtype
    from lightning_megatron.data.middle_filling import FillInTheMiddle, fill_documents, fill_in_the_middle
    from lightning_megatron.data.packed_documents import (
        DocumentRows,
        PackedDocuments,
        pack_rows,
    )
    from lightning_megatron.data.packing import LongDocuments
    from lightning_megatron.data.preference_samples import PreferenceSamples, prepare_preferences
    from lightning_megatron.data.prepare import prepare_corpus
    from lightning_megatron.data.sampler import EpochSampler, GlobalBatchSampler
    from lightning_megatron.data.sentences import split_sentences
    from lightning_megatron.data.sources import load_documents, load_rows, split_documents
    from lightning_megatron.data.span_corruption import SpanCorruption, T5Pieces, corrupt_spans
    from lightning_megatron.data.token_roles import WordStarts, sentinels, special_tokens
    from lightning_megatron.data.tokenizer import FastTokenizer, Tokenizer, train_tokenizer
    from lightning_megatron.data.tokenizer_files import load_tokenizer
else:
    __getattr__, __dir__ = lazy_exports(__name__, __file__)

__all__ = [
    "AnswerSamples",
    "BatchRamp",
    "BertSampleConfig",
    "BertSpans",
    "Blend",
    "BlendedEpochs",
    "BlendedSamples",
    "ChatSamples",
    "ChatTemplate",
    "DocumentRows",
    "DocumentStretches",
    "EpochSampler",
    "FastTokenizer",
    "FillInTheMiddle",
    "GPTSamples",
    "GlobalBatchSampler",
    "ImageConfig",
    "ImageSamples",
    "InfiniteSampler",
    "LongDocuments",
    "Masking",
    "MegatronCorpus",
    "PackedAnswers",
    "PackedChats",
    "PackedDocuments",
    "PackedImageSamples",
    "PreferenceSamples",
    "ShuffledEpochs",
    "SpanCorruption",
    "T5Pieces",
    "TokenCorpus",
    "Tokenizer",
    "WordStarts",
    "collate_padded",
    "collate_tokens",
    "corpus_in_memory",
    "corrupt_spans",
    "encode_prompt",
    "fill_documents",
    "fill_in_the_middle",
    "image_template",
    "load_chat_template",
    "load_documents",
    "load_image",
    "load_rows",
    "load_tokenizer",
    "mask_words",
    "megatron_writer",
    "pack_rows",
    "prepare_answers",
    "prepare_chats",
    "prepare_corpus",
    "prepare_image_chats",
    "prepare_preferences",
    "sentinels",
    "special_tokens",
    "split_documents",
    "split_sentences",
    "token_dtype",
    "train_tokenizer",
]
