"""From a config and what is around it to running processes: pure plans, and one place (execute.py) that carries them out."""
