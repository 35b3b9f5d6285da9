"""Big operators as sequences of tiles (weight, sequence, batch and vocabulary axes)."""
