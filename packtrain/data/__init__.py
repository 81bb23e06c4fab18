"""From files, folders and the hub to token ids with a loss mask, cached on disk."""
