"""FlexOlmo: OLMoE with norms after attention and experts, as in OLMo 2."""

from functools import partial

from engine.models.families.olmoe import FIXED, OlmoeFields, olmoe
from engine.models.family import Family
from engine.models.spec import NormPlan

FAMILY = Family(
    "flex_olmo",
    "FlexOlmoForCausalLM",
    partial(olmoe, norms=NormPlan.AFTER),
    fields=OlmoeFields,
    defaults={"num_experts": 7, "num_experts_per_tok": 5, "rope_theta": 500_000.0, "eos_token_id": 100257},
    fixed=FIXED,
)
