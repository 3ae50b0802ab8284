"""`run` where scripts import it from; torchrun is the launcher."""

from scalewise.horovod import run

__all__ = ["run"]
