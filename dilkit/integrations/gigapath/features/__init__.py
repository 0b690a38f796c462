"""Files of tile features with their coordinates, as TRIDENT, CLAM, STAMP, slide2vec and AtlasPatch write them."""

from dilkit.integrations.gigapath.features.arrays import check_apart, features_in, others_in
from dilkit.integrations.gigapath.features.slide import Features, Header, read_features, read_header

__all__ = ["Features", "Header", "check_apart", "features_in", "others_in", "read_features", "read_header"]
