"""Examples of the data for a reader: text that marks trained and control tokens.

They are the first examples, the examples of one source row, or a step in training's layout.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import numpy as np
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from packtrain.errors import UserError
from packtrain.inspect.corpus import Corpus, estimate_attention_cost, find_places, schedule_of
from packtrain.inspect.rendering import Shown
from packtrain.wording import counted, shortened, visible, whole

MAX_TOKENS = 20_000
"""Most tokens of a part that are shown."""


def show_first(corpus: Corpus, number: int) -> list[Shown]:
    """Show the first `number` examples in the order of the data. Raises UserError if there are fewer."""
    documents = np.flatnonzero(corpus.in_train)[:: corpus.spec.documents]
    if not 0 <= number <= len(documents):
        what = f"{number:,}, but there are {counted(len(documents), corpus.spec.examples)}"
        raise UserError(what, where="--rows", fix=f"Give a number from 0 to {len(documents)}.", code="no-such-rows")
    chosen = documents[:number].tolist()
    places = find_places(corpus, set(corpus.row_of[chosen].tolist()))
    return [show_example(corpus, document, places) for document in chosen]


def show_row(corpus: Corpus, place: str) -> list[Shown]:
    """Show the examples of the row at `place` (FILE:LINE), or why it was dropped. Raises UserError if there is no such row."""
    row = _find_row(corpus, place)
    documents = np.flatnonzero(corpus.row_of == row)[:: corpus.spec.documents].tolist()
    if documents:
        return [show_example(corpus, document, {row: place}) for document in documents]
    store = int(np.searchsorted(corpus.first_rows, row, side="right")) - 1
    note = f"dropped: {corpus.stores[store].reasons[int(corpus.fates['dropped'][row])]}"
    return [{"where": visible(place), "note": visible(note), "tokens": 0, "trained": 0, "cut": 0, "parts": []}]


def _find_row(corpus: Corpus, place: str) -> int:
    """Find the number of the row at `place` (FILE:LINE). Raises UserError if there is none."""
    file, colon, line = place.rpartition(":")
    if not colon or whole(line) is None or not file:
        what = f"{shortened(place)} is not of the form FILE:LINE"
        fix = "Write it as in chats.jsonl:12 (FILE:ROW for a table or a list)."
        raise UserError(what, where="--source", fix=fix, code="not-file-and-line")
    given, files = os.path.realpath(os.path.expanduser(file)), dict[str, None]()
    for store, row in enumerate(corpus.first_rows[:-1].tolist()):
        for chunk in corpus.source(store).chunks():
            name = chunk.origin  # users name the file by its path, the end of its path, or its bare name
            same = name == file or name.endswith(f"/{file}") or os.path.realpath(name) == given
            for at, (where, _) in enumerate(chunk.rows() if same else ()):
                if where in (f"{name}:{line}", f"{name}, row {line}"):
                    return row + at
            row += len(chunk)
            files[name] = None
    names = f"{', '.join([*files][:4])}{' …' if len(files) > 4 else ''}"
    fix = f"Lines count from 1, blank ones too; in a table or a .json list, rows do. Files of the data: {names}."
    raise UserError(f"{shortened(file)} has no row on line {line}", where="--source", fix=fix, code="no-such-row")


def lay_out_step(corpus: Corpus, processes: int, step: int, most: int | None = None) -> Shown:
    """Show each rank's micro-batches in `step` (from 1), with examples and places.

    `most` limits the examples of a micro-batch. Raises UserError if the run has no such step.
    """
    packing, cost = corpus.config.packing, estimate_attention_cost(corpus)
    schedule = schedule_of(corpus, packing, processes, cost or 0.0)
    if not 1 <= step <= schedule.total_steps:
        what = f"step {step}, but the run has {counted(schedule.total_steps, 'steps')}"
        fix = f"Give a number from 1 to {schedule.total_steps}."
        raise UserError(what, where="--step", fix=fix, code="no-such-step")
    layout = schedule.layout(step - 1, processes)
    firsts = corpus.train.rows.reshape(-1, corpus.spec.documents)[:, 0]  # the first document of each example
    numbers = {int(number) for parts in layout for part in parts for number in part[:most]}
    places = find_places(corpus, {int(corpus.row_of[firsts[number]]) for number in numbers})

    def show(part: np.ndarray) -> Shown:
        """Show one forward pass. Each part of an example has its first token in the row (0 in each padded row)."""
        padded = packing.mode == "padding"
        examples = [show_example(corpus, number, places) for number in firsts[part[:most]].tolist()]
        at = 0
        pieces = [piece for example in examples for piece in example["parts"]]
        for piece in pieces if schedule.prefixes is None else ():  # shared prefixes stand in several places
            piece["start"] = 0 if padded else at
            at += piece["tokens"]
        return {
            "examples": len(part),
            "slots": schedule.slots(part),
            "shown": examples,
        }

    return {
        "step": step,
        "steps": schedule.total_steps,
        "epoch": int(schedule.epoch_of(step - 1)) + 1,
        "mode": packing.mode,
        "examples": sum(len(part) for parts in layout for part in parts),
        "tokens_per_row": None if packing.mode != "packed" else int(schedule.limits.tokens),
        "guessed": cost is None and processes > 1,
        "ranks": [{"rank": rank, "micro_batches": [show(part) for part in parts]} for rank, parts in enumerate(layout)],
    }


def show_example(corpus: Corpus, number: int, places: Mapping[int, str]) -> Shown:
    """Show the example that begins with document `number`: its row's place, and parts of text.

    The prompt of a pair is a part of its own if it is laid out once, assuming that the attention proves exact.
    """
    together, packing = corpus.spec.documents, corpus.config.packing
    row = int(corpus.row_of[number])
    fate, place = corpus.fates[row], places[row]
    documents = [corpus.documents[number + side] for side in range(together)]
    notes = [] if corpus.labels is None else ["desirable" if corpus.labels[number] else "undesirable"]
    notes += ["held out"] if corpus.in_eval[number] else []
    common, parts = 0, []
    if together == 2 and packing.mode != "padding" and packing.share_prefix is not False:
        # the last token of the prompt predicts the answer, so it runs with both answers
        common = max(0, min(int(np.argmax(document.loss_mask)) for document in documents) - 1)
    if common:
        ids, mask = documents[0].input_ids[:common], documents[0].loss_mask
        parts.append({"name": "prompt", "tokens": common, "spans": _show_spans(corpus, ids, mask, 0)})
    for name, document in zip(("chosen", "rejected") if together == 2 else ("",), documents, strict=True):
        ids, mask = document.input_ids, document.loss_mask
        parts.append({"name": name, "tokens": len(ids) - common, "spans": _show_spans(corpus, ids, mask, common)})
    return {
        "where": visible(place),
        "note": ", ".join(notes),
        "tokens": sum(part["tokens"] for part in parts),
        "trained": int(sum(document.loss_mask.sum() for document in documents)),
        "cut": int(fate["cut_tokens"]),
        "parts": parts,
    }


def _show_spans(corpus: Corpus, ids: np.ndarray, mask: np.ndarray, first: int) -> list[Shown]:
    """Return the text of the tokens from `first` on, in spans of one style. Each turn begins a line."""
    special = np.isin(ids, list(corpus.tokenizer.special_ids))
    rust, stream = Tokenizer.from_str(corpus.tokenizer.backend), DecodeStream(skip_special_tokens=False)
    # a character made of several tokens appears at its last one
    texts = [visible(stream.step(rust, token) or "") for token in ids[: first + MAX_TOKENS].tolist()]
    spans: list[Shown] = []
    for at in range(first, len(texts)):
        style = {"trained": bool(mask[at]), "special": bool(special[at])}
        if not spans or not style.items() <= spans[-1].items():
            spans.append({"text": "", **style})
        spans[-1]["text"] += texts[at]
        if ids[at] in corpus.end_ids and at + 1 < len(texts) and not texts[at + 1].startswith("⏎"):
            spans[-1]["text"] += "\n"
    if len(texts) < len(ids):
        more = f"\n… and {len(ids) - len(texts):,} tokens more"
        spans.append({"text": more, "trained": False, "special": False})
    return spans
