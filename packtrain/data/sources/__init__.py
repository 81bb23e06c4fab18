"""Sources of rows: files, folders, the hub, built-in data."""
