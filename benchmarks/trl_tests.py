"""TRL's own tests of its trainers, without `packtrain.attach` and with it in the way: what passes without must pass with.

    git clone https://github.com/huggingface/trl /tmp/trl        # at the tag of the installed version
    python benchmarks/trl_tests.py /tmp/trl [--made-models] [--files test_kto_trainer.py …] [-k EXPRESSION] [--processes 2]

The installed TRL is tested; of the checkout only tests/ is used, and scripts/ for the data. Tests load models and data of the hub.
`--made-models` needs no network: the data is what the checkout's own script makes, and a model is new and tiny, of the architecture that
its name says, with a tokenizer of bytes. Tests that need more (images, single weights) fail then, without `attach` and with it.

As a plugin of pytest (`-p trl_tests`) this file attaches every trainer when it is made. A model that `attach` refuses trains as it
is, and is counted.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

FILES = [f"test_{name}_trainer.py" for name in ("kto", "dpo", "grpo", "rloo", "sft", "reward")]
TRAINERS = ("SFTTrainer", "DPOTrainer", "KTOTrainer", "GRPOTrainer", "RLOOTrainer", "RewardTrainer")
ATTACH, RECORD, DATA = "TRL_TESTS_ATTACH", "TRL_TESTS_RECORD", "TRL_TESTS_DATA"
SIZES = {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
SIZES |= {"intermediate_size": 32, "max_position_embeddings": 4096, "head_dim": 8, "moe_intermediate_size": 32}
SIZES |= {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "initializer_range": 0.2}
TEMPLATES = {"Qwen3": "qwen3", "Llama": "llama3_2", "GptOss": "gptoss", "Gemma": "gemma", "Cohere2": "cohere2"}
NAME = re.compile(r'"(trl-internal-testing/tiny-([A-Za-z0-9_]+For(?:CausalLM|SequenceClassification))[^"]*)"')


# The plugin.


def pytest_configure(config: pytest.Config) -> None:
    """Patches what tests are about to import."""
    if ATTACH not in os.environ:
        return
    if DATA in os.environ:
        _load_made_data(Path(os.environ[DATA]))
    import trl
    from trl import import_utils
    from trl.trainer import sft_trainer

    import_utils.__getattr__ = _nothing_new  # tests of another version may ask for packages by names that are gone
    sft_trainer.__getattr__ = _gone
    if os.environ[ATTACH] == "1":
        for name in TRAINERS:
            _attach_when_made(getattr(trl, name))


def _nothing_new(name: str) -> Any:
    if not name.startswith("is_"):
        raise AttributeError(name)
    return lambda *_: False


def _gone(name: str) -> Any:
    """A function that tests of another version import: those that call it are skipped."""
    if name.startswith("__"):
        raise AttributeError(name)
    return lambda *_, **__: pytest.skip(f"{name} is not in this version of TRL")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Keeps what became of each test; under xdist the workers do."""
    if RECORD in os.environ and (report.when == "call" or report.outcome != "passed"):
        crash = getattr(report.longrepr, "reprcrash", None)
        said = (crash.message if crash else str(report.longrepr or "")).strip()
        _record(test=report.nodeid.removeprefix("tests/"), outcome=report.outcome, said=said[:300])


def _record(**facts: Any) -> None:
    with open(os.environ[RECORD], "a") as file:
        file.write(json.dumps(facts) + "\n")


def _attach_when_made(trainer: Any) -> None:
    """Attaches instances of a class of TRL, and of those that derive from it, at the end of its __init__."""
    init, train = trainer.__init__, trainer.train

    @functools.wraps(init)
    def init_attached(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        from packtrain import attach
        from packtrain.errors import PacktrainError

        try:
            self._attached = attach(self)
        except PacktrainError as refusal:
            _record(refused=str(refusal).splitlines()[0])

    @functools.wraps(train)
    def train_counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return train(self, *args, **kwargs)
        finally:
            if (handle := getattr(self, "_attached", None)) is not None:
                _record(packed=handle.stats.calls, unchanged=dict(handle.stats.unchanged))

    trainer.__init__, trainer.train = init_attached, train_counted


def _load_made_data(folder: Path) -> None:
    import datasets

    load = datasets.load_dataset

    def load_made(path: str, name: str | None = None, *args: Any, split: str | None = None, **kwargs: Any) -> Any:
        made = folder / str(name)
        if not path.endswith("/zen") or not made.is_dir():
            return load(path, name, *args, split=split, **kwargs)
        whole: Any = datasets.load_from_disk(made)
        if split is None:
            return whole
        part, _, most = split.partition("[:")
        rows = whole[part]
        rows = rows.select(range(int(most[:-1]))) if most else rows
        return rows.to_iterable_dataset() if kwargs.get("streaming") else rows

    datasets.load_dataset = load_made


# The script.


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--files", nargs="+", default=FILES)
    parser.add_argument("-k", dest="expression", default="")
    parser.add_argument("--made-models", action="store_true")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    if not (options.checkout / "tests").is_dir():
        parser.error(f"{options.checkout} is no checkout of TRL: it has no tests/")
    with tempfile.TemporaryDirectory(prefix="trl-tests-") as made:
        folder = Path(made)
        shutil.copytree(options.checkout / "tests", folder / "tests")  # else the checkout's own trl would be imported
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"}
        if options.made_models:
            environment |= {"HF_HUB_CACHE": str(folder / "hub"), "HF_HUB_OFFLINE": "1", DATA: str(folder / "zen")}
            make_data(options.checkout, folder / "zen")
            make_models(
                {one for file in options.files for one in NAME.findall((folder / "tests" / file).read_text())},
                folder / "hub",
            )
        without, with_ = (run(folder, options, environment, attach=attach) for attach in (False, True))
    print(table(without, with_, options.files))
    return 1 if broken(without, with_) else 0


def run(
    folder: Path, options: argparse.Namespace, environment: dict[str, str], *, attach: bool
) -> list[dict[str, Any]]:
    """All that was recorded of one run of the tests."""
    record = folder / f"record-{int(attach)}.jsonl"
    record.touch()
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "trl_tests",
        "-p",
        "no:cacheprovider",
        "--tb=short",
        "--continue-on-collection-errors",
    ]
    command += ["-n", str(options.processes), "--dist", "worksteal"] if options.processes > 1 else []
    command += ["-k", options.expression] if options.expression else []
    own = {ATTACH: str(int(attach)), RECORD: str(record)}
    subprocess.run(
        [*command, *(f"tests/{file}" for file in options.files)], cwd=folder, env={**environment, **own}, check=False
    )
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    return list({json.dumps(one): one for one in lines if "test" in one}.values()) + [
        one for one in lines if "test" not in one
    ]


def outcomes(records: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """What became of each test; that of a failed set-up or end counts."""
    found: dict[str, dict[str, Any]] = {}
    for one in records:
        if "test" in one and found.get(one["test"], {}).get("outcome") != "failed":
            found[one["test"]] = one
    return found


def broken(without: list[dict[str, Any]], with_: list[dict[str, Any]]) -> dict[str, str]:
    """Tests that pass without and not with, and what they say."""
    before, after = outcomes(without), outcomes(with_)
    passed = [test for test, one in before.items() if one["outcome"] == "passed"]
    found = {test: after.get(test, {"outcome": "not run", "said": ""}) for test in passed}
    return {test: f"{one['outcome']}: {one['said']}" for test, one in found.items() if one["outcome"] != "passed"}


def table(without: list[dict[str, Any]], with_: list[dict[str, Any]], files: list[str]) -> str:
    """The counts of each file in Markdown, the tests that differ, and what `attach` did."""
    before, after, lost = outcomes(without), outcomes(with_), broken(without, with_)
    lines = ["| file | passed without | passed with | differ | failed in both | skipped |", "|---|---|---|---|---|---|"]
    for file in files:
        mine = {test: one["outcome"] for test, one in before.items() if test.startswith(file)}
        theirs = {test: one["outcome"] for test, one in after.items() if test.startswith(file)}
        both = sum(1 for test, one in mine.items() if one == "failed" and theirs.get(test) == "failed")
        counts = [
            *(list(one.values()).count("passed") for one in (mine, theirs)),
            sum(t.startswith(file) for t in lost),
            both,
        ]
        lines.append(f"| {file} | {' | '.join(map(str, [*counts, list(mine.values()).count('skipped')]))} |")
    lines += ["", *(f"- {test}: {' '.join(said.split())}" for test, said in lost.items())]
    packed = [one["packed"] for one in with_ if "packed" in one]
    left = sum((Counter(one.get("unchanged", {})) for one in with_), Counter[str]())
    refused = Counter(one["refused"] for one in with_ if "refused" in one)
    lines += [
        "",
        f"Trainings: {len(packed)}, of which {sum(map(bool, packed))} ran {sum(packed):,} calls packed. Left alone:",
    ]
    lines += [f"- {count:,} × {why}" for why, count in left.most_common()]
    lines += ["Refused by attach:", *(f"- {count} × {why}" for why, count in refused.most_common())] if refused else []
    return "\n".join(lines)


def make_data(checkout: Path, folder: Path) -> None:
    """The data set "zen" of TRL's tests, by the script that made it."""
    import datasets

    datasets.disable_progress_bars()

    def keep(self: Any, repo_id: str, config_name: str, **_: Any) -> None:
        self.save_to_disk(folder / config_name)

    datasets.Dataset.push_to_hub = datasets.DatasetDict.push_to_hub = keep
    spec = importlib.util.spec_from_file_location("zen", checkout / "scripts/generate_zen_dataset.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["zen"] = module  # its dataclass looks itself up
    spec.loader.exec_module(module)
    module.main(test_size=0.1, push_to_hub=True, repo_id="")


def make_models(wanted: set[tuple[str, str]], cache: Path) -> None:
    """New models of the given (hub id, architecture), each as huggingface_hub's cache would have it."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for hub_id, architecture in sorted(wanted):
        kind = getattr(transformers, architecture, None)
        if kind is None:
            continue
        place = cache / f"models--{hub_id.replace('/', '--')}"
        (place / "refs").mkdir(parents=True)
        (place / "refs/main").write_text("made")
        tokenizer = bytes_tokenizer(architecture)
        known = kind.config_class().to_dict()
        sizes = {name: value for name, value in SIZES.items() if name in known}
        special = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
        torch.manual_seed(0)
        if "SequenceClassification" in architecture:
            special |= {"num_labels": 1}
        try:
            model = kind(kind.config_class(vocab_size=len(tokenizer), **sizes, **special)).to(torch.bfloat16)
            model.save_pretrained(place / "snapshots/made")
        except Exception as error:  # an architecture of other sizes: its tests fail, without attach and with it
            print(f"{hub_id} cannot be made: {error}", file=sys.stderr)
            continue
        tokenizer.save_pretrained(place / "snapshots/made")


def bytes_tokenizer(architecture: str) -> Any:
    """A tokenizer whose tokens are bytes, with TRL's chat template of that family."""
    import trl
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({one: number for number, one in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=special[0], eos_token=special[2], additional_special_tokens=special)  # fmt: skip
    name = next((template for family, template in TEMPLATES.items() if architecture.startswith(family)), "qwen2_5")
    made.chat_template = (Path(trl.__file__).parent / f"chat_templates/{name}.jinja").read_text()
    return made


if __name__ == "__main__":
    sys.exit(main())
