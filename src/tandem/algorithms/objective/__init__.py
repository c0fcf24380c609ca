"""What surrounds a loss: normalization, KL, correction, teacher, critic, and the options of all of it."""
