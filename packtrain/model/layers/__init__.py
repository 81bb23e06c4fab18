"""How layers compute: their experts, their MLPs by tiles of tokens, and where what they keep for the backward pass is."""
