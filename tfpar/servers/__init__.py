"""Parameter servers: variables on some processes, steps on others; docs/parameter_servers.md.

`fit` raises `ServerLostError` where a parameter server is gone, and `StepTimeoutError` where a process hangs.

Example:

>>> all(issubclass(error, RuntimeError) for error in (tfpar.servers.ServerLostError, tfpar.servers.StepTimeoutError))
True
"""

from tfpar.servers.dispatch import ServerLostError, StepTimeoutError

__all__ = ["ServerLostError", "StepTimeoutError"]
