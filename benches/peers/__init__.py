"""The peers, one a file: what people write without streamlap."""
