"""Files of tile features with their coordinates, as TRIDENT, CLAM, STAMP, slide2vec and AtlasPatch write them.

slide.py        the tiles of one slide, and its header
arrays.py       the arrays that a file holds, by the ending of its name
folders.py      the files that are named, or lie in folders, and files of coordinates
attributes.py   what a file says of its tiles
"""

from dilkit.integrations.gigapath.features.folders import check_apart, features_in, others_in
from dilkit.integrations.gigapath.features.slide import Features, Header, read_features, read_header

__all__ = ["Features", "Header", "check_apart", "features_in", "others_in", "read_features", "read_header"]
