"""The bench suite: streamlap beside its peers. ``streamlap bench`` runs it."""
