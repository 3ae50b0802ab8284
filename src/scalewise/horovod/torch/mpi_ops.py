"""The collectives under the module's name that older scripts import them from."""

from scalewise.horovod.torch import *  # noqa: F403
from scalewise.horovod.torch import __all__ as __all__
