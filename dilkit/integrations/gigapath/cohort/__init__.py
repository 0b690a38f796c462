"""Slides of a cohort, embedded from their files of tile features: listed first, resumed where a run stopped, divided over ranks.

settings.py     what all slides of a run have in common
listing.py      the slides with their tiles and tile sizes, from headers
manifest.py     which outputs are there, and what they were made with
embedding.py    the embeddings of a pack, and their files
run.py          one run: `embed_cohort`
heatmap.py      attention over the tiles as an image
"""
