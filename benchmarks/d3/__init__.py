"""Studies of D3: estimators, and what an order does to training."""
