"""The command `infinity`."""
