"""What `lightning-megatron certify` answers: the certificate of a module of the user's, or of a recipe."""

import argparse
import json
import sys
from pathlib import Path

from lightning_megatron.cli.usage import UsageError
from lightning_megatron.testing.maker_spec import absolute
from lightning_megatron.testing.proof import CertifyError, NotTrainedError, certified
from lightning_megatron.testing.subject import MakeSubject
from lightning_megatron.testing.tiny import TinyTwin
from lightning_megatron.testing.user_file import FromFiles


def run_certify(options: argparse.Namespace) -> int:
    """Prints the certificate; 1 where something differs. Raises UsageError with all errors of what was given."""
    names = [name.strip() for name in options.layouts.split(",") if name.strip()]
    try:
        certificate = certified(
            TinyTwin(make=subject_of(options)) if options.tiny else subject_of(options),
            layouts="all" if names == ["all"] else names,
            steps=options.steps,
            rows=options.rows,
            limit_seconds=options.limit_seconds,
            progress=lambda what: print(f"{what} ...", file=sys.stderr, flush=True),
        )
    except NotTrainedError as error:
        is_named = Path(options.module.rpartition(":")[0] or options.module).name in str(error)
        told = str(error) if is_named else f"{options.module}: {error}"
        raise UsageError(told.splitlines()) from error
    except CertifyError as error:
        raise UsageError(str(error).splitlines()) from error
    print(json.dumps(certificate.record, indent=1) if options.json else certificate.text)
    return 0 if certificate else 1


def subject_of(options: argparse.Namespace) -> MakeSubject:
    """What makes the module and its data that the options name."""
    trainer = {
        name: value
        for name in ("gradient_clip_val", "accumulate_grad_batches")
        if (value := getattr(options, name)) is not None
    }
    if options.module.endswith((".yaml", ".yml")):
        # LightningCLI needs an extra.
        from lightning_megatron.cli.certify_recipe import FromRecipe

        return FromRecipe(path=Path(options.module).resolve(), trainer=trainer)
    return FromFiles(module=absolute(options.module), data=options.data and absolute(options.data), trainer=trainer)
