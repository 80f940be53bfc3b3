"""Which checkpoints a stage has, which one a run resumes from, which ones go."""

import pytest
from checkpoints import write

from lightninglm.checkpoint import list_checkpoints, newest_checkpoint, prune, set_aside, step_folder


@pytest.fixture
def stage(tmp_path):
    for step in (100, 200, 300, 400):
        write(tmp_path / step_folder(step))
    return tmp_path


def names(folders):
    return [folder.name for folder in folders]


def test_checkpoints_are_listed_newest_first_and_other_folders_are_not(stage):
    (stage / "grow-1-deepen").mkdir()
    (stage / ".tmp-step-00000500").mkdir()
    (stage / "metrics.jsonl").touch()
    sound, skipped = list_checkpoints(stage)
    assert names(sound) == [step_folder(step) for step in (400, 300, 200, 100)]
    assert skipped == []


def test_the_newest_sound_checkpoint_is_taken_and_the_skipped_ones_come_with_reasons(stage):
    (stage / step_folder(400) / "manifest.json").unlink()
    (stage / step_folder(300) / "config.json").write_text("{}")
    folder, skipped = newest_checkpoint(stage)
    assert folder == stage / step_folder(200)
    assert names(item.folder for item in skipped) == [step_folder(400), step_folder(300)]
    assert "not a complete checkpoint" in skipped[0].reason
    assert "config.json: found 2 bytes" in skipped[1].reason


def test_a_stage_without_checkpoints_has_no_newest_one(tmp_path):
    assert newest_checkpoint(tmp_path) == (None, [])
    assert newest_checkpoint(tmp_path / "nothing") == (None, [])


def test_pruning_keeps_the_newest(stage):
    assert names(prune(stage, keep=3)) == [step_folder(100)]
    assert names(list_checkpoints(stage)[0]) == [step_folder(step) for step in (400, 300, 200)]
    assert prune(stage, keep=3) == []


def test_pruning_counts_sound_checkpoints_only(stage):
    for step in (300, 400):
        (stage / step_folder(step) / "trainer_state.json").unlink()
    assert names(prune(stage, keep=1)) == [step_folder(100)]
    assert newest_checkpoint(stage)[0] == stage / step_folder(200)


def test_pruning_leaves_pinned_checkpoints(stage):
    assert names(prune(stage, keep=1, pinned=[stage / step_folder(100)])) == [step_folder(300), step_folder(200)]
    assert names(list_checkpoints(stage)[0]) == [step_folder(400), step_folder(100)]


def test_a_damaged_folder_can_be_set_aside_and_is_not_lost(stage):
    bad = stage / step_folder(400)
    (bad / "config.json").write_text("{}")
    assert set_aside(bad) == stage / "damaged-step-00000400"
    assert newest_checkpoint(stage) == (stage / step_folder(300), [])
    write(bad)
    assert set_aside(bad) == stage / "damaged-step-00000400-1"


def test_the_last_checkpoint_cannot_be_pruned(stage):
    with pytest.raises(ValueError, match="keep = 0"):
        prune(stage, keep=0)
