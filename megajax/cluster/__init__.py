"""Several processes in one run: how they find each other, agree, and end together.

`detect` reads the launcher's environment; `join` brings the processes together and returns a `Cluster`.
"""

from megajax.cluster.detect import Launch, detect
from megajax.cluster.join import Cluster, check_devices, devices_by_host, join, tensor_warning
from megajax.cluster.watchdog import Watchdog

__all__ = ["Cluster", "Launch", "Watchdog", "check_devices", "detect", "devices_by_host", "join", "tensor_warning"]
