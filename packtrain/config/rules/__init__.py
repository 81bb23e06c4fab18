"""What cannot work though each key alone is fine, refused before anything is loaded; a file for each kind of reason."""
