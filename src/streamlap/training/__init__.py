"""Helpers for training loops, each usable with two changed lines; built on the public names."""

from streamlap.training.activations import ActivationOffload, offload_activations
from streamlap.training.ddp import DDPGradients, ddp_comm_hook
from streamlap.training.gradients import GradientStream, stream_gradients
from streamlap.training.prefetch import Prefetcher
from streamlap.training.step import Gradients

__all__ = [
    "ActivationOffload",
    "DDPGradients",
    "GradientStream",
    "Gradients",
    "Prefetcher",
    "ddp_comm_hook",
    "offload_activations",
    "stream_gradients",
]
