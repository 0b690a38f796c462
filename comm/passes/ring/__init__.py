"""The ring schedule: key/value blocks rotate over the ranks of a segment, which keep their queries."""
