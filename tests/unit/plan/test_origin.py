"""Which keys may differ from those of a checkpoint, and which are refused before anything is loaded."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from packtrain.config.compose import load_config
from packtrain.config.keys import check_resume_despite, is_fixed, is_free, keys
from packtrain.config.rules.paths_and_packages import resume_folder
from packtrain.errors import UserError
from packtrain.plan.origin import check_config, check_origin, facts_of, origin_in, same_course
from packtrain.run_folder import RunFolder

LORA = ("peft.kind=lora", "peft.target_modules=[q_proj,v_proj]")


def config_of(*changes: str) -> dict[str, Any]:
    base = ["model.init=random", "model.tokenizer=quickstart", "model.config.model_type=llama", "data.train=quickstart"]
    return asdict(load_config(None, [*base, "batch.examples_per_step=4", "data.max_length=64", *changes]))


def facts(*changes: str) -> dict[str, Any]:
    return facts_of(config_of(*changes))


def checkpoint(folder: RunFolder, name: str, *changes: str) -> Path:
    """A checkpoint as far as its record goes, of a run by these keys."""
    made = folder.checkpoints / name
    made.mkdir(parents=True)
    for file, text in {"origin.json": json.dumps(facts(*changes)), "model.safetensors": "weights"}.items():
        (made / file).write_text(text)
    manifest = {
        file.name: {"bytes": file.stat().st_size, "blake2b": hashlib.blake2b(file.read_bytes()).hexdigest()}
        for file in made.iterdir()
    }
    (made / "manifest.json").write_text(json.dumps(manifest))
    return made


def refused(folder: RunFolder, *changes: str, resume: str = "auto") -> str:
    try:
        check_config(config_of(*changes), folder, resume)
    except UserError as error:
        return ", ".join(problem.where for problem in error.problems)
    return ""


def test_the_newest_whole_checkpoint_decides_at_once(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    rate, other = "optim.learning_rate=0.5", "optim.learning_rate=0.25"
    older = checkpoint(folder, "step-000002", other)
    newest = checkpoint(folder, "step-000004", rate)
    assert not refused(folder, rate) and not refused(folder, other, resume="never")
    assert refused(folder, other) == "optim.learning_rate" == refused(folder, rate, resume=str(older))
    assert not refused(folder, other, "trainer.resume_despite=[optim.learning_rate]")
    checkpoint(folder, "step-000004-of-the-user", other)
    assert not refused(folder, rate)
    (newest / "model.safetensors").unlink()  # the run passes it over
    assert not refused(folder, other)


def test_a_checkpoint_of_a_version_that_recorded_more_is_gone_on_from(tmp_path: Path) -> None:
    made = checkpoint(RunFolder(tmp_path), "step-000002")
    (made / "origin.json").write_text(json.dumps({**facts(), "kernel": "FlashAttention 2"}))
    assert check_origin(made, facts()) == ([], []) and same_course(origin_in(made), facts())


def test_a_loss_is_the_same_named_or_by_default_and_its_options_are_one_fact(tmp_path: Path) -> None:
    dpo, option = "objective.kind=dpo", "objective.options.ld_alpha=0.5"
    assert same_course(facts(dpo), facts(dpo, "objective.loss=sigmoid"))
    assert not same_course(facts(dpo), facts(dpo, "objective.loss=[ipo]"))
    checkpoint(RunFolder(tmp_path), "step-000002", dpo, option)
    assert refused(RunFolder(tmp_path), dpo) == "objective.options"
    assert not refused(RunFolder(tmp_path), dpo, "trainer.resume_despite=[objective.options]")


def test_options_of_the_schedule_are_one_fact(tmp_path: Path) -> None:
    folder, schedule = RunFolder(tmp_path), "optim.schedule=warmup_stable_decay"
    options = "optim.schedule_options={num_decay_steps: 2, min_lr_ratio: 0.3}"
    checkpoint(folder, "step-000002", schedule, options)
    assert not refused(folder, schedule, options)
    for change in ("{num_decay_steps: 2}", "{num_decay_steps: 2, num_cycles: 0.5}"):
        changed = f"optim.schedule_options={change}"
        assert refused(folder, schedule, changed) == "optim.schedule_options"
        assert not refused(folder, schedule, changed, "trainer.resume_despite=[optim.schedule_options]")


def test_a_fact_is_the_same_however_it_is_written() -> None:
    for before, now, same in (
        (("model.config.attention_dropout=0",), ("model.config.attention_dropout=0.0",), True),
        (("optim.name=adamw_torch",), ("optim.name=adamw_torch_fused",), True),
        (LORA, ("peft.kind=lora", "peft.target_modules=[v_proj,q_proj]"), True),
        (LORA, ("peft.kind=lora", "peft.target_modules=[v_proj,k_proj]"), False),
        (LORA, (*LORA, "peft.dropout=0.1"), False),
    ):
        assert same_course(facts(*before), facts(*now)) == same


FREE = (
    "data.bad_rows trainer.log_every trainer.output_dir packing.mode batch.tokens_per_device strategy.name model.path torch "
    "peft.merge trainer.checkpoint_every data.max_length model.attention"
)
DECISIVE = (
    "data.train data.shuffle trainer.seed optim.learning_rate objective.beta batch.examples_per_step model.dtype peft.alpha "
    "model.config.rope_theta model.weights trainer.max_steps trainer.mixed_precision packing.strategy optim.a_key_of_tomorrow"
)
FIXED = "model peft.r peft.kind optim.name optim.groups objective.kind"


def test_keys_are_free_decisive_or_fixed_and_none_of_the_loss_the_optimizer_or_the_adapters_is_free_by_omission():
    assert all(map(is_free, FREE.split()))
    assert not any(is_free(name) or is_fixed(name) for name in DECISIVE.split())
    assert all(is_fixed(name) and not is_free(name) for name in FIXED.split())
    groups = ("objective.", "optim.", "peft.")
    assert [name for name in keys() if name.startswith(groups) and is_free(name)] == ["peft.merge"]


def test_what_changes_the_course_can_be_listed_and_nothing_else() -> None:
    assert not list(check_resume_despite(["trainer.epochs", "data.train", "model.config.rope_theta"]))
    for name, what, fix in (
        ("optim.learnin_rate", "there is no key 'optim.learnin_rate'", "Did you mean optim.learning_rate?"),
        ("zzz", "there is no key 'zzz'", "Name keys as the refusal does."),
        ("peft.r", "peft.r cannot change", "Start over with trainer.resume=never."),
    ):
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
