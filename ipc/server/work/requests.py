"""From a client's messages to requests of the driver."""

from driver.request import ActiveRequest, TokenizerRequest
from ipc.server.driver_protocol import Driver
from ipc.server.outbox import Reply
from ipc.sockets.tenants import Tenant
from ipc.wire.messages import Detokenize, Generate, Tokenize

Question = Generate | Tokenize | Detokenize
"""A message that is answered until a last message."""


def submit(driver: Driver, message: Question, reply: Reply, tenant: Tenant, num_bytes: int) -> int | None:
    """Submit a request, of a message of so many bytes; returns its prompt's tokens, about, or None
    for a tokenizer's.

    Raises DriverError where the driver refuses it.
    """
    fields = {name: getattr(message, name) for name in message.__struct_fields__}
    fields |= {"request_id": reply.driver_id, "channel": reply}
    fields |= {"client": tenant.name or reply.identity.hex(), "num_bytes": num_bytes}
    fields["adapters"] = tenant.adapters
    if not isinstance(message, Generate):
        driver.submit_tokenizer_request(TokenizerRequest(**fields))
        return None
    del fields["stream"]
    request = ActiveRequest(**fields, tenant=tenant.name)
    driver.submit_request(request)
    return request.estimated_tokens
