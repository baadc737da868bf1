"""Changes what every process of a chaos run imports: its clock, and the guard that it runs without.

Only the driver puts this folder into PYTHONPATH. Python imports the module at the start of a process.
"""

import os
from datetime import datetime, timedelta

import comfyfleet.clock

_utc_now = comfyfleet.clock.utc_now


def _skewed_now() -> datetime:
    """The time of a machine whose clock is wrong; forked processes have variables of their own."""
    return _utc_now() + timedelta(seconds=float(os.environ.get("CHAOS_CLOCK_SECONDS", "0")))


comfyfleet.clock.utc_now = _skewed_now

if os.environ.get("CHAOS_MUTATION"):
    from tests.chaos.mutations import weaken_code

    weaken_code(os.environ["CHAOS_MUTATION"])

if os.environ.get("CHAOS_TYPES"):
    from tests.chaos.memory import install

    install()
