"""Studies of mixers: real runs of a small model, compared by held-out loss."""
