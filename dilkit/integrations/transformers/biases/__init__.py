"""Position biases of models: values that their layers hand to the attention function in place of tensors of all pairs."""
