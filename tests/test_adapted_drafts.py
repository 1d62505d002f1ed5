"""Drafts for requests with adapters: verified by their own adapter, heads included."""

import json

import pytest
from adapter_engines import GOLDENS, TOLERANCE, Answers, request
from adapter_files import ADAPTERS, write_adapter
from checkpoints import build_checkpoint
from head_checkpoints import build_head
from mtp_checkpoints import SPECULATION as OF_LAYER
from mtp_checkpoints import build_predicting
from test_draft_head import config_of as config_of_head
from test_draft_model import config_of
from test_speculative_engine import MAX_MODEL_LEN, SPECULATION, build_engine

HEADS = ("eagle3", "mtp")


@pytest.mark.thorough
@pytest.mark.parametrize(
    "method", ["ngram", "draft_model", *(pytest.param(each, marks=pytest.mark.exhaustive) for each in HEADS)]
)
def test_requests_with_adapters_and_drafts_are_given_what_torch_gives(tmp_path, method):
    """More adapters than slots, in steps whose rows have several tokens; what drafts has no adapter."""
    variant = "deepseek_v3" if method == "mtp" else "llama2"
    cases = json.loads((GOLDENS / f"{variant}.json").read_text())["cases"]
    if method == "mtp":
        model, speculation = build_predicting(tmp_path / "model", "mtp of DeepSeek"), OF_LAYER
    else:
        model = build_checkpoint(tmp_path / "model", variant, max_position_embeddings=MAX_MODEL_LEN)
        speculation = SPECULATION if method == "ngram" else config_of(model)
    if method == "eagle3":
        head = build_head(tmp_path / "head", "authors", eagle_aux_hidden_state_layer_ids=[0, 1, 2])
        speculation = config_of_head(head)
    engine = build_engine(model, speculation, num_pages=40, enable_lora=True, max_loras=3, max_lora_rank=64)
    uids = {"": 0}
    for name, kind in ADAPTERS[variant].items():
        adapter = engine.read_adapter(str(write_adapter(tmp_path / name, variant, kind)))
        engine.add_adapter(adapter)
        uids[name] = adapter.uid
    for number, case in enumerate(cases):
        engine.add(request(str(number), case, uids[case["adapter"]]))

    answers = Answers().run(engine)

    for number, case in enumerate(cases):
        answers.assert_golden(str(number), case, TOLERANCE)
    assert engine.stats().num_draft_tokens > 10
    assert (engine.stats().earlier_salts == len(uids)) == (method == "ngram")
    for uid in filter(None, uids.values()):
        engine.remove_adapter(uid)
    assert engine.stats().earlier_salts == (method == "ngram")  # of the model itself
    assert engine.stats().num_accepted_tokens > 0 or method in HEADS  # of which no weight is trained
