"""axolotl's collator of `sample_packing: true`, for `packtrain verify --collator`.

Its trainer drops the attention mask before it collates, where the attention knows packed rows. So does this.
The first token of each document stands for a prompt, which `train_on_inputs: false` does not train.
"""

from axolotl.utils.collators import V2BatchSamplerDataCollatorForSeq2Seq
from axolotl.utils.trainer import add_position_ids


def collate(tokenizer):
    to_row = V2BatchSamplerDataCollatorForSeq2Seq(tokenizer)

    def run(documents):
        rows = [{"input_ids": one["input_ids"], "labels": [-100, *one["labels"][1:]]} for one in documents]
        return to_row([[add_position_ids(row) for row in rows]])

    return run
