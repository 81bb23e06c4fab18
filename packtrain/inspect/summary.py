"""The verb `packtrain inspect`: a summary of data, and examples for a reader.

Reports show the summary too. Examples are text that marks trained and control tokens: the first ones, one source row, or a step in
training's layout.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import get_args

import numpy as np
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from packtrain.config.schema import Packing, PackingMode, RunConfig
from packtrain.config.yaml_files import shown
from packtrain.data.dataset import list_members
from packtrain.data.sources.left_out import real_name, split_place
from packtrain.data.tokens.cache import Document
from packtrain.data.tokens.encode import TOO_LONG
from packtrain.errors import UserError
from packtrain.inspect.audit import audit, audit_json, rows_named, scan
from packtrain.inspect.corpus import Corpus, estimate_attention_cost, find_places, open_corpus, schedule_of
from packtrain.inspect.picture_facts import add_thumbnails, show_picture
from packtrain.inspect.rendering import DataTerminal, Shown, data_page
from packtrain.packing.prefixes import MIN_SHARED, count_shareable
from packtrain.packing.schedule import Schedule
from packtrain.wording import counted, shortened, visible

SAMPLED_STEPS = 48
"""Steps of an epoch that are laid out. In a longer epoch they are spread evenly."""
SHOWN = 3
_CANDIDATES = 200
"""Number of examples from the start of the data to choose the shown ones from."""
PERCENTILES = (0, 5, 25, 50, 75, 90, 95, 99, 100)
BINS = 24
MAX_TOKENS = 20_000
"""Most tokens of a part that are shown."""
LIMITS = tuple(512 * 2**power for power in range(12))


def summarise(corpus: Corpus, processes: int) -> Shown:
    """Summarise the data as plain containers, for a run on this many processes."""
    config, spec, report = corpus.config, corpus.spec, corpus.train.report
    findings = audit(corpus, scan(corpus))
    shown = _choose_typical(corpus)
    bad = corpus.bad_rows()
    places = find_places(corpus, rows_named(findings) | {int(corpus.row_of[document]) for document in shown} | {*bad})
    cost = estimate_attention_cost(corpus)
    percentiles = np.percentile(corpus.train.lengths, PERCENTILES).astype(int).tolist()
    return {
        "rows": report.rows,
        "kept": report.kept,
        "dropped": sum(report.dropped.values()),
        "dropped_for": dict(report.dropped),
        "skipped": [{"where": visible(places[row]), "reason": reason} for row, reason in bad.items()],
        "truncated": report.truncated,
        "split": report.split,
        "cut_tokens": report.cut_tokens,
        "documents": report.documents,
        "examples": report.examples,
        "labels": report.labels and asdict(report.labels),
        "unit": spec.examples,
        "tokens": report.tokens,
        "trained_tokens": report.trained_tokens,
        "pictures": report.pictures and report.pictures.to_json(report.tokens),
        "held_out": None if corpus.eval is None else corpus.eval.report.documents // spec.documents,
        "sources": list(report.sources),
        "format": report.format,
        "remarks": report.decisions(),
        "unread": report.unread,
        "max_length": config.data.max_length,
        "percentiles": dict(zip(map(str, PERCENTILES), percentiles, strict=True)),
        "histogram": _make_histogram(corpus.train.lengths),
        "cuts": _count_cuts(corpus),
        "processes": processes,
        "mode": config.packing.mode,
        "modes": mode_costs(corpus, processes, cost or 0.0),
        "attention_cost": cost,
        "audit": audit_json(findings, places),
        "shown": [show_example(corpus, number, places) for number in shown],
    }


def mode_costs(corpus: Corpus, processes: int, cost: float) -> dict[str, Shown]:
    """Return each mode's costs: rows and slots of an epoch, `efficiency`, figures of a step.

    `efficiency` is tokens / slots. A mode that is not possible has the reason. A packed row is as long as its documents: `fill` is its
    share of batch.tokens_per_device.
    """
    costs: dict[str, Shown] = {}
    for mode in get_args(PackingMode):
        packing = replace(corpus.config.packing, mode=mode)
        try:
            costs[mode] = _count_costs(schedule_of(corpus, packing, processes, cost), corpus, packing, processes)
        except UserError as error:
            costs[mode] = {
                "rows": None,
                "slots": None,
                "efficiency": None,
                "why": error.in_words().replace("\n    → ", ": "),
            }
    return costs


def _count_costs(schedule: Schedule, corpus: Corpus, packing: Packing, processes: int) -> Shown:
    mode, pairs, epoch = packing.mode, corpus.pairs, schedule.steps_per_epoch(0)
    tokens = pairs.lengths if pairs is not None and mode == "padding" else schedule.lengths
    sample = schedule.summary(processes, SAMPLED_STEPS, tokens)
    scale = int(tokens.sum(dtype=np.int64)) / sample.tokens
    figures: Shown = {
        "rows": len(tokens) * corpus.spec.documents if mode == "padding" else round(sample.rows * scale),
        "slots": round(sample.slots * scale),
        "efficiency": round(1 - sample.padding_fraction, 4),
        "steps": epoch,
        "micro_batches": [sample.micro_batches_min, sample.micro_batches_max],
        "imbalance": round(sample.imbalance, 4),
        "sampled": sample.steps < epoch,
    }
    if mode == "packed":
        figures["fill"] = round(sample.slots / (sample.rows * schedule.limits.tokens), 4)
    if pairs is not None and mode != "padding" and packing.share_prefix is not False:
        both = int(pairs.lengths.sum(dtype=np.int64))
        figures["saved_by_sharing"] = round(1 - int(pairs.shared_lengths.sum(dtype=np.int64)) / both, 4)
    if schedule.prefixes is not None:
        figures["saved_by_sharing"] = round(1 - sample.slots / sample.tokens, 4)
    if mode == "packed" and (found := schedule.example_slots()):
        figures["example_slots"] = found
    return figures


def _choose_typical(corpus: Corpus) -> list[int]:
    """Choose examples of usual length from the start of the data, by their first documents. Examples with pictures come first."""
    together = corpus.spec.documents
    first = corpus.train.rows[: _CANDIDATES * together : together]
    lengths = corpus.documents.lengths[first]
    order = np.lexsort((np.abs(lengths - np.median(lengths)), ~np.isin(first, corpus.pictures["document"])))
    return sorted(list(dict.fromkeys(first[order].tolist()))[:SHOWN])


def _make_histogram(lengths: np.ndarray) -> list[dict[str, int]]:
    """Count documents in bins of equal, round width, from `first` to `last` tokens. The last bin holds all longer documents."""
    most = int(np.percentile(lengths, 99.5))
    width = next(digit * 10**power for power in range(10) for digit in (1, 2, 5) if digit * 10**power * BINS > most)
    counts = np.bincount(np.minimum(lengths // width, most // width), minlength=most // width + 1).tolist()
    firsts = range(0, width * len(counts), width)
    parts = zip(firsts, counts, strict=True)
    bins = [{"first": at, "last": at + width - 1, "documents": number} for at, number in parts]
    bins[-1]["last"] = max(bins[-1]["last"], int(lengths.max()))
    return bins


def _count_cuts(corpus: Corpus) -> list[Shown]:
    """Count the cuts of data.max_length. Limits run from 512 tokens to the first that cuts nothing, or to the current limit: beyond it
    nothing is known of longer documents. For dropped documents not even the number of tokens is known."""
    lengths, current, report = corpus.train.lengths, corpus.config.data.max_length, corpus.train.report
    dropped = report.dropped.get(TOO_LONG, 0) * corpus.spec.documents
    limits = {limit for limit in LIMITS if limit < 2 * int(lengths.max())} or {LIMITS[0]}
    cuts = []
    for limit in sorted({limit for limit in limits if limit < current} | {current} if current else limits):
        longer = lengths[lengths > limit].astype(np.int64)
        documents = len(longer) + dropped + (report.truncated + report.split if limit == current else 0)
        lost = int((longer - limit).sum()) + report.cut_tokens
        cuts.append(
            {
                "max_length": limit,
                "documents": documents,
                "share": round(documents / (len(lengths) + dropped), 4),
                "tokens": None if dropped else lost,
                "tokens_share": None if dropped else round(lost / (int(lengths.sum()) + report.cut_tokens), 4),
                "current": limit == current,
            }
        )
    return cuts


def show_first(corpus: Corpus, number: int) -> list[Shown]:
    """Show the first `number` examples in the order of the data. Raises UserError if there are fewer."""
    trained = np.flatnonzero(corpus.in_train[corpus.borders[:-1]])
    if not 0 <= number <= len(trained):
        what = f"{number:,}, but there are {counted(len(trained), corpus.spec.examples)}"
        raise UserError(what, where="--rows", fix=f"Give a number from 0 to {len(trained)}.", code="no-such-rows")
    chosen = list_members(corpus.borders, trained[:number])[:: corpus.spec.documents].tolist()
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
    if (parts := split_place(place)) is None:
        what = f"{shortened(place)} is not of the form FILE:LINE"
        fix = "Write it as in chats.jsonl:12 (FILE:ROW for a table or a list)."
        raise UserError(what, where="--source", fix=fix, code="not-file-and-line")
    (file, line), files = parts, dict[str, None]()
    for store, row in enumerate(corpus.first_rows[:-1].tolist()):
        for chunk in corpus.source(store).chunks():
            name = chunk.origin  # users name the file by its path, the end of its path, or its bare name
            if line in chunk.numbers and (name.endswith(f"/{file}") or real_name(name) == real_name(file)):
                return row + chunk.numbers.index(line)
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
        raise UserError(what, where="--step", fix=f"Give a number from 1 to {schedule.total_steps}.", code="no-step")
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
    context = _find_context(corpus, number)
    if context:
        same = f", the first {context['shared']:,} tokens as answer {context['as_answer']}" if context["shared"] else ""
        notes += [f"answer {context['answer']} of {context['answers']}{same}"]
    common, parts = 0, []
    if together == 2 and packing.mode != "padding" and packing.share_prefix is not False:
        # the last token of the prompt predicts the answer, so it runs with both answers
        common = max(0, min(int(np.argmax(document.loss_mask)) for document in documents) - 1)
    if common:
        spans = _show_spans(corpus, documents[0], 0, common)
        parts.append({"name": "prompt", "tokens": common, "spans": spans})
    for name, document in zip(("chosen", "rejected") if together == 2 else ("",), documents, strict=True):
        tokens = len(document.input_ids)
        spans = _show_spans(corpus, document, common, tokens)
        parts.append({"name": name, "tokens": tokens - common, "spans": spans})
    return {
        "where": visible(place),
        "note": ", ".join(notes),
        "tokens": sum(part["tokens"] for part in parts),
        "trained": int(sum(document.loss_mask.sum() for document in documents)),
        "cut": int(fate["cut_tokens"]),
        "parts": parts,
        **context,
    }


def _find_context(corpus: Corpus, number: int) -> Shown:
    """Describe the place of a document in its example; {} if it is alone.

    `shared` is the largest number of tokens in common with an earlier answer, number `as_answer`.
    """
    example = int(np.searchsorted(corpus.borders, number, side="right")) - 1
    first, end = corpus.borders[example : example + 2].tolist()
    if corpus.spec.documents > 1 or end - first == 1:
        return {}
    alike = [count_shareable(corpus.documents[one], corpus.documents[number]) for one in range(first, number)]
    shared = max((tokens for tokens in alike if tokens >= MIN_SHARED), default=0)
    as_answer = alike.index(shared) + 1 if shared else None
    return {"answer": number - first + 1, "answers": end - first, "shared": shared, "as_answer": as_answer}


def _show_spans(corpus: Corpus, document: Document, first: int, end: int) -> list[Shown]:
    """Return the text of tokens `first` to before `end`, in spans of one style.

    Each turn begins a line, and a picture is one span.
    """
    ids, mask = document.input_ids[:end], document.loss_mask
    pictures = {picture.start: picture for picture in document.pictures}
    shown = -1
    special = np.isin(ids, list(corpus.tokenizer.special_ids))
    rust, stream = Tokenizer.from_str(corpus.tokenizer.backend), DecodeStream(skip_special_tokens=False)
    # a character made of several tokens appears at its last one
    texts = [visible(stream.step(rust, token) or "") for token in ids[: first + MAX_TOKENS].tolist()]
    spans: list[Shown] = []
    for at in range(first, len(texts)):
        if at in pictures:
            shown = pictures[at].end
            spans.append(show_picture(pictures[at]))
        if at < shown:
            continue
        style = {"trained": bool(mask[at]), "special": bool(special[at])}
        if not spans or "picture" in spans[-1] or not style.items() <= spans[-1].items():
            spans.append({"text": "", **style})
        spans[-1]["text"] += texts[at]
        if ids[at] in corpus.end_ids and at + 1 < len(texts) and not texts[at + 1].startswith("⏎"):
            spans[-1]["text"] += "\n"
    if len(texts) < len(ids):
        more = f"\n… and {len(ids) - len(texts):,} tokens more"
        spans.append({"text": more, "trained": False, "special": False})
    return spans


_FIRST = 2
"""Number of examples that are shown above the summary."""


def show_data(
    config: RunConfig,
    processes: int,
    title: str,
    *,
    rows: int | None,
    step: int | None,
    source: str | None,
    html: Path | None,
    as_json: bool,
) -> int:
    """Show the data of `config`, laid out for `processes`, by the options of the verb.

    Returns the exit code. Examples that are asked for are shown on the terminal at once, without the summary. Only the summary reads all
    tokens."""
    if source is not None and (step is not None or rows is not None):
        what = "it shows one row, so it does not go with --rows or --step"
        raise UserError(what, where="--source", code="source-stands-alone")
    if html is not None:
        _check_page(html)
    corpus = open_corpus(config, progress=os.isatty(2))
    terminal, unit = DataTerminal(), corpus.spec.examples
    layout = examples = None
    if step is not None:
        layout = lay_out_step(corpus, processes, step, rows)
        batches = [batch for rank in layout["ranks"] for batch in rank["micro_batches"]]
        examples = [example for batch in batches for example in batch["shown"]]
    elif source is not None:
        examples = show_row(corpus, source)
    elif rows is not None:
        examples = show_first(corpus, rows)
    if html is None and not as_json and examples is not None:
        terminal.legend()
        terminal.examples(examples, unit) if layout is None else terminal.step(layout, unit)
        terminal.remarks(corpus.train.report.decisions())
        return 0
    summary = summarise(corpus, processes)
    summary |= {} if examples is None else {"shown": examples}
    summary |= {} if layout is None else {"step": layout}
    if html is not None:
        add_thumbnails(summary["shown"])
        html.write_text(data_page(summary, title), encoding="utf-8")
    if as_json:
        print(json.dumps(summary, indent=2))
    elif html is not None:
        terminal.say(f"written: {shown(html)}")
    else:
        terminal.legend()
        terminal.examples(summary["shown"][:_FIRST], unit)
        terminal.say()
        terminal.summary(summary)
    return 0


def _check_page(file: Path) -> None:
    """Raise UserError if the page's folder is missing. Also if its name may belong to a config or data."""
    where = f"--html {shown(file)}"
    if not file.parent.is_dir():
        raise UserError("there is no such folder", where=where, fix="Make it first.", code="no-such-folder")
    if os.path.lexists(file) and (file.suffix not in (".html", ".htm") or file.is_dir()):
        fix = "Give a name that ends in .html."
        what = "this file is not an HTML page, so it is not overwritten"
        raise UserError(what, where=where, fix=fix, code="not-an-html-page")
