"""Training on several ranks of one machine, beside torch's and DeepSpeed's data parallelism."""
