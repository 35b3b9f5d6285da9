"""Hugging Face's Trainer and Accelerate."""
