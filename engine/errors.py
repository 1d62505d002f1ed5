"""Errors below the driver, by whose fault they are.

    ConfigurationError      the operator's: an invalid model directory, flag or machine;
                            the daemon logs it and exits, and systemd does not restart it
    DownloadFailed          the network's: a model did not come; systemd tries again
    ValueError              the client's, from SamplingParams: it names the parameter and its range
    AdapterError            the client's: an adapter cannot be served (adapters/adapter.py)
    DevicesUnavailable      the machine's: its devices are in use, or cannot be opened
    HostsError              another host's: it did not connect, has gone, or got other results
    DeviceError             the device's (device_errors.py): one step is lost, the engine goes on

Any other exception is a bug of ours and ends its thread.
"""


class ConfigurationError(Exception):
    """The daemon cannot serve with its configuration. The message says what to change."""


class DevicesUnavailable(Exception):
    """JAX could not take this machine's devices. The message has its reason."""


class HostsError(Exception):
    """The processes of a multi-host engine cannot continue. The message says which one and why."""


class DownloadFailed(ConfigurationError):
    """A model could not be read from the network. The same configuration may work later."""
