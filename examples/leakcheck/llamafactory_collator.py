"""LLaMA-Factory's packing and collator of `neat_packing: true`, for `packtrain verify --collator`.

Its packing starts from text. Packed gives it tokens instead, and changes nothing else.
"""

import os

os.environ.setdefault("DISABLE_VERSION_CHECK", "1")  # it pins an older transformers than packtrain needs

from llamafactory.data.collator import SFTDataCollatorWith4DAttentionMask
from llamafactory.data.processor.supervised import PackedSupervisedDatasetProcessor
from llamafactory.data.template import TEMPLATES
from llamafactory.hparams import DataArguments


class Packed(PackedSupervisedDatasetProcessor):
    def _encode_data_example(self, prompt, response, **_):
        return list(prompt[0]), [-100, *response[0][1:]]  # the first token stands for a prompt


def collate(tokenizer, model):
    settings = DataArguments(packing=True, neat_packing=True, cutoff_len=64)
    known = {"template": TEMPLATES["empty"], "tokenizer": tokenizer, "processor": None}
    packed = Packed(**known, data_args=settings)
    to_rows = SFTDataCollatorWith4DAttentionMask(
        **known, model=model, block_diag_attn=True, neat_packing=True, attn_implementation="sdpa", pad_to_multiple_of=8
    )

    def run(documents):
        text = {
            "_prompt": [[one["input_ids"]] for one in documents],
            "_response": [[one["labels"]] for one in documents],
        }
        rest = dict.fromkeys(("_system", "_tools", "_images", "_videos", "_audios"), [None] * len(documents))
        columns = packed.preprocess_dataset({**text, **rest})
        return to_rows([dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)])

    return run
