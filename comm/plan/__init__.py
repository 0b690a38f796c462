"""The exchange plan: which rank computes what, and which rows travel for that. Counts only, without torch."""
