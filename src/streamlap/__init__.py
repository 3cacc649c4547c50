"""Hide copies behind compute: device to host and back, in order, in bounded memory."""

from streamlap._version import __version__
from streamlap.benchmark import Benchmark
from streamlap.checksums import checksum
from streamlap.copies import copy_to_cpu, to_cpu, to_device
from streamlap.devices import Device, checking, devices, synchronize, use_runtime
from streamlap.errors import (
    CaptureError,
    DeviceError,
    DeviceLost,
    ForkedProcess,
    GradientsIncomplete,
    InvalidArgument,
    InvalidType,
    OrderError,
    OutOfMemory,
    PoolExhausted,
    SourceModified,
    StreamlapError,
    TransferTimeout,
    UnsupportedTensor,
)
from streamlap.pinned import PinnedPool, empty_pinned, pool_stats, prewarm, record_use
from streamlap.pipeline import parallel_run, pipelined_map, pipelined_run, run
from streamlap.plan import Pipeline
from streamlap.policy import Policy, configure, policy
from streamlap.prediction import Prediction, predict
from streamlap.traces.summary import Summary
from streamlap.traces.timeline import Timeline, timeline
from streamlap.training import ActivationOffload, Prefetcher, offload_activations
from streamlap.training.gradients import stream_gradients
from streamlap.transfer import Transfer
from streamlap.tree_copy import TreeCopy

__all__ = [
    "ActivationOffload",
    "Benchmark",
    "CaptureError",
    "Device",
    "DeviceError",
    "DeviceLost",
    "ForkedProcess",
    "GradientsIncomplete",
    "InvalidArgument",
    "InvalidType",
    "OrderError",
    "OutOfMemory",
    "PinnedPool",
    "Pipeline",
    "Policy",
    "PoolExhausted",
    "Prediction",
    "Prefetcher",
    "SourceModified",
    "StreamlapError",
    "Summary",
    "Timeline",
    "Transfer",
    "TransferTimeout",
    "TreeCopy",
    "UnsupportedTensor",
    "__version__",
    "checking",
    "checksum",
    "configure",
    "copy_to_cpu",
    "devices",
    "empty_pinned",
    "offload_activations",
    "parallel_run",
    "pipelined_map",
    "pipelined_run",
    "policy",
    "pool_stats",
    "predict",
    "prewarm",
    "record_use",
    "run",
    "stream_gradients",
    "synchronize",
    "timeline",
    "to_cpu",
    "to_device",
    "use_runtime",
]
