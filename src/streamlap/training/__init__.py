"""Helpers for training loops, each usable with two changed lines; built on the public names."""

from streamlap.training.prefetch import Prefetcher

__all__ = ["Prefetcher"]
