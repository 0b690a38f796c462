"""`dilkit encode-slide`: its arguments, what its processes do, and what it prints."""
