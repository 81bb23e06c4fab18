"""How layers compute: their experts, and their MLPs by tiles of tokens."""
