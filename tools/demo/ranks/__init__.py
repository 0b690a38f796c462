"""The demo of data x sequence parallelism: one training, on ranks and in one process, compared step by step."""
