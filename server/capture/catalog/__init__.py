"""The tables of a changefeed over time: which it takes, in which versions, and how they lie in the metadata."""
