"""Memory and time of operators in tiles, beside whole operators."""
