"""What jsonargparse says against a value, in one line without the types that it tried on the way."""

import re

TRIED = "Does not validate against"
"""How it begins what it says of an argument that may be of several types."""

_ON_THE_WAY = (TRIED, "Subtypes:", "Errors:", "Expected a <class", "Given value", "Problem with given")
_OF_CLASSES = ("Not a valid subclass of", "Subclass types expect", "a class path (", "a dict with")
_WHERE = "Parser key"
_NAMES = {
    "<class 'int'>": "a whole number",
    "<class 'float'>": "a number",
    "<class 'bool'>": "true or false",
    "<class 'str'>": "text",
    "<class 'NoneType'>": "null",
}


def told(text: str) -> list[str]:
    """The lines of an error that say what is wrong; not those that say which types were tried on the way to it."""
    lines = _lines(text)
    said = [line for line in lines if not line.startswith((*_ON_THE_WAY, *_OF_CLASSES))]
    if len(said) < len(lines) and all(line.startswith(_WHERE) for line in said):
        said.append(rule_of(text))
    return said


def rule_of(text: str) -> str:
    """What the value must be: the reasons that are more than a type, or, where there is none, the types."""
    lines = [line for line in _lines(text) if not line.startswith(_WHERE)]
    expected = [found[1] for line in lines if (found := re.match(r"Expected an? (.+?)(\.? Got value.*)?$", line))]
    # A word that is not among those of an option says more than that an option may be a class.
    words = [f"one of {found[1]}" for name in expected if (found := re.match(r"typing\.Literal\[(.*)\]", name))]
    classes = [found[1] for line in lines if (found := re.match(rf"{_OF_CLASSES[0]} (\w+)", line))]
    kinds = [*map(_kind, expected), *(f"the class_path of a {name}" for name in classes)]
    reasons = [line for line in lines if not line.startswith((*_ON_THE_WAY, *_OF_CLASSES, "Expected a"))]
    if reasons:
        return f"is not taken: {'; '.join(reasons)}"
    return f"must be {' or '.join(dict.fromkeys(words or kinds))}"


def _lines(text: str) -> list[str]:
    return [line.strip().removeprefix("- ") for line in text.splitlines()]


def _kind(name: str) -> str:
    return _NAMES.get(name) or re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"a \1", name)
