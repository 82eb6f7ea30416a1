"""YAML without repeated keys in a table, of which the usual readers silently take the last."""

from typing import Any

import yaml


def yaml_of(text: str) -> Any:
    """Value of a YAML text. Raises YAMLError, also for a key that a table has twice."""
    return yaml.load(text, Loader=_Loader)


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                error = f"{key.value} is named twice; leave one of them out"
                raise yaml.constructor.ConstructorError(None, None, error, key.start_mark)
            seen.add(key.value)
        table: dict[Any, Any] = super().construct_mapping(node, deep)
        return table
