"""Every stage of every recipe folder starts with --dry-run, which says what would happen and writes nothing."""

from pathlib import Path

import pytest

import launch.lineage
import launch.stage

RECIPES = Path(__file__).parents[2] / "recipes"
FOLDERS = sorted(file.parent.name for file in RECIPES.glob("*/lineage.yaml"))
STAGES = sorted(file for file in RECIPES.glob("*/*.yaml") if file.name != "lineage.yaml")


@pytest.mark.parametrize("file", STAGES, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_every_stage_starts(file, capsys, tmp_path):
    run = tmp_path / "run"
    assert launch.stage.main(["--recipe", str(file), "--run", str(run), "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "steps; next" in printed and f"--recipe {file} --run {run}" in printed
    assert ("has no checkpoint in" in printed) == (not file.name.startswith("1-"))
    assert not run.exists()


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_lineage_is_told_whole(folder, capsys, tmp_path):
    run = tmp_path / "run"
    files = [file for file in STAGES if file.parent.name == folder]
    overrides = ["--set", "evaluate.sequences=3"]
    assert launch.lineage.main([str(RECIPES / folder), "--run", str(run), "--dry-run", *overrides]) == 0
    printed = capsys.readouterr().out
    for file in files:
        assert f"launch/stage.py --recipe {file} --run {run} {' '.join(overrides)}" in printed
    assert f"stages: {len(files)}, finished: 0" in printed and printed.count("; next") == 1
    assert not run.exists()


def test_a_dry_run_refuses_bad_input(capsys, tmp_path):
    tiny, run = RECIPES / "tiny", str(tmp_path / "run")
    assert launch.lineage.main([str(tiny), "--run", run, "--dry-run", "--num-gpus", "3"]) == 2
    assert "must be a multiple of" in capsys.readouterr().err
    with pytest.raises(ValueError, match="did you mean tokens"):
        launch.stage.main(["--recipe", str(tiny / "1-seed.yaml"), "--run", run, "--dry-run", "--set", "train.tokns=1"])
    with pytest.raises(SystemExit):
        launch.lineage.main([str(tiny), "--run", run, "--dry-run", "--rehearse", "2"])
