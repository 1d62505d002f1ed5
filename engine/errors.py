"""What goes wrong below the driver, by whose fault it is.

    ConfigurationError      the operator's: a model directory, a flag or a machine that cannot work;
                            the daemon says so and exits, and systemd does not restart it
    ValueError              the client's, from SamplingParams: the message names the parameter and its range
    OutOfMemory             nobody's: the engine starts with fewer pages
    StepFailed              ours, or the device's: what was in one step is lost, the engine goes on

Anything else is ours, and the end of the thread it comes up in.
"""


class ConfigurationError(Exception):
    """The daemon cannot serve with what it was given; the message says what to change."""


class OutOfMemory(Exception):
    """The device has refused memory while the engine started; the message has its words."""


class StepFailed(Exception):
    """The device could not do a step; the message has its words."""
