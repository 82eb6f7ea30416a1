"""Specs of what a user's file makes, `path.py:Name` or `package.module:Name`, before anything of it is imported."""

from pathlib import Path


def absolute(spec: str) -> str:
    """The spec with its file as an absolute path: processes of a fork server may stand in another folder."""
    where, colon, name = spec.rpartition(":")
    return f"{Path(where).resolve()}{colon}{name}" if where.endswith(".py") else spec


def spec_fault(spec: str) -> str:
    """What shows to be wrong with a spec before its file is run; empty where nothing does."""
    where, _, name = spec.rpartition(":")
    if not where or not name.isidentifier():
        return f"{spec!r} must be a file and a name in it, as in module.py:MyModule"
    return f"{Path(where).resolve()} is no file" if where.endswith(".py") and not Path(where).is_file() else ""
