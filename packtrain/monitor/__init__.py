"""Progress reports of all ranks, and the watchdog. The watchdog finds the rank that the others wait for."""
