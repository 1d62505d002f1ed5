"""What a body asks of the daemon, and why one is refused."""

from collections.abc import Collection
from typing import Any, NamedTuple

from driver.errors import shortened
from ipc.openai.answer_format import AnswerFormat
from ipc.openai.form_fields import FORM, FormFields

Prompt = str | list[int]


class BodyError(Exception):
    """A body that asks for something not served here, with OpenAI's ``status`` and ``code``."""

    def __init__(
        self, message: str, param: str | None = None, status: int = 400, code: str = "invalid_request"
    ) -> None:
        super().__init__(shortened(message))
        self.param = None if param is None else shortened(param)
        self.status = status
        self.code = code


class Question(NamedTuple):
    """A question for our client: a prompt or messages, SamplingParams, and template options.

    ``hints`` are OpenAI's options of how a model is to write, which some chat templates read.
    Without ``add_special_tokens`` a prompt has no special tokens around it. ``form_fields`` are
    those in which the body says the form of the text.
    """

    prompt: Prompt | None
    messages: list[dict[str, Any]] | None
    params: dict[str, Any]
    answer_format: AnswerFormat = AnswerFormat()
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    hints: dict[str, Any] = {}  # noqa: RUF012  # nobody changes it
    add_special_tokens: bool = True
    form_fields: FormFields = FormFields()

    def form_error(self, message: str) -> BodyError | None:
        """A daemon's error about the form, which names it as the body does; None for one about something else."""
        found = self.form_fields.named(message, self.params.get(FORM, {}).get("grammar", ""))
        return None if found is None else BodyError(*found)

    def hinted(self, template_names: Collection[str]) -> "Question":
        """With the hints that a template with these names reads as switches of it.

        Reasoning effort "none" turns a template's ``enable_thinking`` off. A switch that the
        request sets itself stays as it is.
        """
        switches = {name: value for name, value in self.hints.items() if name in template_names}
        thinks = self.hints.get("reasoning_effort") != "none"
        if not thinks and "reasoning_effort" not in switches and "enable_thinking" in template_names:
            switches["enable_thinking"] = False
        return self._replace(chat_template_kwargs={**switches, **(self.chat_template_kwargs or {})} or None)
