"""What users keep: save, load, export, resume, snapshot."""
