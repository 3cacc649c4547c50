"""What the tests share: data, streams held by gates, and processes that end."""
