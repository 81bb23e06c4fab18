"""Configs of other trainers become configs of packtrain: a table per trainer, one reader, one writer. Nothing else imports this."""
