"""State that outlives the processes."""

from scalewise.horovod.torch.elastic.state import ObjectState, State

__all__ = ["ObjectState", "State"]
