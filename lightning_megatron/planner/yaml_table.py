"""YAML in which a table names nothing twice: the usual readers take the last value and say nothing."""

from typing import Any

import yaml


def yaml_of(text: str) -> Any:
    """What a text of YAML holds. Raises YAMLError, also for a key that a table names twice."""
    return yaml.load(text, Loader=_Loader)


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                told = f"{key.value} is named twice; leave one of them out"
                raise yaml.constructor.ConstructorError(None, None, told, key.start_mark)
            seen.add(key.value)
        table: dict[Any, Any] = super().construct_mapping(node, deep)
        return table
