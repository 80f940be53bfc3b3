"""A YAML file that remembers where each key stands, takes `--set` overrides, and words errors about its keys."""

import difflib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml


class RecipeError(ValueError):
    """A recipe that cannot run. The message names the file and line, the key, the value found and what is valid."""


@dataclass
class YamlFile:
    """
    path: None when the values come from elsewhere (a checkpoint). values: the mapping it holds.
    places: dotted key -> "file:line", or "--set ..." for an override.
    """

    path: Path | None
    values: dict[str, Any]
    places: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> "YamlFile":
        """Reads a file. Raises RecipeError when it is not there, not YAML, repeats a key, or is not a mapping."""
        try:
            text = path.read_text(encoding="utf-8")
            node, values = yaml.compose(text, _Loader), yaml.load(text, _Loader)
        except FileNotFoundError as error:
            raise RecipeError(f"{path}: no such file") from error
        except (OSError, UnicodeDecodeError) as error:
            raise RecipeError(f"{path}: cannot be read ({error})") from error
        except yaml.MarkedYAMLError as error:
            raise RecipeError(f"{path}:{error.problem_mark.line + 1}: {error.problem}") from error
        except yaml.YAMLError as error:
            raise RecipeError(f"{path}: not YAML ({error})") from error
        if not isinstance(values, dict):
            raise RecipeError(f"{path}: needs a mapping of keys to values, found {values!r}")
        return cls(path, values, {key: f"{path}:{line}" for key, line in _key_lines(node)})

    def set(self, override: str) -> None:
        """Applies `dotted.key=value`, the value in YAML. Raises RecipeError when there is no such place."""
        key, equals, text = override.partition("=")
        if not (key and equals):
            raise RecipeError(f"--set {override}: needs dotted.key=value, such as train.tokens=1e6")
        *sections, last = [int(part) if part.isdigit() else part for part in key.split(".")]
        target: Any = self.values
        try:
            value = yaml.load(text, _Loader)
            for part in sections:
                if isinstance(target, dict) and target.get(part) is None:
                    target[part] = {}
                target = target[part]
            target[last] = value
        except yaml.YAMLError as error:
            raise RecipeError(f"--set {override}: the value is not YAML") from error
        except (TypeError, IndexError) as error:
            raise RecipeError(f"--set {override}: {key} is not a place in {self.path}") from error
        self.places = {place: line for place, line in self.places.items() if not place.startswith(f"{key}.")}
        self.places[key] = f"--set {override}"

    def error(self, key: str, problem: str) -> RecipeError:
        """RecipeError about a dotted key: its place, its value, the problem."""
        value: Any = self.values
        for part in key.split("."):
            value = dict(enumerate(value)) if isinstance(value, list) else value
            value = value.get(int(part) if part.isdigit() else part) if isinstance(value, dict) else None
        found = "" if value is None or isinstance(value, dict) else f" = {value!r}"
        return RecipeError(f"{self.place(key)}{key}{found}: {problem}")

    def place(self, key: str) -> str:
        """'file:line: ' of a dotted key, or of the section around it."""
        while key and key not in self.places:
            key = key.rpartition(".")[0]
        place = self.places[key] if key else self.path
        return f"{place}: " if place else ""

    def key_at(self, location: tuple, missing: bool) -> str:
        """Dotted key of a pydantic location, without the tags of unions between the keys. missing: its last one is."""
        parts, value = [], self.values
        for i, part in enumerate(location):
            there = part in value if isinstance(value, dict) else isinstance(value, list) and part in range(len(value))
            if there:
                value = value[part]
            if there or (missing and i == len(location) - 1):
                parts.append(str(part))
        return ".".join(parts)


def unknown(name: Any, known: Iterable[str], what: str = "key") -> str:
    """'unknown key; did you mean ...?', or all that are known when none is near."""
    known = list(known)
    near = difflib.get_close_matches(str(name), known, n=1)
    return f"unknown {what}; " + (f"did you mean {near[0]}?" if near else f"valid: {', '.join(known)}")


class _Loader(yaml.SafeLoader):
    """Safe YAML that refuses repeated keys and reads 1e6 and 5e-4 as numbers (YAML 1.1 takes them for text)."""

    def construct_mapping(self, node, deep=False):
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key.value} is given twice", key.start_mark)
            seen.add(key.value if isinstance(key, yaml.ScalarNode) else None)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d[\d_]*(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def _key_lines(node: yaml.Node, prefix: str = "") -> Iterator[tuple[str, int]]:
    if isinstance(node, yaml.MappingNode):
        children = [(key.value, key.start_mark, value) for key, value in node.value]
    elif isinstance(node, yaml.SequenceNode):
        children = [(i, value.start_mark, value) for i, value in enumerate(node.value)]
    else:
        return
    for key, mark, value in children:
        yield f"{prefix}{key}", mark.line + 1
        yield from _key_lines(value, f"{prefix}{key}.")
