"""Pre-trains a BERT on text, validates it, and predicts masked tokens.

    python recipes/pretrain_bert.py fit --config recipes/configs/bert_toy.yaml
    python recipes/pretrain_bert.py predict --config recipes/configs/bert_toy.yaml \
        --ckpt_path runs/bert_toy/version_0/checkpoints/step=1500.ckpt \
        --data.prompts '["for i in[MASK](10):"]'

Every option of BertModule, BertDataModule, the Trainer and the strategy can be given on the command line or in a file;
`fit --print_config` prints all of them.
"""

from lightning_megatron.cli.recipe import run_recipe
from lightning_megatron.lightning_modules import BertDataModule, BertModule
from lightning_megatron.lightning_modules.print_text import PrintText
from lightning_megatron.trainer.callbacks import ThroughputMonitor

if __name__ == "__main__":
    run_recipe(
        BertModule,
        BertDataModule,
        links={
            "model.config.vocab_size": "data.vocab_size",
            "model.config.add_binary_head": "data.sentence_order",
        },
        callbacks={"throughput": ThroughputMonitor, "print_text": PrintText},
    )
