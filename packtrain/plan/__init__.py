"""From a config and what is around it to what will be started, as values: nothing here starts or writes anything."""
