"""`doctor hashes`: two runs are equal, or the tensors that differ are named."""

import json
from pathlib import Path

import pytest

from launch.doctor import main
from lightninglm.checkpoint import CheckpointError, CheckpointWriter, read_hashes, step_folder, write_hashes
from tests.checkpoint.checkpoints import CONFIG, STATE, tensors


def make_run(folder: Path, seeds: dict[str, int]) -> Path:
    trained = []
    for stage, seed in seeds.items():
        with CheckpointWriter(folder / stage / step_folder(7)) as writer:
            for name, tensor in tensors(seed).items():
                writer.add(name, tensor)
            checkpoint = writer.commit(CONFIG, STATE | {"lineage": [{"stage": name} for name in trained]})
        write_hashes(checkpoint)
        trained.append(stage)
    return folder


@pytest.fixture
def runs(tmp_path):
    return make_run(tmp_path / "a", {"seed": 0, "moe": 1}), make_run(tmp_path / "b", {"seed": 0, "moe": 2})


def compare(capsys, *paths) -> tuple[int, dict]:
    code = main(["hashes", *map(str, paths), "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_equal_runs(runs, capsys):
    code, result = compare(capsys, runs[0], runs[0])
    assert code == 0 and result["same"]
    assert list(result["stages"]) == ["seed", "moe"]
    assert result["stages"]["seed"]["equal"] == len(tensors())


def test_the_switch_for_json_may_stand_first(runs, capsys):
    assert main(["--json", "hashes", str(runs[0]), str(runs[0])]) == 0
    assert json.loads(capsys.readouterr().out)["same"]


def test_the_differing_tensors_are_named(runs, capsys):
    code, result = compare(capsys, *runs)
    assert code == 1
    assert result["stages"]["seed"]["same"] and result["first_difference"] == "moe"
    random = {name for name, value in tensors().items() if value.is_floating_point() and value.numel() > 2}
    assert set(result["stages"]["moe"]["different"]) >= random


def test_every_form_of_a_stage_reads_the_same(runs):
    stage = runs[0] / "seed"
    forms = (stage, stage / step_folder(7), stage / "hashes.json")
    found = [dict(read_hashes(form)[""].tensors) for form in forms]
    assert found[0] == found[1] == found[2]


def test_a_missing_stage_is_a_difference(runs, tmp_path, capsys):
    code, result = compare(capsys, runs[0], make_run(tmp_path / "c", {"seed": 0}))
    assert code == 1 and result["lacking"][str(tmp_path / "c")] == ["moe"]


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"format": 9, "checkpoint": "x", "after": [], "tensors": {}}'])
def test_a_damaged_file_is_refused(runs, content):
    path = runs[0] / "seed" / "hashes.json"
    path.write_text(content)
    with pytest.raises(CheckpointError, match=r"hashes\.json"):
        read_hashes(runs[0])


def test_bad_input(runs, tmp_path, capsys):
    assert main(["hashes", str(runs[0]), str(tmp_path / "none")]) == 2
    assert main(["hashes", str(runs[0]), str(runs[1] / "seed")]) == 2
    (tmp_path / "empty").mkdir()
    assert main(["hashes", str(runs[0]), str(tmp_path / "empty")]) == 2
    assert all(line.startswith("error: ") for line in capsys.readouterr().err.splitlines())
