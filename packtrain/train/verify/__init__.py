"""Proofs on the loaded model. One reports that packed rows train like single documents, one that a change alters nothing."""
