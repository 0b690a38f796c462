def _nothing(): pass
