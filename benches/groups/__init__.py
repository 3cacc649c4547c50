"""The groups, one a file. Each has ``TITLE``, ``ABOUT``, ``NOT_ON_CPU`` (why not, or empty) and
``plan(setting)``, which returns its tables. A new group is a file and a name here.
"""

from . import first, gradients, job, kernels, ordinary, pinned, small, tiny, two_gpus

GROUPS = {
    "job": job,
    "first": first,
    "ordinary": ordinary,
    "pinned": pinned,
    "tiny": tiny,
    "small": small,
    "kernels": kernels,
    "gradients": gradients,
    "two_gpus": two_gpus,
}
