"""Changes to layers: grouped experts, and MLPs by tiles of tokens."""
