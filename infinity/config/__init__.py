"""What a training is told: Config, and DeepSpeed's JSON in its terms."""
