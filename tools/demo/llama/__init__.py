"""The demo of transformers' models: a small Llama that learns with full attention, and goes on with dilated attention."""
