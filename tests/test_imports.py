"""Imports go one way through the house, so that every part can be read and used without those above it."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ALLOWED = {
    "lightninglm/modeling": set(),
    "lightninglm/checkpoint": {"lightninglm/modeling"},
    "lightninglm/data": set(),
    "lightninglm/distributed": {"lightninglm/modeling", "lightninglm/checkpoint", "lightninglm/data"},
    "lightninglm/training": {
        "lightninglm/distributed",
        "lightninglm/modeling",
        "lightninglm/checkpoint",
        "lightninglm/data",
        "lightninglm/recipe.py",
    },
    "lightninglm/planning": {
        "lightninglm/training",
        "lightninglm/distributed",
        "lightninglm/modeling",
        "lightninglm/checkpoint",
        "lightninglm/recipe.py",
    },
    "lightninglm/doctor": {"lightninglm/checkpoint"},
    "lightninglm/recipe.py": {"lightninglm/modeling", "lightninglm/data", "lightninglm/yaml_file.py"},
    "lightninglm/yaml_file.py": set(),
    "growth": {"lightninglm/modeling", "lightninglm/checkpoint"},
}


def files_of(part: str) -> list[Path]:
    path = ROOT / part
    return [path] if path.suffix == ".py" else sorted(path.rglob("*.py"))


def imported_modules(file: Path) -> set[str]:
    """Absolute module names that a file imports anywhere, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = file.relative_to(ROOT).parent.parts
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, [base, node.module]))
            found.add(module)
            found |= {f"{module}.{alias.name}" for alias in node.names}
    return found


def part_of(module: str) -> str | None:
    """The part of the house that a module belongs to; None for libraries."""
    path = module.replace(".", "/")
    for part in ALLOWED:
        name = part.removesuffix(".py")
        if path == name or path.startswith(name + "/"):
            return part
    return None


@pytest.mark.parametrize("part", ALLOWED)
def test_a_part_imports_only_what_lies_below_it(part):
    assert files_of(part), f"{part} is empty"
    for file in files_of(part):
        for module in imported_modules(file):
            other = part_of(module)
            assert other in {None, part, *ALLOWED[part]}, f"{file.relative_to(ROOT)} imports {module}"
            assert module.split(".")[0] != "launch", f"{file.relative_to(ROOT)} imports {module}"


@pytest.mark.parametrize("part", ["lightninglm/modeling", "lightninglm/checkpoint", "lightninglm/data", "growth"])
def test_only_the_distributed_part_knows_deepspeed(part):
    for file in files_of(part):
        assert not any(module.split(".")[0] == "deepspeed" for module in imported_modules(file)), file


def test_modeling_imports_itself_relatively_so_that_a_checkpoint_can_carry_it():
    for file in files_of("lightninglm/modeling"):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        names = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and not node.level]
        assert not any(name.startswith("lightninglm") for name in names), file
