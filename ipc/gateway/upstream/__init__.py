"""The daemons behind the gateway: each of them, the choice of one, and the replicas that go on with a request."""
