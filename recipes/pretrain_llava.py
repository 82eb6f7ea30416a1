"""Trains a LLaVA on conversations with images, any part of it frozen, validates it, and generates answers.

    python recipes/pretrain_llava.py fit --config recipes/configs/llava_toy.yaml
    python recipes/pretrain_llava.py predict --config recipes/configs/llava_toy.yaml \
        --ckpt_path runs/llava_toy/version_0/checkpoints/step=600.ckpt \
        --data.prompts '["What do you see?"]' --data.prompt_images '[["picture.png"]]'

Weights start from the folders of a language model and of a vision tower (`--model.language`, `--model.vision`), or from
that of a complete LLaVA (`--model.path`). Every option of LlavaModule, LlavaDataModule, the Trainer and the strategy
can be given on the command line or in a file; `fit --print_config` prints all of them.
"""

from lightning_megatron.cli.recipe import run_recipe
from lightning_megatron.lightning_modules import LlavaDataModule, LlavaModule
from lightning_megatron.lightning_modules.print_text import PrintText
from lightning_megatron.trainer.callbacks import ThroughputMonitor

if __name__ == "__main__":
    run_recipe(
        LlavaModule,
        LlavaDataModule,
        links={
            "model.config.vocab_size": "data.vocab_size",
            "model.config.image_token": "data.image_token",
            "model.config.keeps_class_token": "data.keeps_class_token",
            "model.config.vision.image_size": "data.image_size",
            "model.config.vision.patch_size": "data.patch_size",
        },
        callbacks={"throughput": ThroughputMonitor, "print_text": PrintText},
    )
