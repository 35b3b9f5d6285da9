"""The threads that walk over records, and the passes that they run."""
