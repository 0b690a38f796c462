"""Position biases: numbers that are added to scores, as functions of the positions of query and key."""
