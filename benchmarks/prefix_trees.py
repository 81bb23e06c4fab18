"""What it saves to compute once what documents begin with alike: token slots and seconds of a step, with and without.

    python benchmarks/prefix_trees.py MODEL INSTRUCTIONS DOCUMENTS [--steps 4] [--examples 32] [--threads 1] [--sets turns tools text]

MODEL is a folder, INSTRUCTIONS a file of conversations, DOCUMENTS one of texts. Three data sets are made of them:

- turns: conversations of 6 questions, with a row for each answer, as data with tool calls or thoughts is unrolled;
- tools: the same under one system message with the schemas of 8 tools, different for each third of the conversations;
- text: 100 questions about one text of some 1,500 tokens each.

Each is trained by `packtrain sft` with data.shuffle=by_prefix, on the last answer of each row, with packing.share_prefix on and off in
turn; printed are slots of a pass (`packtrain inspect`), and the median seconds of a step after the first.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any


def make_sets(instructions: list[dict[str, Any]], texts: list[str]) -> dict[str, list[dict[str, Any]]]:
    """Rows of messages, the last of which is trained."""
    asked = [row["messages"] for row in instructions]
    schemas = [
        json.dumps({"name": f"tool_{name}", "description": texts[name][:200], "parameters": {"query": "string"}})
        for name in range(24)
    ]
    turns, tools = [], []
    for first in range(0, 150, 6):
        said: list[dict[str, str]] = []
        kind = first // 6 % 3
        system = {
            "role": "system",
            "content": "You may call these tools:\n" + "\n".join(schemas[8 * kind : 8 * kind + 8]),
        }
        for question, answer in asked[first : first + 6]:
            said = [*said, question, answer]
            turns.append({"messages": said})
            tools.append({"messages": [system, *said]})
    about = [text for text in texts if len(text) > 5000][:2]
    questions = [
        {"messages": [{"role": "user", "content": f"{text[:6000]}\n\n{question['content']}"}, answer]}
        for text in about
        for question, answer in asked[200:300]
    ]
    return {"turns": turns, "tools": tools, "text": questions}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("instructions", type=Path)
    parser.add_argument("documents", type=Path)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--examples", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--sets", nargs="+", default=["turns", "tools", "text"], choices=["turns", "tools", "text"])
    options = parser.parse_args()
    rows = [json.loads(line) for line in options.instructions.read_text().splitlines()]
    texts = [json.loads(line)["text"] for line in options.documents.read_text().splitlines()]
    print("| data | documents | tokens | slots | shared | s a step | shared |\n|---|---|---|---|---|---|---|")
    with TemporaryDirectory() as folder:
        for name, made in ((name, made) for name, made in make_sets(rows, texts).items() if name in options.sets):
            file = Path(folder, f"{name}.jsonl")
            file.write_text("".join(json.dumps(row) + "\n" for row in made))
            common = [
                f"model.path={options.model}",
                f"data.train={file}",
                *("data.shuffle=by_prefix", "data.loss_on=completion", "data.max_length=4096"),
                *(f"batch.examples_per_step={options.examples}", "batch.tokens_per_device=8192"),
                *("optim.schedule=constant", f"trainer.max_steps={options.steps}", "trainer.checkpoint_every=null"),
                *("trainer.log_every=1", f"data.cache_dir={folder}/cache", "trainer.mixed_precision=no"),
            ]

            def packtrain(verb: str, *more: str, common: list[str] = common) -> str:
                command = [sys.executable, "-m", "packtrain", verb, *common, *more]
                environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads)}
                done = subprocess.run(
                    command, check=True, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
                )
                return done.stdout.decode()

            slots, seconds = {}, {}
            for share in ("false", "true"):
                how = f"packing.share_prefix={share}"
                report = json.loads(packtrain("inspect", "--json", how))
                slots[share] = report["modes"]["packed"]["slots"]
                run = Path(folder, f"{name}-{share}")
                packtrain("sft", how, f"trainer.output_dir={run}", "verify.preflight=false")
                lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
                ends = [line["seconds"] for line in lines if "loss" in line]
                seconds[share] = statistics.median(end - before for before, end in pairwise(ends))
            figures = [slots["false"], slots["true"]]
            print(
                f"| {name} | {len(made)} | {report['tokens']:,} | {figures[0]:,} | {figures[1]:,} "
                f"({figures[1] / figures[0]:.0%}) | {seconds['false']:.1f} | {seconds['true']:.1f} "
                f"({seconds['false'] / seconds['true']:.2f}×) |",
                flush=True,
            )


if __name__ == "__main__":
    main()
