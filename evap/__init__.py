"""evap: an inference server in which an HTTP/2 stream is an engine request. The command line is `python -m evap`."""

from evap.config import Config
from evap.errors import EvapError, StartupError

__version__ = "0.1.0"

__all__ = ["Config", "EvapError", "StartupError", "__version__"]
