"""The thread that walks over records, and the passes that it runs."""
