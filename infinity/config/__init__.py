"""What a training is told: Config, and its translation from DeepSpeed's JSON."""
