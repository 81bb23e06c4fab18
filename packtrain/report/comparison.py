"""Several runs beside each other: their outcomes, what differs in their configs, their answers to the same prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from packtrain.report.run_record import RunRecord

ABSENT = "–"


@dataclass(frozen=True, slots=True)
class Difference:
    """A config key and its value in each run."""

    key: str
    values: Sequence[str]


@dataclass(frozen=True, slots=True)
class Answers:
    """A prompt, the untrained model's answers and those after training, by run; None where a run was not asked it."""

    prompt: str
    before: Sequence[str | None]
    after: Sequence[str | None]

    @property
    def same_before(self) -> bool:
        """Whether all runs that were asked began with the same answer."""
        return len({one for one in self.before if one is not None}) < 2


def differences(runs: Sequence[RunRecord]) -> list[Difference]:
    """The keys that do not have one value in all runs, except the run folder's own name."""
    configs = [{one.key: one.value for one in run.settings} for run in runs]
    keys = dict.fromkeys(key for config in configs for key in config)
    found = [Difference(key, [config.get(key, ABSENT) for config in configs]) for key in keys]
    return [one for one in found if len(set(one.values)) > 1 and one.key != "trainer.output_dir"]


def answers(runs: Sequence[RunRecord]) -> list[Answers]:
    """Every prompt that a run was asked, in the order of the first one."""
    said = [_by_prompt(run) for run in runs]
    prompts = dict.fromkeys(prompt for one in said for prompt in one)
    return [
        Answers(prompt, *([one.get(prompt, {}).get(when) for one in said] for when in ("before", "after")))
        for prompt in prompts
    ]


def _by_prompt(run: RunRecord) -> dict[str, Mapping[str, str]]:
    listed = run.summary.get("answers")
    entries = [one for one in listed if isinstance(one, Mapping)] if isinstance(listed, list) else []
    return {
        str(one.get("prompt")): {when: str(one[when]) for when in ("before", "after") if when in one} for one in entries
    }


def told_apart(places: Sequence[Path]) -> list[str]:
    """A name for each folder: its own, with as many of those above as it takes to tell it from the others."""
    parts = [place.resolve().parts for place in places]
    names = [one[-1] if one else "run" for one in parts]
    for depth in range(2, max(map(len, parts)) + 1):
        twice = {name for name in names if names.count(name) > 1}
        if not twice:
            break
        names = ["/".join(one[-depth:]) if name in twice else name for one, name in zip(parts, names, strict=True)]
    return names
