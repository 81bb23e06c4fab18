"""What libraries compute once in each process that trains, and always alike: done in the one that the others are forked from."""

from transformers import conversion_mapping

conversion_mapping.get_checkpoint_conversion_mapping("llama")
