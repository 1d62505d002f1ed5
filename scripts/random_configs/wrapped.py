"""Configs whose text model is a part: beside one that sees."""

from scripts.random_configs.chance import VISION, Chance, Config, Families
from scripts.random_configs.dense import exaone4, gemma3, gemma4, ministral3, mistral, qwen2, qwen3
from scripts.random_configs.experts import llama4, qwen3_moe


def llama4_wrapped(chance: Chance) -> Config:
    vision = {**VISION, "model_type": "llama4_vision_model", "image_size": 28, "patch_size": 14}
    sizes = {"intermediate_size": 64, "vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16}
    return {"text_config": {"model_type": "llama4_text", **llama4(chance)}, "vision_config": {**vision, **sizes}}


def gemma3_wrapped(chance: Chance) -> Config:
    vision = {**VISION, "model_type": "siglip_vision_model", "image_size": 28, "patch_size": 14}
    tied = chance.some(tie_word_embeddings=chance.of(True, False))
    return {"text_config": {"model_type": "gemma3_text", **gemma3(chance)}, "vision_config": vision, **tied}


def qwen_vl_wrapped(chance: Chance) -> Config:
    kind, text = chance.of(("2", qwen2(chance)), ("2_5", qwen2(chance)), ("3", qwen3(chance)), ("3", qwen3_moe(chance)))
    model_type = f"qwen{kind}_vl{'_moe' * ('num_experts' in text)}"
    size = text.pop("head_dim", None) if kind != "3" else text.setdefault("head_dim", 16)
    pairs = (size if kind == "3" else text["hidden_size"] // text["num_attention_heads"]) // 2
    rope = {"mrope_section": [pairs - 2, 1, 1], **chance.some(mrope_interleaved=kind == "3")}
    if "rope_parameters" in text:
        text["rope_parameters"] |= rope
    else:
        text["rope_scaling"] = {
            "type": "default" if kind == "3" else "mrope",
            **(text.get("rope_scaling") or {}),
            **rope,
        }
    sizes = {"depth": 1, "embed_dim": 16, "num_heads": 1, "intermediate_size": 16, "patch_size": 14}
    vision = {
        **sizes,
        "hidden_size": 16 if kind != "2" else text["hidden_size"],
        "out_hidden_size": text["hidden_size"],
    }
    vision |= {"deepstack_visual_indexes": [0], "model_type": f"{model_type}_vision"}
    tied = chance.some(tie_word_embeddings=chance.of(True, False))
    text.pop("tie_word_embeddings", None)
    if kind != "3" and chance.of(True, False):
        return {**text, "model_type": model_type, "vision_config": vision, **tied}
    return {
        "text_config": {"model_type": f"{model_type}_text", **text},
        "vision_config": vision,
        "model_type": model_type,
        **tied,
    }


def mistral3_wrapped(chance: Chance) -> Config:
    vision = {**VISION, "model_type": "pixtral", "image_size": 28, "patch_size": 14, "head_dim": 16}
    text = chance.of({"model_type": "mistral", **mistral(chance)}, {"model_type": "ministral3", **ministral3(chance)})
    return {"text_config": text, "vision_config": vision, **chance.some(tie_word_embeddings=chance.of(True, False))}


def exaone4_5_wrapped(chance: Chance) -> Config:
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 1, "num_key_value_heads": 1}
    text = {"model_type": chance.of("exaone4", "exaone4_5_text"), **exaone4(chance)}
    return {"text_config": text, "vision_config": {**vision, "out_hidden_size": text["hidden_size"]}}


def gemma4_unified_wrapped(chance: Chance) -> Config:
    vision = {
        "patch_size": 2,
        "pooling_kernel_size": 1,
        "mm_embed_dim": 16,
        "mm_posemb_size": 4,
        "output_proj_dims": 16,
    }
    text = {"model_type": "gemma4_unified_text", **gemma4(chance)}
    tied = chance.some(tie_word_embeddings=chance.of(True, False))
    return {"text_config": text, "vision_config": vision, "audio_config": {"audio_embed_dim": 8}, **tied}


FAMILIES: Families = {
    "llama4": llama4_wrapped,
    "gemma3": gemma3_wrapped,
    "mistral3": mistral3_wrapped,
    "exaone4_5": exaone4_5_wrapped,
    "gemma4_unified": gemma4_unified_wrapped,
    "qwen_vl": qwen_vl_wrapped,
}
