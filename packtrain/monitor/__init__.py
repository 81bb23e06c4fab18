"""Progress reports of all ranks, and the watchdog. It finds which rank keeps the others waiting."""
