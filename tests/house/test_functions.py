"""Autograd Functions are such that every torch that is supported compiles them right.

Dynamo of torch 2.11 gives a wrong gradient, in silence, to a Function whose `forward` returns the tensor that it has
changed in place (that of 2.13 does not). Another tensor of the same memory, as `detach` makes, is right.
"""

import ast
import re
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "lightning_megatron"
IN_PLACE = re.compile(r"\.\w+_\(|_into\(|\bout=|[-+*/]= ")
# They return views of what they changed.
VIEWS = {"_SplitHeads"}


def functions() -> dict[str, ast.FunctionDef]:
    """The `forward` of each autograd Function of the package, by its class."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and "autograd.Function" in " ".join(map(ast.unparse, node.bases)):
                [forward] = [part for part in node.body if isinstance(part, ast.FunctionDef) and part.name == "forward"]
                found[node.name] = forward
    return found


def test_no_function_returns_the_tensor_that_it_changed() -> None:
    changing = {name: forward for name, forward in functions().items() if IN_PLACE.search(ast.unparse(forward))}
    assert len(changing) > 5
    for name, forward in changing.items():
        returned = [ast.unparse(part) for part in ast.walk(forward) if isinstance(part, ast.Return)]
        assert name in VIEWS or all(text.endswith(".detach()") for text in returned), (name, returned)
