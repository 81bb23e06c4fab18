"""Rules about objectives: refused or miscomputed losses and options of TRL, keys of other objectives."""

from __future__ import annotations

from collections.abc import Iterator, Set

from packtrain.config.fault import Fault
from packtrain.config.keys import keys, suggest
from packtrain.config.objective import Objective
from packtrain.config.rules.fitting import check_options
from packtrain.config.schema import RunConfig
from packtrain.objectives.spec import OBJECTIVES


def check_objective(config: RunConfig, given: Set[str]) -> Iterator[Fault]:
    """Yield faults of objective.* and of keys without use for the objective. The user set the keys `given`."""
    objective, spec = config.objective, config.objective.spec
    for path, key in keys().items():
        if path in given and key.objectives and objective.kind not in key.objectives:
            other = key.objectives[0]
            fix = f"Remove it, or use packtrain {other} (objective.kind={other})."
            yield Fault((path,), f"it is a key of packtrain {' and '.join(key.objectives)}", fix)
    yield from _prefixes(config)
    if spec.scores and config.trainer.samples:
        yield Fault(("trainer.samples",), "a reward model scores answers, and writes none", "Remove the key.")
    yield from _losses(objective)
    yield from _options(objective)
    if spec.examples != "documents":
        yield from _answers(config, given)
    yield from spec.rules(config, given)


def _prefixes(config: RunConfig) -> Iterator[Fault]:
    """Yield faults of packing.share_prefix and data.shuffle=by_prefix. `_answers` checks them for pairs."""
    spec, packing, batch = config.objective.spec, config.packing, config.batch
    by_prefix = config.data.shuffle == "by_prefix"
    if by_prefix and spec.examples != "documents":
        yield Fault(("data.shuffle",), f"packtrain {spec.name} draws its examples one by one", "Set it to true.")
    if spec.examples != "documents":
        return
    if by_prefix and batch.examples_per_step is None:
        what = "families of documents need steps of a fixed number of documents, not tokens"
        yield Fault(("data.shuffle", "batch.examples_per_step"), what, "Set batch.examples_per_step.")
    if not packing.share_prefix:
        return
    if packing.mode != "packed":
        yield Fault(
            ("packing.share_prefix", "packing.mode"),
            "only packed rows can share a prefix",
            "Choose packing.mode=packed.",
        )
    if packing.strategy == "in_order":
        what = "documents that begin alike must be neighbours in a row, which changes the order of the data"
        yield Fault(("packing.share_prefix", "packing.strategy"), what, "Choose packing.strategy=best_fit.")
    if batch.examples_per_step is None:
        what = "with batch.tokens_per_step, rows are filled before their common prefixes are known"
        yield Fault(("packing.share_prefix", "batch.examples_per_step"), what, "Set batch.examples_per_step.")


def _losses(objective: Objective) -> Iterator[Fault]:
    known, where = objective.spec.losses, ("objective.loss",)
    if objective.loss is None:
        return
    unknown = [loss for loss in objective.losses if loss not in known]
    for loss in unknown:
        others = [kind for kind, spec in OBJECTIVES.all().items() if loss in spec.losses]
        allowed = f"Allowed: {', '.join(known)}" if known else "Remove the key"
        fix = f"{allowed}; or use packtrain {others[0]} (objective.kind={others[0]})."
        yield Fault(where, f"{loss} is no loss of packtrain {objective.kind}", fix)
    if not objective.losses:
        yield Fault(where, "there is no loss", "Name at least one.")
    elif not unknown and isinstance(objective.loss, list) and not objective.spec.adds_losses:
        yield Fault(where, f"packtrain {objective.kind} has one loss, not a list", f"Write {objective.loss[0]}.")


def _options(objective: Objective) -> Iterator[Fault]:
    known = objective.spec.options
    for name in objective.options.keys() - known.keys():
        other = next((kind for kind, spec in OBJECTIVES.all().items() if name in spec.options), None)
        fix = suggest(name, known, f"It has {', '.join(known)}." if known else "Remove it.")
        fix = f"Use packtrain {other} (objective.kind={other})." if other else fix
        yield Fault((f"objective.options.{name}",), f"packtrain {objective.kind} has no such option", fix)
    yield from check_options("objective.options", objective.options, known)


def _answers(config: RunConfig, given: Set[str]) -> Iterator[Fault]:
    """Yield faults of objectives that use answers, in pairs or with labels."""
    data, spec = config.data, config.objective.spec
    what = "preference pairs" if spec.pairs else "answers with labels"
    if "data.loss_on" in given:
        what_then = f"{what} always {'score' if spec.scores else 'train'} the answers"
        yield Fault(("data.loss_on",), what_then, "Remove the key.")
    if data.overlong == "split":
        cannot = "a preference pair" if spec.pairs else "an answer with a label"
        what = f"{cannot} cannot be split: the later parts would have no prompt"
        yield Fault(("data.overlong",), what, "Choose truncate, drop or error.")
    if config.packing.share_prefix and config.packing.mode == "padding" and spec.pairs:
        what, fix = "padded batches have a prompt for every answer", "Choose packing.mode=packed or padding_free."
        yield Fault(("packing.share_prefix", "packing.mode"), what, fix, because="packing.mode")
    if config.packing.share_prefix is not None and spec.examples == "answers":
        yield Fault(("packing.share_prefix",), "answers with labels do not share prompts", "Remove the key.")
    if config.objective.reference == "adapters_off" and config.peft.kind == "none" and spec.reference:
        fix = "Choose peft=lora, or objective.reference=model."
        yield Fault(("objective.reference",), "there are no adapters to switch off", fix)
