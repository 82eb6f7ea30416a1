"""`lightning-megatron completion`: a script for bash or zsh that completes commands, options and names of recipes.

It is made of the parsers of all commands, so that a new command or option is in it. zsh runs bash's own script.
"""

import argparse
from collections.abc import Iterator
from typing import Any

from lightning_megatron.cli.commands import add_command
from lightning_megatron.cli.shipped_recipes import shipped_recipes

# What may follow is read from the commands that stand before the cursor; files complete where nothing of it fits.
_BASH = """\
_lightning_megatron() {{
  local called="" word
  for word in "${{COMP_WORDS[@]:1:$((COMP_CWORD - 1))}}"; do
    case "$called $word" in
      {commands}) called="$called $word" ;;
    esac
  done
  case "$called" in
{cases}
  esac
  COMPREPLY=($(compgen -W "$offered" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _lightning_megatron lightning-megatron
"""
_ZSH = "autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n"
# Commands whose first argument is the name of a recipe.
_TAKE_RECIPES = ("train", "recipes copy")


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    """Adds the command."""
    parser = add_command(
        commands,
        "completion",
        "Prints a script that completes commands, options and names of recipes.",
        run=_run,
        epilog='bash: eval "$(lightning-megatron completion bash)" in ~/.bashrc\n'
        'zsh:  eval "$(lightning-megatron completion zsh)" in ~/.zshrc',
    )
    shells = ("bash", "zsh")
    parser.add_argument("shell", metavar="SHELL", choices=shells, help=f"what reads the script: {' or '.join(shells)}")


def _run(options: argparse.Namespace) -> None:
    # `main` has a line for this command, which would be an import in a circle.
    from lightning_megatron.cli.main import command_line

    before = _ZSH if options.shell == "zsh" else ""
    print(before + _BASH.format(**_parts(command_line())), end="")


def _parts(parser: argparse.ArgumentParser) -> dict[str, str]:
    """What the script's gaps are filled with: the commands, and the words that may follow each."""
    recipes = [one.name for one in shipped_recipes()]
    words = {called: [*own, *(recipes if called in _TAKE_RECIPES else ())] for called, own in _words(parser, "")}
    return {
        "commands": "|".join(f'" {called}"' for called in words if called),
        "cases": "\n".join(
            f'    "{called and " " + called}") local offered="{" ".join(own)}" ;;' for called, own in words.items()
        ),
    }


def _words(parser: argparse.ArgumentParser, called: str) -> Iterator[tuple[str, list[str]]]:
    """Each command by its full name, with its options and the commands below it."""
    below = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    names = {name: one for action in below for name, one in action.choices.items()}
    options = [option for option in parser._option_string_actions if option.startswith("--")]
    yield called, [*names, *options]
    for name, one in names.items():
        yield from _words(one, f"{called} {name}".strip())
