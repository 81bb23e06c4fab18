"""What a resumed run must share with the run that wrote its checkpoint, and what has changed since then.

Both record their facts: config keys, and what became of them (documents, weights, versions). config/rules/resume_keys.py has which of
them may differ.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from packtrain.config.rules.resume_keys import KEPT, is_fixed, is_free
from packtrain.data.dataset import PairDataset, TokenDataset
from packtrain.errors import Problem, UserError
from packtrain.model.load import base_model, weights_hash
from packtrain.model.spread import elements
from packtrain.plan.agreement import digest_of, shared_values, shared_versions
from packtrain.run_folder import environment

ORIGIN = "origin.json"
STRATEGY, PROCESSES = "strategy.name", "the number of processes"
_LENGTH, _TOKENIZER, _DESPITE = "trainer.max_steps", "the tokenizer", "trainer.resume_despite"
_SHAPE = "model.config."
_ELSEWHERE = ("trainer.output_dir", "trainer.resume", _DESPITE, "trainer.epochs", _LENGTH, "data.eval")
"""Keys with names of files and folders, and those that say how to go on."""
_UNSAID = re.compile(r"_.*|transformers_version|architectures|dtype|use_cache")
"""Settings of a model that say nothing of what it computes."""


def origin_of(
    config: dict[str, Any], data: TokenDataset | PairDataset, model: PreTrainedModel, tokenizer: Any, processes: int
) -> dict[str, Any]:
    """The facts of a run by `config`, as plain containers: its keys, secrets as digests, and what became of some of them."""
    texts = shared_values({group: keys for group, keys in config.items() if group in KEPT})
    facts: dict[str, Any] = {name: text.strip('"') for name, text in texts.items() if name not in _ELSEWHERE}
    facts |= shared_versions(environment())
    batch = config["batch"]
    if batch["tokens_per_step"] is not None:  # the rows of an epoch decide which documents make a step
        facts["batch.tokens_per_step"] += f" in rows of {batch['tokens_per_device']}"
    else:
        facts["packing.strategy"] = None
    base, weights = base_model(model), sum(elements(one) for one in model.parameters() if one.requires_grad)
    shape = {name: value for name, value in base.config.to_dict().items() if not _UNSAID.fullmatch(name)}
    facts |= {f"{_SHAPE}{name}": json.dumps(value, default=str) for name, value in shape.items()}
    adapted = base is not model
    facts |= {
        "data.train": f"{len(data):,} documents, {data.lengths.sum():,} tokens (fingerprint {data.fingerprint[:12]})",
        "model": f"{type(base).__name__} with {weights:,} trained weights",
        "model.dtype": str(base.dtype).removeprefix("torch."),
        "model.weights": f"frozen ones with hash {weights_hash(model, trained=False)[:12]}" if adapted else None,
        "optim.name": config["optim"]["name"].removesuffix("_fused"),  # the same steps
        _TOKENIZER: digest_of(f"{len(tokenizer)} {_text_of(tokenizer)} {tokenizer.chat_template}"),
        PROCESSES: processes,
        _DESPITE: sorted(config["trainer"]["resume_despite"]),
    }
    return facts


def _text_of(tokenizer: Any) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return str(sorted(tokenizer.get_vocab().items())) if backend is None else backend.to_str()


def length_of(schedule: str, warmup: float, steps: int) -> dict[str, Any]:
    """The facts of a run of so many `steps`, which are decisive if the learning rate depends on how many there will be."""
    endless = schedule in ("constant", "constant_with_warmup", "inverse_sqrt") and (warmup >= 1 or not warmup)
    endless = endless or schedule == "constant"
    return {_LENGTH: "of any length" if endless else f"{steps} steps", "the number of steps": steps}


def check_origin(checkpoint: Path, origin: dict[str, Any]) -> tuple[list[str], list[str]]:
    """What has changed since `checkpoint`: decisive facts of this run's `origin` that trainer.resume_despite lists, and free ones.

    Raises UserError for decisive ones that it does not list: the run would not continue its steps.
    """
    written, allowed = origin_in(checkpoint), _allowed(origin)
    optional = (_SHAPE, _DESPITE)
    absent = [name for name in origin if name not in written and not is_free(name) and not name.startswith(optional)]
    if absent:
        what = (
            f"the checkpoint {checkpoint.name} does not record this: an earlier packtrain made it, or another objective"
        )
        fix = "go on with what made it, or start over with trainer.resume=never"
        raise UserError(what, where=", ".join(absent), fix=fix)
    changed = [name for name in origin if name in written and written[name] != origin[name] and name != _DESPITE]
    decisive = [name for name in changed if not is_free(name)]
    if refused := [name for name in decisive if name not in allowed or is_fixed(name)]:
        causes = [name for name in changed if name.startswith(("data.", _TOKENIZER)) and name != "data.train"]
        problems = [_refusal(checkpoint, name, written[name], origin[name], causes) for name in refused]
        names = "" if any(map(is_fixed, refused)) else ", ".join(sorted({*refused, *allowed}))
        despite = f", go on all the same with trainer.resume_despite=[{names}]" if names else ""
        fix = f"set it back{despite}, or start over with trainer.resume=never"
        raise UserError([*problems[:-1], replace(problems[-1], fix=fix)])
    said = {name: f"{name} {written[name]} → {origin[name]}" for name in changed}
    return [said[name] for name in decisive], [said[name] for name in changed if is_free(name)]


def _refusal(checkpoint: Path, name: str, before: Any, now: Any, causes: list[str]) -> Problem:
    what = f"the checkpoint {checkpoint.name} was made with {before}, this run has {now}"
    if name == "data.train" and causes:
        what += f" (also changed: {', '.join(causes)})"
    if name == _LENGTH:
        what += ": the learning rate would jump to where a schedule over the new length is by then"
    return Problem(what, where=name)


def origin_in(checkpoint: Path) -> dict[str, Any]:
    """The origin of the run that wrote `checkpoint`."""
    return json.loads((checkpoint / ORIGIN).read_text())


def same_course(written: dict[str, Any], origin: dict[str, Any]) -> bool:
    """Whether a checkpoint is of this run: what is decisive is the same, but for what trainer.resume_despite lists."""
    names = {name for name in written.keys() | origin.keys() if not is_free(name)} - _allowed(origin)
    return all(written.get(name) == origin.get(name) for name in names)


def same_format(checkpoint: Path, origin: dict[str, Any]) -> bool:
    """Whether the optimizer of this run keeps what that of `checkpoint` did."""
    written = origin_in(checkpoint)
    return all(written[name] == origin[name] for name in ("model.dtype", "optim.master_weights", "optim.rounding"))


def _allowed(origin: dict[str, Any]) -> set[str]:
    """The length of a run has one name, in steps or in epochs."""
    return {_LENGTH if name == "trainer.epochs" else name for name in origin.get(_DESPITE, ())}


def world_of(checkpoint: Path) -> tuple[str, int]:
    """The strategy.name that `checkpoint` was written by, and on how many processes."""
    origin = origin_in(checkpoint)
    return origin[STRATEGY], origin[PROCESSES]
