"""The commands of `lightning-megatron`, each with its line in `--help`. A new command is a new file and a line here.

`--help` of all commands is printed without importing any of them.
"""

COMMANDS = {
    "plan": "which layouts fit on so many GPUs, and how fast each would be",
    "dry-run": "memory, FLOPs and messages of a rank, by running its step on tensors without numbers",
    "schedule": "show a pipeline schedule: its order, its bubble, what it keeps",
    "checkpoint": "look into checkpoints, check them, make one file of one, remove what is left over",
    "convert": "convert between a Hugging Face folder and a checkpoint directory",
    "prepare-data": "turn text into the token files that training reads",
}
