"""How many pages to keep free at admission, so that those who run can grow without taking pages from each other."""

WATERMARK = 0.01
"""Share of the pool that is kept free whatever is expected."""
LEAST = 0.1
"""Share of what may yet be generated that is expected at least: most requests end long before their ``max_tokens``."""
STEP_UP = 0.2
"""What a preemption adds to that share: the expectation was wrong."""
STEPS_DOWN = 600
"""Steps after which a share of one would be back at zero, if all goes well. SGLang's figure for the same purpose."""


class GrowthReserve:
    """Expects a share of the tokens that running sequences may yet generate, more after each famine and less as time goes by.

    With a share of one, nobody is ever preempted for pages, and much of the pool lies idle; with none, a burst of short
    prompts is admitted whose outputs do not fit, and they preempt each other time and again.
    """

    def __init__(self, num_pages: int, *, watermark: float = WATERMARK, least: float = LEAST) -> None:
        self._watermark = max(1, int(num_pages * watermark)) if watermark else 0
        self._least = least
        self._share = least

    def pages(self, growth: int, num_sequences: int, page_size: int) -> int:
        """Pages to keep free where so many sequences may yet generate so many tokens; each has a page begun."""
        return self._watermark + int(self._share * (growth + num_sequences * (page_size - 1))) // page_size

    def tighten(self) -> None:
        """There was a famine."""
        self._share = min(1.0, self._share + STEP_UP)

    def relax(self) -> None:
        """There was a step."""
        self._share = max(self._least, self._share - 1 / STEPS_DOWN)
