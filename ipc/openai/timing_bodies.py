"""``timings``, by llama.cpp's names: how long an answer took."""

from msgspec import UNSET, Struct, UnsetType

from driver.request import Usage


class AnswerTimings(Struct, frozen=True):
    """Milliseconds and tokens: ``prompt_n`` were computed and ``cache_n`` found in the cache.

    ``predicted_per_second`` are the tokens after the first by ``predicted_ms``. ``queued_ms`` is
    ours: from the request's arrival until it was first part of a step.
    """

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_second: float
    queued_ms: float


def answer_timings(costs: list[Usage]) -> AnswerTimings | UnsetType:
    """Those of an answer to one prompt; several are computed side by side, and have none."""
    if len(costs) != 1 or costs[0].timings is None:
        return UNSET
    (cost,), took = costs, costs[0].timings
    num_computed = cost.prompt_tokens - cost.cached_tokens
    return AnswerTimings(
        cache_n=cost.cached_tokens,
        prompt_n=num_computed,
        prompt_ms=_milliseconds(took.prefill_time_s),
        prompt_per_second=round(num_computed / took.prefill_time_s, 3) if took.prefill_time_s > 0 else 0.0,
        predicted_n=cost.completion_tokens,
        predicted_ms=_milliseconds(took.decode_time_s),
        predicted_per_second=round(took.tokens_per_second, 3),
        queued_ms=_milliseconds(took.queue_time_s),
    )


def _milliseconds(seconds: float) -> float:
    return round(1000 * seconds, 3)
