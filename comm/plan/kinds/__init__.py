"""Messages and small problems of branches that are no segments, one file a kind."""
