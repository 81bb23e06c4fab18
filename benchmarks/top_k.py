"""Compare a teacher's k most likely tokens with its whole distribution, on real text.

    python benchmarks/top_k.py --model MODEL_FOLDER --data FILE.jsonl [--rows 32] [--targets 32] [--layers 24]

The model is the teacher. The student has some of its layers, evenly chosen, and is not trained. Each k is compared at some trained tokens of each
row, evenly spread: the teacher's mass outside of the k tokens, the divergence, and its gradients of the logits and of the states before the output head.
"""

from __future__ import annotations

import argparse
import copy
from collections import defaultdict
from typing import cast

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from packtrain.config.schema import Data
from packtrain.data.dataset import TokenDataset
from packtrain.data.prepare import prepare
from packtrain.objectives.distill.divergence import Divergence, Taught, pick

KS = (1, 8, 32, 64, 256, 1024)
KINDS = ("forward_kl", "reverse_kl", "jsd")


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--targets", type=int, default=32)
    parser.add_argument("--layers", type=int, default=24)
    options = parser.parse_args()
    teacher = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    student, layers = copy.deepcopy(teacher), teacher.model.layers
    student.model.layers = nn.ModuleList(
        student.model.layers[round(number)] for number in np.linspace(0, len(layers) - 1, options.layers)
    )
    data = prepare(
        Data(train=options.data, max_length=1024), AutoTokenizer.from_pretrained(options.model), "sft", seed=0
    ).train
    sums, targets = defaultdict[tuple[int, str], torch.Tensor](lambda: torch.zeros(6, dtype=torch.float64)), 0
    head = cast(nn.Linear, teacher.get_output_embeddings()).weight
    for number in range(min(options.rows, len(data))):
        document = cast(TokenDataset, data)[number]
        ids = torch.as_tensor(document.input_ids.astype(np.int64))[None]
        trained = np.flatnonzero(document.loss_mask[1:])
        at = torch.as_tensor(trained[:: -(-len(trained) // options.targets)])
        own, its = (model(ids, use_cache=False).logits[0, at] for model in (student, teacher))
        chosen, targets = ids[0, at + 1], targets + len(at)
        student_log_probs, whole = own.log_softmax(dim=-1), Taught.whole(its)
        for k in KS:
            sums[k, "outside"] += (1 - its.softmax(dim=-1).topk(k).values.sum(dim=-1)).sum().double()
        for kind in KINDS:
            divergence = Divergence(kind)
            exact = whole.log_probs(student_log_probs, 1)
            value, gradient = divergence.value(student_log_probs, exact), divergence.gradient(student_log_probs, exact)
            for k in KS:
                coarse = Taught.coarse(pick(its, chosen, k, 1), its.shape[1]).log_probs(student_log_probs, 1)
                off = divergence.gradient(student_log_probs, coarse) - gradient
                found = [divergence.value(student_log_probs, coarse).sum(), value.sum(), off.square().sum()]
                found += [gradient.square().sum(), (off @ head).square().sum(), (gradient @ head).square().sum()]
                sums[k, kind] += torch.stack(found).double()
    print(f"{targets:,} trained tokens; divergence of all tokens: ", end="")
    print(", ".join(f"{kind} {sums[1, kind][1] / targets:.3f}" for kind in KINDS))
    names = [f"{kind} off | its gradient off, of logits | of states" for kind in KINDS]
    print(f"| k | bytes a token | mass outside | {' | '.join(names)} |\n|{'---|' * (3 + 3 * len(KINDS))}")
    for k in KS:
        cells = [str(k), str(8 * k + 20), f"{sums[k, 'outside'][0] / targets:.2%}"]
        for kind in KINDS:
            coarse, value, *squares = sums[k, kind].tolist()
            cells.append(f"{(coarse - value) / value:+.2%}")
            cells += [f"{(squares[one] / squares[one + 1]) ** 0.5:.2%}" for one in (0, 2)]
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
