"""Reads and writes configurations as YAML files; a key that stands twice in a mapping is an error."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import yaml

from fxqat.errors import ConfigError
from fxqat.utils.files import atomic_path


class _UniqueKeys(yaml.SafeLoader):  # type: ignore[misc]  # yaml has no types
    """Reads plain values; every key of a mapping stands once."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        first: dict[Any, int] = {}
        for key, _ in node.value:
            name, line = (key.tag, key.value) if isinstance(key, yaml.ScalarNode) else id(key), key.start_mark.line + 1
            if name in first:
                raise ConfigError(
                    f"line {line}: key {key.value!r} already stands in line {first[name]}: keep one of the two"
                )
            first[name] = line
        found: dict[Any, Any] = super().construct_mapping(node, deep)
        return found


def read_yaml(path: Path) -> Any:
    """The values of a YAML file.

    Raises:
        ConfigError: the file cannot be read, is not YAML, or has a key twice.
    """
    try:
        return yaml.load(path.read_text(encoding="utf-8"), Loader=_UniqueKeys)  # noqa: S506  a SafeLoader
    except ConfigError as cause:
        raise ConfigError(f"{path}: {cause}") from cause
    except (OSError, UnicodeDecodeError) as cause:
        raise ConfigError(f"prepare_custom_config_dict: cannot read {path}: {cause}") from cause
    except yaml.YAMLError as cause:
        raise ConfigError(f"prepare_custom_config_dict: {path} is not YAML: {cause}") from cause


def yaml_text(config: dict[str, Any], comment: str = "") -> str:
    """A configuration as YAML, under a comment.

    Raises:
        ConfigError: it holds something that YAML cannot express, such as a class.
    """
    try:
        body: str = yaml.dump(config, Dumper=_Plain, sort_keys=False, default_flow_style=None, width=110)
    except yaml.YAMLError as cause:
        raise ConfigError(
            f"the configuration cannot be written as YAML: {cause}. Give classes and functions by name or path, or "
            "keep the configuration as a dict."
        ) from cause
    return "".join(f"# {line}\n" for line in comment.splitlines()) + body


class _Plain(yaml.SafeDumper):  # type: ignore[misc]  # yaml has no types
    """Writes equal values in full, without references (anchors)."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def write_yaml(config: dict[str, Any], path: str | os.PathLike[str], comment: str = "") -> None:
    """Write a configuration; after a crash the old file is still there.

    Raises:
        ConfigError: as :func:`yaml_text`, or the file cannot be written.
    """
    text = yaml_text(config, comment)
    with atomic_path(path, ConfigError) as temporary:
        temporary.write_text(text, encoding="utf-8")
