"""The same jobs done by other libraries, and a comparison. Uses streamlap's public names only."""
