"""The count of a pattern as torch operators on indices, and its blocks: what FlexAttention takes."""
