"""Pre-trains a GPT on text, validates it, and generates text.

    python recipes/pretrain_gpt.py fit --config recipes/configs/toy.yaml
    python recipes/pretrain_gpt.py predict --config recipes/configs/toy.yaml \
        --ckpt_path runs/toy/version_0/checkpoints/step=200.ckpt \
        --data.prompts '["def main("]'

Every option of GPTModule, GPTDataModule, the Trainer and the strategy can be given on the command line or in a file;
`fit --print_config` prints all of them.
"""

from lightning_megatron.cli.recipe import run_recipe
from lightning_megatron.lightning_modules import GPTDataModule, GPTModule
from lightning_megatron.lightning_modules.print_text import PrintText
from lightning_megatron.trainer.callbacks import ThroughputMonitor

if __name__ == "__main__":
    run_recipe(
        GPTModule,
        GPTDataModule,
        links={"model.config.vocab_size": "data.vocab_size"},
        callbacks={"throughput": ThroughputMonitor, "print_text": PrintText},
    )
