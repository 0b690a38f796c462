"""Slides of a cohort, embedded from files of tile features: listed first, resumed where a run stopped, divided over ranks."""
