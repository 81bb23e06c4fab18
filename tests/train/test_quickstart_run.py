"""The newcomer's first commands, as they stand in the README: they learn, and say what to do next."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from running import Run


def environment_of(folder: Path) -> dict[str, str]:
    """A cache of its own, no hub, and the one CPU core that the other tests leave."""
    return {**os.environ, "PACKTRAIN_CACHE": str(folder / "cache"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def test_the_quickstart_at_least_halves_the_held_out_loss_and_shows_what_was_learnt(tmp_path: Path) -> None:
    environment = environment_of(tmp_path)
    result = subprocess.run(
        # a quarter of its 800 steps: as much is learnt by then
        [sys.executable, "-m", "packtrain", "sft", "recipes/quickstart-sft.yaml", "trainer.max_steps=200"],
        cwd=tmp_path,  # not the checkout: the recipe is found in the package
        env=environment,
        capture_output=True,
        text=True,
        timeout=1500,
    )
    assert result.returncode == 0, result.stderr
    run = Run(tmp_path / "runs" / "quickstart-sft")
    assert run.summary["eval_loss"] < run.summary["first_eval_loss"] / 2
    out = result.stdout
    assert out.count("before ") == out.count("after  ") == 3
    assert str(run.folder.resolve()) in out
    following = [line.strip() for line in out.split("next:")[1].splitlines() if line.strip()]
    assert len(following) == 3
    said = []
    for command in following:
        dry = f"{command.partition('  #')[0]} --dry-run" if " sft " in command else command
        done = subprocess.run(["bash", "-c", dry], cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        said.append(done.stdout)
    shown = out.split("after  ")[1].splitlines()[0].strip().removesuffix("…")
    assert said[0].startswith(shown.split(" ⏎ ")[0])  # the same answer as the run's own, however long
    assert said[1].rstrip().endswith("exact")


def test_the_dpo_quickstart_ranks_held_out_pairs_well_above_chance(tmp_path: Path) -> None:
    environment = environment_of(tmp_path)
    result = subprocess.run(
        [sys.executable, "-m", "packtrain", "dpo", "recipes/quickstart-dpo.yaml"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=1500,
    )
    assert result.returncode == 0, result.stderr
    first, *_, last = Run(tmp_path / "runs" / "quickstart-dpo").evals
    assert first["eval_rewards/margins"] == 0  # the model is its own reference
    assert last["eval_rewards/accuracies"] > 0.8
    assert f"{last['eval_rewards/accuracies']:.1%} rank right" in result.stdout
