"""The FedPass of a draft head of any kind."""

from caching.metadata import PagedAttentionCacheMetaData
from engine.models.decoder import Decoder
from engine.models.heads.assistant import Assistant
from engine.models.heads.draft_head import DraftHead
from engine.step.backend import Backend
from engine.step.drafts.assistant_pass import AssistantPass
from engine.step.drafts.draft_pass import FedPass
from engine.step.drafts.head_pass import HeadPass


def fed_pass(
    head: DraftHead, model: Decoder, backend: Backend, pool: PagedAttentionCacheMetaData, max_model_len: int
) -> FedPass:
    """See AssistantPass and HeadPass."""
    if isinstance(head, Assistant):
        return AssistantPass(head, model, backend, pool, max_model_len)
    return HeadPass(head, model, backend, pool, max_model_len)
