"""Lines that Lightning prints in every run and that are about none of them: our commands leave them out."""

import logging
import re
import warnings

# Loggers, each with what it says in every run, on every rank, or at every save that a program asks for.
_NO_NEWS = {
    "lightning.pytorch.utilities.rank_zero": "Tip: For seamless cloud|TPU available: False",
    "lightning.pytorch.trainer.connectors.checkpoint_connector": "`weights_only` was not set",
    # The first rank has said it.
    "lightning.fabric.utilities.seed": r"\[rank: [1-9]\d*\] Seed set to",
    "lightning.fabric.utilities.distributed": r"Initializing distributed: GLOBAL_RANK: [1-9]",
}
# What Lightning says to itself, once a process.
_OF_LIGHTNING = r"`isinstance\(treespec, LeafSpec\)` is deprecated"


def leave_out_what_is_no_news() -> None:
    """Silences these lines in this process."""
    for name in _NO_NEWS:
        logging.getLogger(name).addFilter(_is_news)
    warnings.filterwarnings("ignore", _OF_LIGHTNING, FutureWarning)


def _is_news(record: logging.LogRecord) -> bool:
    return re.search(_NO_NEWS[record.name], record.getMessage()) is None
