"""A class of models of transformers, tiny and of random weights, on dilated attention beside `eager` attention."""
