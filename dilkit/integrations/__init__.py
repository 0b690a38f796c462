"""dilkit inside models that others wrote. Each integration imports what it adapts only where that is loaded already."""
