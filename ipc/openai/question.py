"""What a body asks of the daemon, and why one is refused."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from driver.errors import shortened
from ipc.errors import RequestFailed
from ipc.openai.answer_format import AnswerFormat
from ipc.openai.field_names import naming
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
    those in which the body says the form of the text, and ``names`` those of its fields that have
    another at the daemon, by that.
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
    names: Mapping[str, str] = {}

    @contextmanager
    def naming(self) -> Iterator[None]:
        """Errors that come within name fields as the body does: raises BodyError for one about the form, whoever finds
        it."""
        try:
            with naming(self.names):
                yield
        except (BodyError, RequestFailed) as error:
            of_form = self.form_fields.named(str(error), self.params.get(FORM, {}).get("grammar", ""))
            if of_form is None:
                raise
            raise BodyError(*of_form) from error

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
