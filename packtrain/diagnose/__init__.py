"""What is wrong with a machine or a run, said in words: facts, checks of them, and how they are shown."""
