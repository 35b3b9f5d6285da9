"""Where all is wired together: Init, a model's construction, gathered, stats."""
