"""Parameters in and out of residence."""
