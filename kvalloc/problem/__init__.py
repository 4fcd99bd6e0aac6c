"""What a solver sees: arrays, constraints, bounds, and the contract that it keeps."""
