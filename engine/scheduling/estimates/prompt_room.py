"""How long a step with prompts may take for the sake of others: of decoding rows, which wait for
their next token, and of prompts that have not come yet."""

from engine.scheduling.estimates.step_costs import StepCosts

TIMES = 3
"""How many times as long as without prompts a step may take, unless the operator says how long."""
LEAST_SHARE = 32
"""Of its budget of tokens a step has one in so many for prompts, whatever that costs: the longest
prompt is computed in the end."""
FLOOD = 8
"""Full steps of prompts that wait, beyond which steps are no longer than pays: those who wait do so
for long, and somebody with a short prompt may come at any moment."""
LOSS = 0.05
"""What a token may cost more in such a step than in a full one, as a part of that."""


class PromptRoom:
    """Bounds what prompts get of a step, in learned time.

    ``seconds`` is what a step with decoding rows may take; None is TIMES the cost of the same rows
    alone. Where not even the least share of prompts costs so little, steps take longer than that,
    and no longer than they must.
    """

    def __init__(self, costs: StepCosts, max_num_batched_tokens: int, seconds: float | None) -> None:
        self._costs = costs
        self._budget = max_num_batched_tokens
        self._least = max(1, max_num_batched_tokens // LEAST_SHARE)
        self._seconds = seconds

    def alone(self, num_waiting: int) -> int:
        """Tokens for prompts of a step without decoding rows, where so many tokens of prompts wait."""
        return self._costs.least_tokens(self._budget, LOSS) if num_waiting > FLOOD * self._budget else self._budget

    def beside(self, num_tokens: int, passes: int) -> int | None:
        """Tokens for prompts beside decoding rows that have so many, and so many passes of a draft
        model; None before costs are known."""
        alone, drafting = self._costs.seconds(num_tokens, passes), self._costs.drafting_seconds(passes)
        if alone is None or drafting is None:
            return None
        seconds = TIMES * alone if self._seconds is None else self._seconds
        most = self._costs.most_tokens(seconds - drafting)
        return max(0, min(max(most - num_tokens, self._least), self._budget - num_tokens))
