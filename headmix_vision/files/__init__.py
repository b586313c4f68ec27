"""Files: complete or absent, with one writer, of known contents."""
