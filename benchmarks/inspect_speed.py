"""Seconds and peak memory of `packtrain inspect` on a cached set, by default of 1,000,000 conversations.

    python benchmarks/inspect_speed.py --model SMOLLM2_FOLDER [--rows 1000000] [--folder FOLDER]

The conversations are made of common English words, about 150 tokens each; one in 100 is another one with a few words
changed, one in 200 is another one word by word. They and their tokens stay in FOLDER, so that a second call measures at once.
CPU seconds are those of all threads: on a machine that others use, too, the command takes longer.
Memory is the peak of resident memory of the process (ru_maxrss), mapped files included.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import time
from pathlib import Path

WORDS = [
    "the",
    "of",
    "and",
    "to",
    "in",
    "is",
    "you",
    "that",
    "it",
    "he",
    "was",
    "for",
    "on",
    "are",
    "as",
    "with",
    "his",
    "they",
    "at",
    "be",
    "this",
    "have",
    "from",
    "or",
    "one",
    "had",
    "by",
    "word",
    "but",
    "not",
    "what",
    "all",
    "were",
    "we",
    "when",
    "your",
    "can",
    "said",
    "there",
    "use",
    "an",
    "each",
    "which",
    "she",
    "do",
    "how",
    "their",
    "if",
    "will",
    "up",
    "other",
    "about",
    "out",
    "many",
    "then",
    "them",
    "these",
    "so",
    "some",
    "her",
    "would",
    "make",
    "like",
    "him",
    "into",
    "time",
    "has",
    "look",
    "two",
    "more",
    "write",
    "go",
    "see",
    "number",
    "no",
    "way",
    "could",
    "people",
    "my",
    "than",
    "first",
    "water",
    "been",
    "call",
    "who",
    "oil",
    "its",
    "now",
    "find",
    "long",
    "down",
    "day",
    "did",
    "get",
    "come",
    "made",
    "may",
    "part",
    "over",
    "new",
    "sound",
    "take",
    "only",
    "little",
    "work",
    "know",
    "place",
    "year",
    "live",
    "me",
    "back",
    "give",
    "most",
    "very",
    "after",
    "thing",
    "our",
    "just",
    "name",
    "good",
    "sentence",
    "man",
    "think",
    "say",
    "great",
    "where",
    "help",
    "through",
    "much",
    "before",
    "line",
    "right",
    "too",
    "mean",
    "old",
    "any",
    "same",
    "tell",
    "boy",
    "follow",
    "came",
    "want",
    "show",
    "also",
    "around",
    "form",
    "three",
    "small",
    "set",
    "put",
    "end",
    "does",
    "another",
    "well",
    "large",
    "must",
    "big",
    "even",
    "such",
    "because",
    "turn",
    "here",
    "why",
    "ask",
    "went",
    "men",
    "read",
    "need",
    "land",
    "different",
    "home",
    "us",
    "move",
    "try",
    "kind",
    "hand",
    "picture",
    "again",
    "change",
    "off",
    "play",
    "spell",
    "air",
    "away",
    "animal",
    "house",
    "point",
    "page",
    "letter",
    "mother",
    "answer",
    "found",
    "study",
    "still",
    "learn",
]


def write_conversations(path: Path, rows: int) -> None:
    """Conversations of one to three exchanges, with their near and exact duplicates."""
    rng = random.Random(0)
    kept: list[list[str]] = []
    with open(path, "w", encoding="utf-8") as file:
        for _ in range(rows):
            draw = rng.random()
            if kept and draw < 0.015:
                said = list(rng.choice(kept))
                if draw < 0.01:
                    words = said[-1].split()
                    words[rng.randrange(len(words))] = rng.choice(WORDS)
                    said[-1] = " ".join(words)
            else:
                lengths = [
                    length for _ in range(rng.randint(1, 3)) for length in (rng.randint(5, 20), rng.randint(20, 90))
                ]
                said = [" ".join(rng.choices(WORDS, k=length)) for length in lengths]
                if rng.random() < 0.02:
                    kept.append(said)
            roles = ("user", "assistant")
            messages = [{"role": roles[at % 2], "content": text} for at, text in enumerate(said)]
            file.write(json.dumps({"messages": messages}) + "\n")


def main() -> None:
    """Makes the data where it is not there yet, and inspects it twice: the first time builds the cache."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path, default=Path("inspect-benchmark"))
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    data = given.folder / f"chats-{given.rows}.jsonl"
    if not data.exists():
        write_conversations(data, given.rows)
    settings = [f"model.path={given.model}", f"data.train={data}", "batch.examples_per_step=64"]
    command = [sys.executable, "-m", "packtrain", "inspect", *settings, "--json"]
    env = {**os.environ, "PACKTRAIN_CACHE": str(given.folder / "cache")}
    for title in ("first", "cached"):
        started, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(command, env=env, stdout=subprocess.PIPE, check=True)
        seconds, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu, peak = (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime), after.ru_maxrss / 2**20
        found = json.loads(done.stdout)
        audit = {one["name"]: one["count"] for one in found["audit"]}
        figures = {
            "run": title,
            "seconds": round(seconds, 1),
            "cpu_seconds": round(cpu, 1),
            "peak_gib": round(peak, 2),
            "audit": audit,
        }
        print(json.dumps({**figures, "rows": found["rows"], "tokens": found["tokens"]}), flush=True)


if __name__ == "__main__":
    main()
