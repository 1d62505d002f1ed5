"""What goes wrong below the driver, by whose fault it is.

    ConfigurationError      the operator's: a model directory, a flag or a machine that cannot work;
                            the daemon says so and exits, and systemd does not restart it
    ValueError              the client's, from SamplingParams: the message names the parameter and its range
    DevicesUnavailable      the machine's: another process has them, or they cannot be opened
    HostsError              the other hosts': they did not come, or have gone, or have got something else
    DeviceError             the device's (device_errors.py): what was in one step is lost, the engine goes on

Anything else is ours, and the end of the thread it comes up in.
"""


class ConfigurationError(Exception):
    """The daemon cannot serve with what it was given; the message says what to change."""


class DevicesUnavailable(Exception):
    """JAX could not take this machine's devices; the message has its reason."""


class HostsError(Exception):
    """The processes of an engine on several hosts do not go on together; the message says which of them, and why."""
