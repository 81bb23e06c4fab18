"""What the processes of a run agree on before they train."""
