"""What options do to scores: their meaning, values and gradients by pairs, training, threads, random calls."""
