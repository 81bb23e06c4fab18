"""Settings of models with pictures: trained parts, and sizes of pictures."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from packtrain.convert.counterparts import AS_HERE, DIFFERS, Outcome, Theirs, is_off, is_on, number, whole
from packtrain.convert.foreign_file import Foreign, Value

PICTURES = re.compile(
    "coco|latex_ocr|vqa|rlaif-v|rlhf-v|clevr|textcaps|garbage|-vl-|vlm|multimodal|captcha|visual|llava|vsft|(?<![a-z])(vision|image)",
    re.IGNORECASE,
)
"""Names of data sets and programs that are about pictures."""
VIDEOS = re.compile("video|audio|tts|speech_asr", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of a model.

    `match` is found in the names of its weights. `switches` freeze it, `rate` is its own learning rate.
    """

    match: str
    switches: tuple[str, ...]
    rate: str
    is_frozen: bool = True


_PARTS = {
    "projector": _Part(
        r"visual\.(deepstack_)?merger|multi_modal_projector|embed_(vision|audio)|connector",
        ("freeze_multi_modal_projector", "freeze_aligner"),
        "aligner_lr",
    ),
    "tower": _Part("visual|vision_|audio_", ("freeze_vision_tower", "freeze_vit"), "vit_lr"),
    "language": _Part(".", ("freeze_language_model", "freeze_llm"), "learning_rate", is_frozen=False),
}
"""Named as in transformers' models. The projector stands before the tower, which may contain it."""
_SIDES = {r"qwen-?2(\.5|_5)?[-_](vl|omni)": 28, r"qwen-?3([-_](vl|omni)|[._][56])": 32}
"""Height and width in pixels of one token, by names of models and templates; others have them in preprocessor_config.json."""
_SCALED = f"{DIFFERS}the same most tokens, but scaled otherwise: a picture may have a row of them more or fewer"
_VARIABLES = ("ROOT_IMAGE_DIR", "MAX_NUM", "MIN_PIXELS", "IMAGE_MIN_TOKEN_NUM", "MAX_PIXELS", "IMAGE_MAX_TOKEN_NUM")


def with_variables(file: Foreign) -> Foreign:
    """Add the variables that size pictures in ms-swift to the settings. Later ones win."""
    given = {name: file.environment[name] for name in _VARIABLES if name in file.environment}
    return replace(file, values={**given, **file.values})


def towers(part: str, value: Value, theirs: Theirs) -> Outcome:
    """Convert a switch or the learning rate of a part. All parts together make our keys."""
    scales = {name: _scale(one, theirs) for name, one in _PARTS.items()}
    if (tuner := theirs.get("train_type", "sft_type", "tuner_type", "finetuning_type")) != "full":
        why = "adapters are on the language model, unless peft.target_modules names layers of the tower"
        is_alike = tuner == "lora" and (scales[part] > 0) == (part == "language")
        return AS_HERE if is_alike else Outcome(why=why, kind="no counterpart")
    if not scales["projector"] and not scales["tower"]:
        return AS_HERE if scales["language"] else Outcome(why="it leaves nothing to train", kind="no counterpart")
    groups = [{"match": _PARTS[name].match, "lr_scale": scale} for name, scale in scales.items()]
    while groups and groups[-1]["lr_scale"] == 1:
        groups.pop()
    why = "the parts are found by the names of their weights" if groups else ""
    return Outcome({"model.towers": "trained", **({"optim.groups": groups} if groups else {})}, why)


def _scale(part: _Part, theirs: Theirs) -> float:
    """Return a part's share of the run's learning rate, 0 if it is frozen."""
    given = theirs.get(*part.switches)
    if part.is_frozen if given is None else is_on(given):
        return 0
    return number(theirs.get(part.rate, "learning_rate")) / number(theirs.get("learning_rate"))


def picture_tokens(value: Value, theirs: Theirs) -> Outcome:
    """Convert a limit of pixels to tokens, for models with square tokens."""
    model = theirs.get("model", "model_name_or_path")
    config = theirs.file.settings_of(f"{model}/preprocessor_config.json")
    named = f"{model} {theirs.get('template')}"
    side = next((side for name, side in _SIDES.items() if re.search(name, named, re.IGNORECASE)), None)
    if {"patch_size", "merge_size"} <= {*config}:
        side = whole(config["patch_size"]) * whole(config["merge_size"])
    if side is None:
        why = "the tokens of a picture do not follow from its pixels in this model, or are not known here: data.max_picture_tokens"
        return Outcome(why=why, kind="no counterpart")
    tokens = whole(value) // side**2
    return Outcome({"data.max_picture_tokens": max(tokens, 1)}, f"{_SCALED}; a token is {side}×{side} pixels")


def with_towers(train: Outcome, theirs: Theirs) -> Outcome:
    """Add what TRL trains of towers, if names of data or program are about pictures."""
    if not PICTURES.search(f"{train.values} {theirs.file.program}"):
        return train
    if is_off(theirs.get("use_peft")):
        return replace(train, values={**train.values, "model.towers": "trained"})
    why = f"{DIFFERS}towers have adapters too there" if "all-linear" in str(theirs.get("lora_target_modules")) else ""
    return replace(train, why="; ".join(filter(None, [why, train.why])))


def most_tokens(value: Value, theirs: Theirs) -> Outcome:
    """Convert the most tokens of a picture."""
    return Outcome({"data.max_picture_tokens": whole(value)}, _SCALED)
