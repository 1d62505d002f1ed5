"""Drafts for requests with adapters: verified by their own adapter, heads included."""

import json

import pytest
from adapter_engines import GOLDENS, TOLERANCE, Answers, request
from adapter_files import ADAPTERS, write_adapter
from checkpoints import build_checkpoint
from test_draft_model import config_of
from test_speculative_engine import MAX_MODEL_LEN, SPECULATION, build_engine


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_requests_with_adapters_and_drafts_are_given_what_torch_gives(tmp_path, method):
    """More adapters than slots, in steps whose rows have several tokens; the model that drafts has no adapter."""
    cases = json.loads((GOLDENS / "llama2.json").read_text())["cases"]
    model = build_checkpoint(tmp_path / "model", "llama2", max_position_embeddings=MAX_MODEL_LEN)
    speculation = SPECULATION if method == "ngram" else config_of(model)
    engine = build_engine(model, speculation, num_pages=40, enable_lora=True, max_loras=3, max_lora_rank=64)
    uids = {"": 0}
    for name, kind in ADAPTERS["llama2"].items():
        adapter = engine.read_adapter(str(write_adapter(tmp_path / name, "llama2", kind)))
        engine.add_adapter(adapter)
        uids[name] = adapter.uid
    for number, case in enumerate(cases):
        engine.add(request(str(number), case, uids[case["adapter"]]))

    answers = Answers().run(engine)

    for number, case in enumerate(cases):
        answers.assert_golden(str(number), case, TOLERANCE)
    assert engine.stats().num_accepted_tokens > 0
