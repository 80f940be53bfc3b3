"""`doctor`: versions, known problems, and a recipe against this machine."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from launch.doctor import main
from lightninglm.doctor import environment
from lightninglm.doctor.environment import known_problems, pins
from lightninglm.modeling.delta_rule import triton_problem

RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.mark.parametrize(
    ("version", "capability", "problems"),
    [("3.3.1", 9, 0), ("3.4.0", 9, 1), ("3.6.0", 9, 1), ("3.7.0", 9, 1), ("3.7.1", 9, 0), ("3.5.0", 8, 0)],
)
def test_triton_on_hopper(version, capability, problems):
    versions = {"triton": version}
    checks = known_problems(versions.get, [(capability, 0)])
    assert bool(triton_problem(version, (capability, 0))) == bool(checks)  # the guard of the kernels agrees
    assert len(checks) == problems
    assert all(check.state == "problem" and check.advice for check in checks)


def test_the_installed_versions_are_those_that_are_pinned():
    assert dict(pins(environment.REQUIREMENTS))["torch"] == "2.13.0"
    assert not known_problems(environment._installed, [(9, 0)])


def test_other_versions_and_missing_packages_are_found(monkeypatch):
    monkeypatch.setattr(environment, "_installed", {"torch": "2.0.0"}.get)
    found = {check.name: check.state for check in environment._packages()}
    assert found["torch"] == "warning" and found["deepspeed"] == "problem"


def test_a_node_with_gpus_that_torch_does_not_see(monkeypatch):
    monkeypatch.setattr(environment, "_driver", lambda: "580.95.05")
    (check,) = environment._gpus(8)
    assert check.state == "problem" and "580.95.05" in check.found and "torch 2.13.0" in check.advice


def test_gpus_of_different_kinds_and_fewer_than_wanted(monkeypatch):
    kinds = [
        SimpleNamespace(name="H200", total_memory=140 * 2**30),
        SimpleNamespace(name="A100", total_memory=80 * 2**30),
    ]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", kinds.__getitem__)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda i, j: i < j)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: not including_emulation)
    monkeypatch.setattr(environment, "_driver", lambda: "580.95.05")
    checks = {check.name: check for check in environment._gpus(8)}
    assert checks["GPUs"].state == "problem" and "A100 80 GiB" in checks["GPUs"].found
    assert {name: checks[name].state for name in ("GPUs alike", "bf16", "GPU to GPU")} == {
        "GPUs alike": "warning", "bf16": "ok", "GPU to GPU": "warning",
    }  # fmt: skip
    assert next(environment._gpus(2)).state == "ok"
    assert environment.rank_memory(2) == 80


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
    with pytest.raises(SystemExit, match="2"):
        main(["--num-gpus", "0"])


@pytest.mark.parametrize("package", ["deepspeed", "transformers", "pydantic"])
def test_the_report_comes_without_a_package(package):
    program = f"""
import sys
sys.modules[{package!r}] = None
from launch.doctor import main
sys.exit(main(["--recipe", "recipes/tiny", "--json"]))
"""
    result = subprocess.run([sys.executable, "-c", program], cwd=RECIPES.parent, capture_output=True, text=True)
    assert result.returncode == 1, result.stderr
    checks = {check["name"]: check for check in json.loads(result.stdout)["checks"]}
    assert package in checks["recipe"]["found"] and "python" in checks


def test_a_run_folder_that_cannot_be_made(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main(["--run", str(tmp_path / "file" / "run"), "--json"]) == 1
    checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert checks["disk"]["state"] == "problem"
