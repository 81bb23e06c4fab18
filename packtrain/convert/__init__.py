"""Conversion of other trainers' configs: a table per trainer, one reader, one writer. Nothing else imports this."""
