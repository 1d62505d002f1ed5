"""Whether pages of a prefix are copied from the host's memory or computed again."""

KEPT = 0.9
"""The share that what was learned before keeps beside a new step."""


class CopyCost:
    """Copying beats computing if it keeps the sequence waiting for a shorter time.

    A page takes ``page_seconds`` from the host to the device, behind those that wait for the same
    link, and a recurrent state ``state_seconds``. A token takes what it takes in steps that are at
    least half full, most of it with prompts: ``full_step`` tokens are a full one. Until there is
    such a step copying counts as the faster. That copies leave the device to others meanwhile, and
    computing does not, is not counted.
    """

    def __init__(self, page_seconds: float, full_step: int, state_seconds: float = 0.0) -> None:
        self.page_seconds = page_seconds
        self.state_seconds = state_seconds
        self.token_seconds = 0.0
        """0 until it is learned."""
        self._full_step = full_step

    def learn(self, num_prompt_tokens: int, num_tokens: int, seconds: float) -> None:
        """A step of ``num_tokens``, so many of them of prompts, took the device so long."""
        if 2 * num_prompt_tokens >= num_tokens and 2 * num_tokens >= self._full_step:
            last = seconds / num_tokens
            self.token_seconds = KEPT * self.token_seconds + (1 - KEPT) * last if self.token_seconds else last

    def pays(self, num_pages: int, num_tokens: int, num_states: int = 0) -> bool:
        """Whether so many pages and states are copied sooner than the tokens that they save are
        computed."""
        copying = num_pages * self.page_seconds + num_states * self.state_seconds
        return not self.token_seconds or copying < num_tokens * self.token_seconds
