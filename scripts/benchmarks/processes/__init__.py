"""What runs beside a measurement: children, daemons of ours, faulty ones, and a daemon of a model that is nothing."""
