"""Which keys may differ from those of a checkpoint, and what trainer.resume_despite refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from packtrain.config.keys import check_resume_despite, is_fixed, is_free, keys
from packtrain.config.rules.paths_and_packages import resume_folder

FREE = (
    "data.bad_rows trainer.log_every trainer.output_dir packing.mode batch.tokens_per_device strategy.name model.path torch "
    "peft.merge trainer.checkpoint_every data.max_length model.attention"
)
DECISIVE = (
    "data.train data.shuffle trainer.seed optim.learning_rate objective.beta batch.examples_per_step model.dtype peft.alpha "
    "model.config.rope_theta model.weights trainer.max_steps trainer.mixed_precision packing.strategy optim.a_key_of_tomorrow"
)
FIXED = "model peft.r peft.kind optim.name optim.groups objective.kind"


def test_keys_are_free_decisive_or_fixed() -> None:
    assert all(map(is_free, FREE.split()))
    assert not any(is_free(name) or is_fixed(name) for name in DECISIVE.split())
    assert all(is_fixed(name) and not is_free(name) for name in FIXED.split())


def test_a_key_of_the_loss_the_optimizer_or_the_adapters_is_not_free_by_omission() -> None:
    groups = ("objective.", "optim.", "peft.")
    assert [name for name in keys() if name.startswith(groups) and is_free(name)] == ["peft.merge"]


@pytest.mark.parametrize(
    ("name", "what", "fix"),
    [
        ("optim.learnin_rate", "there is no key 'optim.learnin_rate'", "Did you mean optim.learning_rate?"),
        ("zzz", "there is no key 'zzz'", "Name keys as the refusal does."),
        ("peft.r", "peft.r cannot change", "Start over with trainer.resume=never."),
    ],
)
def test_what_cannot_be_listed_is_refused(name: str, what: str, fix: str) -> None:
    (fault,) = check_resume_despite(["optim.beta1", "model.weights", name])
    assert fault.what.startswith(what) and fault.fix == fix


def test_a_run_folder_in_place_of_a_checkpoint_names_one_in_it(tmp_path: Path) -> None:
    for step in (100, 200):
        (tmp_path / f"checkpoints/step-{step:06d}").mkdir(parents=True)
    newest = str(tmp_path / "checkpoints/step-000200")
    for folder in (tmp_path, tmp_path / "checkpoints"):
        (fault,) = resume_folder(str(folder))
        assert fault.keys == ("trainer.resume",) and newest in fault.fix
    Path(newest, "manifest.json").touch()
    assert not list(resume_folder(newest))


def test_what_changes_the_course_can_be_listed() -> None:
    assert not list(check_resume_despite(["trainer.epochs", "data.train", "model.config.rope_theta"]))
