"""The cost of tenants' requests, charged when the work is done.

A prompt is charged when its request is accepted, by an estimate that the last sample corrects.
Output is charged as the driver makes it, read or not: a client that disconnects pays for all work
done before the abort took effect. A tokenizer's request costs nothing, and counts as open.
"""

from dataclasses import dataclass, field

from driver.request import Usage
from ipc.server.outbox import Reply
from ipc.sockets.tenants import Quota, Tenant


@dataclass
class _Charge:
    """For one request, in tokens."""

    prompt: int
    output: int = 0


@dataclass
class _Account:
    """The account of one tenant, as the tenant was at its last request."""

    tenant: Tenant
    quota: Quota
    charges: dict[Reply, _Charge | None] = field(default_factory=dict)
    """By request, until its last sample has come; None of one that costs nothing."""
    uncharged: set[Reply] = field(default_factory=set)
    """Those that may have made output since the last charge. Any thread adds, the ledger's takes."""

    def charge_output(self) -> None:
        """Charge the output made since the last call."""
        while self.uncharged:
            reply = self.uncharged.pop()
            if (charge := self.charges.get(reply)) is not None:
                num_tokens = reply.num_tokens
                self.quota.spend(num_tokens - charge.output)
                charge.output = num_tokens


class Ledger:
    """The accounts of tenants with limits, by name, whatever connections they have; times are in
    seconds.

    An account is forgotten when nothing of it is open and all that was used has drained away.
    """

    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}
        self._open: dict[Reply, _Account] = {}

    def __len__(self) -> int:
        return len(self._accounts)

    def refusal(self, tenant: Tenant, now: float, *, spends: bool = True) -> tuple[str, float | None] | None:
        """Why a tenant may open no more requests now that spend tokens or not, and in how many
        seconds it may."""
        account = self._accounts.get(tenant.name)
        if account is None:
            return None
        account.tenant = tenant
        if tenant.limits is not None and tenant.limits.tokens_per_minute is not None:
            account.charge_output()
        return account.quota.refusal(tenant, len(account.charges), now, spends=spends)

    def open(self, tenant: Tenant, reply: Reply, num_prompt_tokens: int | None, now: float) -> None:
        """Charge an accepted request's prompt, of about so many tokens; None is a request that
        costs nothing."""
        if tenant.limits is None:
            return
        account = self._accounts.get(tenant.name)
        if account is None:
            account = self._accounts[tenant.name] = _Account(tenant, Quota(now))
        self._open[reply] = account
        if num_prompt_tokens is None:
            account.charges[reply] = None
            return
        account.charges[reply] = _Charge(num_prompt_tokens)
        account.quota.spend(num_prompt_tokens)
        reply.uncharged = account.uncharged
        account.uncharged.add(reply)  # it may have made output before it was open

    def close(self, reply: Reply, usage: Usage | None) -> None:
        """Close a request after its last sample; without usage its charge stays."""
        account = self._open.pop(reply, None)
        if account is None:
            return
        reply.uncharged = None
        account.uncharged.discard(reply)
        charge = account.charges.pop(reply)
        if charge is None:
            return
        cost = charge.prompt + reply.num_tokens if usage is None else usage.prompt_tokens + usage.completion_tokens
        account.quota.spend(cost - charge.prompt - charge.output)

    def forget(self, now: float) -> None:
        """Drop the accounts that are as if they were new."""
        self._accounts = {
            name: account
            for name, account in self._accounts.items()
            if account.charges or not account.quota.has_drained(account.tenant, now)
        }
