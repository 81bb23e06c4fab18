"""TRL's collator of SFTConfig(packing=True), for `packtrain verify --collator`."""

from datasets import Dataset
from trl import pack_dataset
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

to_row = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)


def collate(documents):
    return to_row(list(pack_dataset(Dataset.from_list(documents), 64, "bfd")))
