"""TurboConn: links from the top of one token to the bottom of the next (arXiv 2602.17993). See README.md here."""

from .configuration_turboconn import TurboConnConfig as TurboConnConfig
from .patching import patch as patch
from .patching import unpatch as unpatch
from .training import JacobiGapCallback as JacobiGapCallback
from .training import parameter_groups as parameter_groups
