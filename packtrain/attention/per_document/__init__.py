"""The whole model, called once for each length of documents."""
