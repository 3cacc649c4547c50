"""Helpers for training loops, each usable with two changed lines; built on the public names."""

from streamlap.training.activations import ActivationOffload, offload_activations
from streamlap.training.prefetch import Prefetcher

__all__ = ["ActivationOffload", "Prefetcher", "offload_activations"]
