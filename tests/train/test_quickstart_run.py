"""The newcomer's first command, as it stands in the README: it learns, and says what to do next."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

from running import Run, packtrain


def test_the_quickstart_at_least_halves_the_held_out_loss_and_shows_what_was_learnt(tmp_path: Path) -> None:
    environment = {**os.environ, "PACKTRAIN_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}
    result = subprocess.run(
        [sys.executable, "-m", "packtrain", "sft", "recipes/quickstart-sft.yaml"],
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
    for command in following:
        words = shlex.split(command, comments=True)
        if words[0] == "packtrain":
            packtrain(*words[1:], *(["--dry-run"] if words[1] == "sft" else []), cwd=tmp_path)
        else:
            subprocess.run(words, cwd=tmp_path, check=True, capture_output=True)
