"""Rules about objectives: refused or miscomputed losses and options of TRL, keys of other objectives."""

from __future__ import annotations

from collections.abc import Iterator, Set

from packtrain.config.keys import Fault, keys, suggest
from packtrain.config.objective import LOSSES, OPTIONS, Objective
from packtrain.config.rules.fitting import check_options
from packtrain.config.schema import RunConfig
from packtrain.wording import counted

_DIVERGING = {"sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "discopop", "sft"}
_SMOOTHED = {"exo_pair", "robust", "aot", "aot_unpaired"}


def check_objective(config: RunConfig, given: Set[str]) -> Iterator[Fault]:
    """Yield faults of objective.* and of keys without use for the objective. The user set the keys `given`."""
    objective, traits = config.objective, config.objective.traits
    for path, key in keys().items():
        if path in given and key.objectives and objective.kind not in key.objectives:
            other = key.objectives[0]
            fix = f"Remove it, or use packtrain {other} (objective.kind={other})."
            yield Fault((path,), f"it is a key of packtrain {' and '.join(key.objectives)}", fix)
    yield from _prefixes(config)
    if traits.scores and config.trainer.samples:
        yield Fault(("trainer.samples",), "a reward model scores answers, and writes none", "Remove the key.")
    yield from _losses(objective)
    yield from _options(objective)
    if objective.kind != "sft":
        yield from _answers(config, given)
    if objective.kind == "dpo":
        yield from _dpo(objective)
    if objective.kind == "kto" and config.batch.examples_per_step == 1 and objective.losses == ["kto"]:
        what = "the KL estimate of a step needs two answers or more"
        fix = "Set it to 2 or more (e.g. 32), or objective.loss=apo_zero_unpaired."
        yield Fault(("batch.examples_per_step",), what, fix)


def _prefixes(config: RunConfig) -> Iterator[Fault]:
    """Yield faults of packing.share_prefix and data.shuffle=by_prefix. `_answers` checks them for pairs."""
    kind, packing, batch = config.objective.kind, config.packing, config.batch
    by_prefix = config.data.shuffle == "by_prefix"
    if by_prefix and kind != "sft":
        yield Fault(("data.shuffle",), f"packtrain {kind} draws its examples one by one", "Set it to true.")
    if packing.share_prefix is not None and kind == "kto":
        yield Fault(("packing.share_prefix",), "answers with labels do not share prompts", "Remove the key.")
    if kind != "sft":
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
    if config.objective.option("neftune_noise_alpha"):
        what = (
            "the noise on embeddings depends on the length of a document, and shared tokens belong to several documents"
        )
        yield Fault(("packing.share_prefix", "objective.options.neftune_noise_alpha"), what, "Remove one of them.")


def _losses(objective: Objective) -> Iterator[Fault]:
    known, where = LOSSES[objective.kind], ("objective.loss",)
    if objective.loss is None:
        return
    unknown = [loss for loss in objective.losses if loss not in known]
    for loss in unknown:
        others = [kind for kind, losses in LOSSES.items() if loss in losses]
        allowed = f"Allowed: {', '.join(known)}" if known else "Remove the key"
        fix = f"{allowed}; or use packtrain {others[0]} (objective.kind={others[0]})."
        yield Fault(where, f"{loss} is no loss of packtrain {objective.kind}", fix)
    if not objective.losses:
        yield Fault(where, "there is no loss", "Name at least one.")
    elif not unknown and isinstance(objective.loss, list) and objective.kind != "dpo":
        yield Fault(where, f"packtrain {objective.kind} has one loss, not a list", f"Write {objective.loss[0]}.")


def _options(objective: Objective) -> Iterator[Fault]:
    known = OPTIONS[objective.kind]
    for name in objective.options.keys() - known.keys():
        other = next((kind for kind, options in OPTIONS.items() if name in options), None)
        fix = suggest(name, known, f"It has {', '.join(known)}.")
        fix = f"Use packtrain {other} (objective.kind={other})." if other else fix
        yield Fault((f"objective.options.{name}",), f"packtrain {objective.kind} has no such option", fix)
    yield from check_options("objective.options", objective.options, known)
    weights = ("desirable_weight", "undesirable_weight")
    if objective.kind == "kto" and all(objective.options.get(name) == 0 for name in weights):
        yield Fault(("objective.options",), "both weights are 0, which trains nothing", "Set one above 0.")


def _dpo(objective: Objective) -> Iterator[Fault]:
    """Yield combinations of losses and options that TRL's DPOTrainer refuses or gets wrong."""
    losses, smoothing = objective.losses, objective.option("label_smoothing")
    weights = objective.option("loss_weights")
    if isinstance(weights, list) and len(weights) != len(losses):
        what = f"{counted(len(weights), 'weights')} for {counted(len(losses), 'losses')}"
        yield Fault(("objective.options.loss_weights",), what, "Give one for each, in their order.")
    if "exo_pair" in losses and smoothing == 0:
        what = "the loss exo_pair needs label smoothing"
        yield Fault(("objective.loss",), what, "Set objective.options.label_smoothing; its paper recommends 1e-3.")
    if smoothing and not _SMOOTHED & {*losses}:
        what = f"TRL's {', '.join(losses)} takes no label smoothing"
        yield Fault(("objective.options.label_smoothing",), what, "Remove it, or choose the loss robust.")
    divergence = objective.option("f_divergence_type")
    if divergence != "reverse_kl" and (others := sorted({*losses} - _DIVERGING)):
        what = f"{', '.join(others)} is not defined for the divergence {divergence}"
        yield Fault(("objective.options.f_divergence_type",), what, "Use reverse_kl.")
    if objective.option("use_weighting"):
        reasons = [
            f"{name} sorts pairs, so a pair would get the weight of another" for name in objective.sorting_losses
        ]
        if "sft" in losses:
            reasons.append("sft is a mean over all tokens, so TRL cannot weigh its pairs")
        for what in reasons:
            yield Fault(("objective.options.use_weighting",), what, "Remove it, or choose another loss.")


def _answers(config: RunConfig, given: Set[str]) -> Iterator[Fault]:
    """Yield faults of objectives that use answers: pairs (dpo, reward) or labels (kto)."""
    data, traits = config.data, config.objective.traits
    what = "preference pairs" if traits.pairs else "answers with labels"
    if "data.loss_on" in given:
        what_then = f"{what} always {'score' if traits.scores else 'train'} the answers"
        yield Fault(("data.loss_on",), what_then, "Remove the key.")
    if data.overlong == "split":
        cannot = "a preference pair" if traits.pairs else "an answer with a label"
        what = f"{cannot} cannot be split: the later parts would have no prompt"
        yield Fault(("data.overlong",), what, "Choose truncate, drop or error.")
    if config.packing.share_prefix and config.packing.mode == "padding" and traits.pairs:
        what, fix = "padded batches have a prompt for every answer", "Choose packing.mode=packed or padding_free."
        yield Fault(("packing.share_prefix", "packing.mode"), what, fix, because="packing.mode")
    if config.objective.reference == "adapters_off" and config.peft.kind == "none" and traits.reference:
        fix = "Choose peft=lora, or objective.reference=model."
        yield Fault(("objective.reference",), "there are no adapters to switch off", fix)
