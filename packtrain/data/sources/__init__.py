"""Where rows come from: files, folders, the hub, built-in data."""
