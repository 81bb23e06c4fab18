"""The page docs/models.md: `python tests/architectures/families.py` measures it, and writes it.

Adapters and chat templates are measured. Paths of packed rows are copied from docs/architectures.md. FAMILIES has the rest: names, hub ids,
recipes, and runs on GPUs.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path

from sweep import quietly_on_one_thread
from tiny import tiny_model
from torch import nn
from transformers import PreTrainedModel

from packtrain.config.rules.paths_and_packages import template_names
from packtrain.config.schema import Data, Peft
from packtrain.data.sources.chunks import BadRow
from packtrain.data.tokens.chat_template import choose_template
from packtrain.data.tokens.encode import Encoder
from packtrain.data.tokens.tokenizer import plain_tokenizer
from packtrain.model.adapters import add_adapters
from packtrain.model.expert_adapters import expert_tensors
from packtrain.model.towers import towers_of
from packtrain.plan.known_model import TOWERS

sys.path.append(str(Path(__file__).parents[1] / "unit"))
from data_tokenizers import shipped, tokenizer_for

ROOT = Path(__file__).parents[2]
PAGE, ARCHITECTURES = ROOT / "docs" / "models.md", ROOT / "docs" / "architectures.md"
NOT_YET = "not yet"
MADE_WITH = "Measured with " + ", ".join(f"{name} {version(name)}" for name in ("transformers", "peft", "trl"))


@dataclass(frozen=True, slots=True)
class Family:
    """Family of models: types, some hub ids, templates of TRL, recipes, runs on a GPU."""

    name: str
    types: tuple[str, ...]
    ids: tuple[str, ...]
    templates: tuple[str, ...] = ()
    recipes: tuple[str, ...] = ()
    gpu: str = NOT_YET


_TINY = "a tiny random model passed `tests/gpu/test_models.py` by `flash` (one H200, 27 November 2026)"
_FLASH_FAILED = (
    "not at its size; a tiny random model failed `tests/gpu/test_models.py` by `flash` (one H200, 27 November 2026). `model.attention=auto` "
    "tries `flash` before step 1, and takes `segmented` if it is not exact"
)
_TEXT = "random weights of the sizes of"
_RUNS = "on one H200, 26 and 27 November 2026"
FAMILIES = (
    Family(
        "Qwen2.5",
        ("qwen2", "qwen2_moe", "qwen2_5_vl"),
        ("Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-72B-Instruct", "Qwen/Qwen2.5-VL-7B-Instruct"),
        ("qwen2_5", "qwen2_5_vl"),
        ("sft-16x8",),
        f"`sft` with {_TEXT} Qwen2.5-1.5B, {_RUNS}",
    ),
    Family(
        "Qwen3",
        ("qwen3", "qwen3_moe"),
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-8B", "Qwen/Qwen3-32B", "Qwen/Qwen3-30B-A3B"),
        ("qwen3", "qwen3_instruct_2507"),
        ("sft-1x8", "sft-4x8", "lora-1gpu", "long-1x8", "dpo-1x8", "kto-1x8", "reward-1x8"),
        f"`sft` and `dpo` with {_TEXT} Qwen3-0.6B, LoRA with the sizes of Qwen3-8B, `sft` of 64 experts with 2 billion weights in all, {_RUNS}",
    ),
    Family("Qwen3-Next", ("qwen3_next",), ("Qwen/Qwen3-Next-80B-A3B-Instruct",)),
    Family(
        "Qwen3.5",
        ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"),
        ("Qwen/Qwen3.5-4B", "Qwen/Qwen3.5-9B", "Qwen/Qwen3.5-27B", "Qwen/Qwen3.5-35B-A3B"),
        ("qwen3_5_think", "qwen3_5_nothink", "qwen3_6", "qwen3_8"),
        ("qwen3.5-1x8",),
    ),
    Family(
        "Qwen3-VL",
        ("qwen3_vl", "qwen3_vl_moe"),
        ("Qwen/Qwen3-VL-8B-Instruct", "Qwen/Qwen3-VL-30B-A3B-Instruct"),
        ("qwen3_vl",),
        ("qwen3-vl-1x8",),
    ),
    Family(
        "Gemma 3",
        ("gemma3", "gemma3_text", "gemma3n", "gemma3n_text"),
        ("google/gemma-3-1b-it", "google/gemma-3-12b-it", "google/gemma-3-27b-it"),
        ("gemma3",),
        gpu=f"`gemma3_text`: {_TINY}",
    ),
    Family(
        "Gemma 4",
        ("gemma4", "gemma4_text", "gemma4_unified"),
        ("google/gemma-4-E2B-it", "google/gemma-4-12B-it", "google/gemma-4-26B-A4B-it", "google/gemma-4-31B-it"),
        ("gemma4", "gemma4_v5"),
        ("gemma4-1x8",),
    ),
    Family(
        "Llama 3",
        ("llama",),
        (
            *("meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.2-1B-Instruct"),
            "meta-llama/Llama-3.3-70B-Instruct",
        ),
        ("llama3", "llama3_1", "llama3_2"),
        gpu=f"{_TINY}; `recipes/quickstart-sft.yaml`, 100 steps",
    ),
    Family("Llama 4", ("llama4", "llama4_text"), ("meta-llama/Llama-4-Scout-17B-16E-Instruct",)),
    Family(
        "gpt-oss",
        ("gpt_oss",),
        ("openai/gpt-oss-20b", "openai/gpt-oss-120b"),
        ("gptoss",),
        ("gpt-oss-1gpu",),
        gpu=_FLASH_FAILED,
    ),
    Family(
        "Mistral, Ministral, Mixtral",
        ("mistral", "mistral3", "mistral4", "ministral", "ministral3", "mixtral"),
        (
            *("mistralai/Mistral-Small-3.1-24B-Instruct-2503", "mistralai/Ministral-8B-Instruct-2410"),
            "mistralai/Mixtral-8x7B-Instruct-v0.1",
        ),
        recipes=("mistral-small-1x8",),
        gpu=f"`mistral`: {_TINY}",
    ),
    Family(
        "GLM 4",
        ("glm4", "glm4_moe", "glm4_moe_lite", "glm4v", "glm4v_moe"),
        ("zai-org/GLM-4.5-Air", "zai-org/GLM-4.5", "zai-org/GLM-4.1V-9B-Thinking"),
        ("glm4moe",),
    ),
    Family("GLM 5", ("glm_moe_dsa", "glm5_next"), ("zai-org/GLM-5",)),
    Family(
        "DeepSeek",
        ("deepseek_v3", "deepseek_v32", "deepseek_v4"),
        ("deepseek-ai/DeepSeek-V3", "deepseek-ai/DeepSeek-V3.2-Exp"),
        ("deepseekv3", "deepseek_r1_distill"),
    ),
    Family(
        "Granite",
        ("granitemoehybrid", "granitemoe", "granite"),
        ("ibm-granite/granite-4.0-h-micro", "ibm-granite/granite-4.0-h-tiny", "ibm-granite/granite-4.0-h-small"),
        recipes=("granite4-1gpu",),
    ),
    Family(
        "Nemotron",
        ("nemotron_h", "nemotron_h_omni"),
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",),
        ("nemotron_3_nano", "nemotron_3_super", "nemotron_3_ultra"),
    ),
    Family(
        "LFM2",
        ("lfm2", "lfm2_moe", "lfm2_vl"),
        ("LiquidAI/LFM2-1.2B", "LiquidAI/LFM2-8B-A1B", "LiquidAI/LFM2-VL-1.6B"),
        ("lfm2", "lfm2_2_5"),
    ),
    Family(
        "OLMo", ("olmo2", "olmo3", "olmo_hybrid", "olmoe"), ("allenai/OLMo-2-1124-7B", "allenai/Olmo-3-7B-Instruct")
    ),
    Family(
        "Phi",
        ("phi3", "phimoe", "phi4_multimodal"),
        ("microsoft/Phi-3.5-mini-instruct", "microsoft/phi-4", "microsoft/Phi-4-mini-instruct"),
        ("phi3", "phi3_5"),
    ),
    Family(
        "SmolLM",
        ("llama", "smollm3", "smolvlm"),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "HuggingFaceTB/SmolLM3-3B"),
        ("smolvlm",),
        ("smollm2-sft", "smollm2-dpo", "smollm2-kto", "smollm2-reward"),
    ),
    Family("Falcon-H1", ("falcon_h1",), ("tiiuae/Falcon-H1-7B-Instruct",)),
    Family("MiniMax", ("minimax", "minimax_m2", "minimax_m3_vl"), ("MiniMaxAI/MiniMax-M2",)),
    Family("Kimi", ("kimi_linear", "kimi_k25"), ("moonshotai/Kimi-Linear-48B-A3B-Instruct", "moonshotai/Kimi-K2.6")),
    Family(
        "Cohere",
        ("cohere", "cohere2"),
        ("CohereLabs/c4ai-command-r7b-12-2024",),
        ("cohere", "cohere2"),
        gpu=f"`cohere`: {_TINY}",
    ),
)
_INTRODUCTION = """\
# Models

Look up your model by its family. `config.json` of a model names its type (`model_type`). [Architectures](architectures.md) has all
types, with the reasons. A type on neither page may train too: before step 1
packtrain proves that packed documents do not see each other, or stops.

| column | says |
|---|---|
| packed rows | `segmented`: the row is flattened, attention runs by documents. `mixers`: the same, and the modules in the next column run once per document. `per_document`: the whole model does. On a GPU `flash` comes before `segmented` |
| LoRA on | the layers that `peft=lora` adapts by default, by the ends of their names |
| not on | other matrices of the language model. Experts that a layer keeps in one tensor take adapters with [`peft.experts=true`](fitting.md#adapters-on-experts). Towers have none |
| template | a name for `data.chat_template`; a model brings its own, often one of these. "training version": TRL has one with marks around the answers |
| two rounds, with thoughts | how `data.render=auto` trains two rounds of a conversation, and two rounds with thoughts. "whole": one document. "by turns": a document for each answer, because the template [leaves out earlier thoughts](data.md#each-answer-as-it-will-be-asked-for) or writes the last answer differently. "refused": the template has no place for thoughts; take another one |

With each of these templates only the answers are trained. Every line is measured on a CPU, on a tiny random model of the type and with TRL's
copy of the template. Packed rows and separate documents have equal losses and gradients. "On a GPU" names runs on record in the
[benchmarks](https://github.com/packtrain/packtrain/blob/main/benchmarks/RESULTS.md#on-gpus); "not yet" means that there is none.
Hybrids need kernels to be fast there ([how](modes.md#kernels-of-hybrids)).
`packtrain plan` counts the weights of every type, but the activations only of Llama, Mistral, Qwen2, Qwen3 and models with such a language part.

{made_with}. This page is generated: `python tests/architectures/families.py`.
"""
_DIALOG = (("Hello!", "Greet.", "Hi, how are you?"), ("Fine. What now?", "Ask.", "Tell me more."))


def page(
    lora: Callable[[str], tuple[str, str]], template: Callable[[str], tuple[str, str, str]], made_with: str = MADE_WITH
) -> str:
    """Return the whole page. `lora` and `template` give the cells of a type and of a template."""
    return _INTRODUCTION.replace("{made_with}", made_with) + "".join(
        section(family, lora, template) for family in FAMILIES
    )


def section(
    family: Family, lora: Callable[[str], tuple[str, str]], template: Callable[[str], tuple[str, str, str]]
) -> str:
    """Return the part of the page about one family."""
    recipes = ", ".join(f"`recipes/{name}.yaml`" for name in family.recipes)
    said = f"For example {', '.join(f'`{one}`' for one in family.ids)}." + (f" Recipes: {recipes}." if recipes else "")
    lines = ["", f"## {family.name}", "", said, ""]
    lines += [
        "| type | packed rows | with pictures | once per document | LoRA on | not on |",
        "|---|---|---|---|---|---|",
    ]
    lines += [_row(one, *packed(one), *lora(one)) for one in family.types]
    if family.templates:
        lines += ["", "| template | training version | two rounds | with thoughts |", "|---|---|---|---|"]
        lines += [_row(f"`{one}`", *template(one)) for one in family.templates]
    else:
        lines += ["", "Chat template: the model's own. TRL has no copy of it, so it is not measured here."]
    return "\n".join([*lines, "", f"On a GPU: {family.gpu}."]) + "\n"


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def packed(model_type: str) -> tuple[str, str, str]:
    """Return cells of docs/architectures.md: paths without and with pictures, modules run once per document."""
    path, *seen, by_document, why, _ = _rows(ARCHITECTURES)[model_type]
    return (f"refused: {why}", "", "") if path == "refused" else (path, "".join(seen), by_document)


@cache
def _rows(file: Path) -> dict[str, list[str]]:
    """Return the other cells of each line in a page's tables, by the first cell."""
    lines = re.findall(r"^\| (\S+) \|(.*)\|$", file.read_text(), re.M)
    return {name: [cell.strip() for cell in cells.split(" | ")] for name, cells in lines}


def written_lora(model_type: str) -> tuple[str, str]:
    """Return the cells of a type as the page has them now."""
    *_, on, without = _rows(PAGE)[model_type]
    return on, without


def written_template(name: str) -> tuple[str, str, str]:
    """Return the cells of a template as the page has them now."""
    marked, plain, thoughts = _rows(PAGE)[f"`{name}`"]
    return marked, plain, thoughts


def written_versions() -> str:
    """Return the sentence about versions as the page has it now."""
    [found] = re.findall(r"^Measured with (?:\w+ [\w.]+(?:, )?)+(?=\. )", PAGE.read_text(), re.M)
    return found


def measured_lora(model_type: str) -> tuple[str, str]:
    """Return the layers that get adapters by default, and the matrices without."""
    model = tiny_model(model_type)
    if not isinstance(model, PreTrainedModel):
        return "", ""
    towers, head = towers_of(model), model.get_output_embeddings()
    linear = {
        at
        for at, one in model.named_modules()
        if isinstance(one, nn.Linear) and one is not head and not at.endswith("lm_head") and not TOWERS.search(at)
    }
    linear = {at for at in linear if not any(at.startswith(f"{tower}.") for tower in towers)}
    experts = {".".join(at.split(".")[-2:]) for at in expert_tensors(model)}
    base = add_adapters(model, Peft(kind="lora"), 0).base_model
    beside = (at.removesuffix(".weight") for at in base.targeted_parameter_names)  # layers with the names of experts
    ends = {_end(at) for at in (*base.targeted_module_names, *beside)}
    return ", ".join(sorted(ends)), ", ".join([*sorted({*map(_end, linear)} - ends), *sorted(experts)])


def _end(layer: str) -> str:
    """Return the last part of a layer's name that is not a number."""
    return next(part for part in reversed(layer.split(".")) if not part.isdigit())


def measured_template(name: str) -> tuple[str, str, str]:
    """Return the cells of a template: training version, two rounds without thoughts, two with them."""
    marked = "yes" if f"{name}_training" in template_names() else "no"
    return marked, _rendered(name, thoughts=False), _rendered(name, thoughts=True)


def _rendered(name: str, *, thoughts: bool) -> str:
    tokenizer, messages = tokenizer_for(shipped(name)), list[dict[str, str]]()
    for question, thought, answer in _DIALOG:
        own = {"reasoning_content": thought} if thoughts else {}
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer, **own}]
    encoder = Encoder(plain_tokenizer(tokenizer), choose_template(None, tokenizer), Data(train="rows"), "sft")
    try:
        documents, _ = encoder.encode_row({"messages": messages}, "messages", {}, {})
    except BadRow:
        return "refused"
    return "whole" if len(documents) == 1 else "by turns"


if __name__ == "__main__":
    with quietly_on_one_thread():
        PAGE.write_text(page(measured_lora, measured_template))
