"""What ranks send and compute for branches that are no segments, one file a kind."""
