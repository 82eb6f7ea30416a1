"""Trains any causal model of transformers, as it is, on text: from its configuration alone, or on from its weights.

    python recipes/pretrain_hf.py fit --config recipes/configs/hf_toy.yaml --model.path Qwen3-0.6B \
        --data.path corpus.jsonl --export.path trained

The folder has a config.json, a tokenizer, and weights unless model.from_scratch is true. Every option of CausalModule,
GPTDataModule, the Trainer and the strategy can be given on the command line or in a file; `fit --print_config` prints
all of them.
"""

from lightning_megatron.cli.recipe import run_recipe
from lightning_megatron.lightning_modules import CausalModule, GPTDataModule
from lightning_megatron.lightning_modules.export import ExportPretrained

if __name__ == "__main__":
    run_recipe(
        CausalModule,
        GPTDataModule,
        links={"model.path": "data.tokenizer"},
        made_links={"model.vocab_size": "data.vocab_size"},
        callbacks={"export": ExportPretrained},
    )
