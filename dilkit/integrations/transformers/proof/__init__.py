"""A class of models of transformers, tiny and of random weights, on dilated attention beside `eager` attention.

tiny.py     configurations with small sizes, and inputs that fit
trials.py   a tiny model, and the comparisons
proving.py  the program that compares one class, for a version of transformers that is not tested
"""
