"""`doctor`: versions, known problems, and a recipe against this machine."""

import json
from pathlib import Path

import pytest

from launch.doctor import main
from lightninglm.doctor import environment
from lightninglm.doctor.environment import known_problems, pins

RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.mark.parametrize(
    ("version", "capability", "problems"),
    [("3.3.1", 9, 0), ("3.4.0", 9, 1), ("3.6.0", 9, 1), ("3.7.0", 9, 1), ("3.7.1", 9, 0), ("3.5.0", 8, 0)],
)
def test_triton_on_hopper(version, capability, problems):
    versions = {"triton": version}
    checks = known_problems(versions.get, [(capability, 0)])
    assert len(checks) == problems
    assert all(check.state == "problem" and check.advice for check in checks)


def test_the_installed_versions_are_those_that_are_pinned():
    assert dict(pins(environment.REQUIREMENTS))["torch"] == "2.13.0"
    assert not known_problems(environment._installed, [(9, 0)])


def test_other_versions_and_missing_packages_are_found(monkeypatch):
    monkeypatch.setattr(environment, "_installed", {"torch": "2.0.0"}.get)
    found = {check.name: check.state for check in environment._packages()}
    assert found["torch"] == "warning" and found["deepspeed"] == "problem"


def test_a_recipe_that_fits_and_one_that_does_not(capsys):
    assert main(["--recipe", str(RECIPES / "tiny"), "--json"]) == 0
    checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert checks["stage experts"]["state"] == "ok" and checks["communication (gloo)"]["state"] == "ok"


def test_a_recipe_too_large_for_this_machine(monkeypatch, capsys):
    monkeypatch.setattr("launch.doctor.rank_memory", lambda ranks: 40.0)
    assert main(["--recipe", str(RECIPES / "preserving" / "8-experts-120b-router.yaml"), "--json"]) == 1
    checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    stage = next(check for name, check in checks.items() if name.startswith("stage experts-120b"))
    assert stage["state"] == "problem" and stage["advice"]


def test_bad_input(tmp_path, capsys):
    assert main(["--recipe", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err.startswith("error: ")
