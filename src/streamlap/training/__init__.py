"""Helpers for training loops, made of streamlap's public calls only."""

from streamlap.training.ddp import DDPGradients, ddp_comm_hook
from streamlap.training.gradients import GradientStream, stream_gradients
from streamlap.training.step import Gradients

__all__ = ["DDPGradients", "GradientStream", "Gradients", "ddp_comm_hook", "stream_gradients"]
